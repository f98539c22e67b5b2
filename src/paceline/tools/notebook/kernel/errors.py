"""The words for a failed cell, made from plain values."""

from __future__ import annotations

from paceline.core.processes.missing_ranks import named_ranks
from paceline.errors import PacelineError
from paceline.tools.notebook.kernel.execution import Outcome
from paceline.tools.notebook.messages import Failure


class Shown(PacelineError):
    """An error that the notebook shows as these lines, without a traceback of the kernel."""

    def __init__(self, name: str, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.name, self.lines = name, lines

    def _render_traceback_(self) -> list[str]:
        return self.lines


def problem(outcome: Outcome, size: int) -> Shown | None:
    """Return the failure of a cell with this `outcome` on a world of `size` ranks; None if it did not fail.

    Tracebacks come first, for the ranks whose error is no consequence of another's; the last line is the summary.
    """
    own = {
        rank: failure
        for rank, failure in outcome.failures.items()
        if not (failure.is_interrupt and (outcome.interrupted or rank in outcome.waits))
    }
    causes = {rank: failure for rank, failure in own.items() if not failure.breaks_group} or (
        {} if outcome.deaths else own
    )
    consequences = {rank: failure for rank, failure in own.items() if rank not in causes}
    lines: list[str] = []
    for failure, ranks in _grouped(causes):
        lines += [f"{_who(ranks, size)} raised {failure.name}:", *failure.trace]
    for rank, how in sorted(outcome.deaths.items()):
        if rank not in outcome.killed:
            lines.append(f"rank {rank} died: {how}")
        elif rank not in outcome.waits:
            lines.append(f"rank {rank} did not heed the interrupt, and was killed")
    for failure, ranks in _grouped(consequences):
        first = failure.message.strip().partition("\n")[0]
        lines.append(f"{_who(ranks, size)} failed because of that ({failure.name}: {first})")
    for rank, where in sorted(outcome.waits.items()):
        how = "killed because it did not heed an interrupt" if rank in outcome.killed else "stopped"
        lines.append(f"rank {rank} {where}, and was {how}")
    if outcome.interrupted:
        lines.append("interrupted: all ranks have stopped")
    if not lines:
        return None
    if causes:
        name = min(causes.items())[1].name
    elif outcome.interrupted:
        name = "KeyboardInterrupt"
    else:
        name = "RankDied" if outcome.deaths.keys() - outcome.killed else "DesyncError"
    return Shown(name, lines)


def replaced(ranks: list[int], size: int) -> list[str]:
    """Return the message for when ranks were replaced, perhaps none, and all have a new process group."""
    group = "all ranks have a new process group: wrap models and make device meshes again"
    if not ranks:
        return [f"{group}; variables are kept"]
    who = _who(ranks, size)
    was, has, needs = ("was", "it has", "it needs") if len(ranks) == 1 else ("were", "they have", "they need")
    return [f"{who} {was} replaced: {has} no variables yet, so run again the cells that {needs}; {group}"]


def _grouped(failures: dict[int, Failure]) -> list[tuple[Failure, list[int]]]:
    """Return the different failures, each with its ranks, that of the first rank first."""
    found: dict[tuple[str, ...], tuple[Failure, list[int]]] = {}
    for rank, failure in sorted(failures.items()):
        key = (failure.name, failure.message, *failure.trace)
        found.setdefault(key, (failure, []))[1].append(rank)
    return list(found.values())


def _who(ranks: list[int], size: int) -> str:
    return f"all {size} ranks" if len(ranks) == size > 1 else named_ranks(ranks)
