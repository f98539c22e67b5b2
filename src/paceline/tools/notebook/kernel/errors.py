"""Error messages for a failed cell."""

from __future__ import annotations

from paceline.core.processes.missing_ranks import named_ranks
from paceline.errors import PacelineError
from paceline.tools.notebook.kernel.execution import Outcome
from paceline.tools.notebook.messages import Failure


class Shown(PacelineError):
    """An error that the notebook shows as `lines`, without the kernel's traceback."""

    def __init__(self, name: str, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.name, self.lines = name, lines

    def _render_traceback_(self) -> list[str]:
        return self.lines


def problem(outcome: Outcome, size: int) -> Shown | None:
    """Return the error to show for a cell on a world of `size` ranks, or None if the cell succeeded.

    Original errors come first, with their tracebacks. A failure caused by another rank is shown in one line.
    """
    failures = {
        rank: failure
        for rank, failure in outcome.failures.items()
        if not (failure.is_interrupt and (outcome.interrupted or rank in outcome.waits))
    }
    causes = {rank: failure for rank, failure in failures.items() if not failure.breaks_group} or (
        {} if outcome.deaths else failures
    )
    consequences = {rank: failure for rank, failure in failures.items() if rank not in causes}
    lines: list[str] = []
    for failure, ranks in _grouped(causes):
        lines += [f"{_who(ranks, size)} raised {failure.name}:", *failure.trace]
    for rank, how in sorted(outcome.deaths.items()):
        if rank not in outcome.killed:
            lines.append(f"rank {rank} died: {how}")
        elif rank not in outcome.waits:
            lines.append(f"rank {rank} ignored the interrupt and was killed")
    for failure, ranks in _grouped(consequences):
        first = failure.message.strip().partition("\n")[0]
        lines.append(f"{_who(ranks, size)} failed as a result ({failure.name}: {first})")
    for rank, where in sorted(outcome.waits.items()):
        how = "killed, because it ignored the interrupt" if rank in outcome.killed else "interrupted"
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
    """Return the line to show once all ranks have a new process group; `ranks` were restarted."""
    group = "all ranks have a new process group: wrap models and create device meshes again"
    if not ranks:
        return [f"{group}; variables are kept"]
    who = _who(ranks, size)
    return [f"{who} restarted without variables: rerun the cells that define them. {group.capitalize()}"]


def _grouped(failures: dict[int, Failure]) -> list[tuple[Failure, list[int]]]:
    """Return each distinct failure with its ranks, ordered by lowest rank."""
    groups: dict[tuple[str, ...], tuple[Failure, list[int]]] = {}
    for rank, failure in sorted(failures.items()):
        key = (failure.name, failure.message, *failure.trace)
        groups.setdefault(key, (failure, []))[1].append(rank)
    return list(groups.values())


def _who(ranks: list[int], size: int) -> str:
    return f"all {size} ranks" if len(ranks) == size > 1 else named_ranks(ranks)
