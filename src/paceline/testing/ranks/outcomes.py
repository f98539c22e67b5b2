"""The outcome of a test, determined by how its ranks ended."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.output.wording import signal_name
from paceline.core.processes.missing_ranks import named_ranks, ranks_by_value
from paceline.core.telemetry.users_code import is_users
from paceline.testing.ranks.recorded_collectives import ONE_TO_ONE, Calls, unmatched

FRAME = re.compile(r'File "(.+)", line (\d+) in (\S+)')
MACHINERY = ["/_pytest/", "/pluggy/", "/pytest/__main__", "/pytest_paceline.py", "<frozen runpy>"]
MACHINERY += [str(Path(__file__).parents[1])]
"""Parts of file paths. Frames of files whose path contains one of them are omitted from a stack."""
LEFT_OUT = ("skipped", "xfailed")
"""Kinds of outcomes, of ``pytest.skip`` and ``pytest.xfail``, that must be the same on all ranks."""


@dataclass
class Outcome:
    """The outcome of the test on a rank, as reported by the rank."""

    kind: str
    """``passed``, ``failed``, ``skipped``, ``xfailed`` or ``exit``."""
    message: str = ""
    """Message of the exception, in one line."""
    report: Any = None
    """pytest's report of the exception, or text."""
    error: bytes | None = None
    """Pickled exception, if it can be pickled."""
    is_consequence: bool = False
    """Whether the exception is about a failed collective, possibly as a consequence of another rank's failure."""
    returncode: int | None = None
    """Exit code given to ``pytest.exit``."""
    sections: list[tuple[str, str]] = field(default_factory=list)
    """Captured output: the kind, such as ``stdout``, and the text."""
    warnings: list[tuple[str, bytes, str, int]] = field(default_factory=list)
    """Warnings: text, pickled category, file and line."""
    properties: list[tuple[str, object]] = field(default_factory=list)
    """Properties recorded with ``record_property``."""
    calls: Calls = field(default_factory=dict)


@dataclass
class Ending:
    """How a rank ended, as seen by the test process."""

    rank: int
    outcome: Outcome | None = None
    """The rank's report; None if it did not finish."""
    code: int | None = None
    """Exit code (negative for a signal) of a rank that died without being killed by the test process."""
    ordered: str = ""
    """Description of the fault that the test used to end the rank; empty if there was none."""
    doing: str = ""
    """One line about the rank's position when waiting ended."""
    stack: str = ""
    when: float = 0.0
    """When the rank ended, in seconds after the start."""


@dataclass
class Verdict:
    """The test's result."""

    kind: str
    """``passed``, or one of the kinds of :class:`Outcome`."""
    first: Ending | None = None
    """Ending of the rank that failed first, if that rank reported an exception."""
    message: str = ""
    """One-line message that names the rank."""


def judge(endings: Sequence[Ending], timeout: float, deadlock: str = "") -> Verdict:
    """Return the test's outcome, given how ranks 0, 1, … ended. `deadlock` describes a deadlock that ended the wait."""
    outcomes = {ending.rank: ending.outcome for ending in endings if ending.outcome is not None}
    if leaving := [e for e in endings if e.outcome and e.outcome.kind == "exit"]:
        return Verdict("exit", leaving[0], outcomes[leaving[0].rank].message)
    dead = [e for e in endings if e.code is not None and not e.ordered]
    failed = [e for e in endings if e.outcome and e.outcome.kind == "failed"]
    own_failures = [e for e in failed if not outcomes[e.rank].is_consequence]
    disagreement = _disagreement(endings)
    # A failed collective is a consequence of another rank's error or death, so look for these causes first.
    for causes in (own_failures + dead, [] if disagreement else failed):
        if causes:
            first = min(causes, key=lambda e: e.when)
            if first.outcome is None:
                return Verdict("failed", None, f"{_died(first)} before the end of the test")
            return Verdict("failed", first, f"rank {first.rank}: {first.outcome.message}")
    if disagreement:
        return Verdict("failed", None, disagreement)
    silent = [e for e in endings if e.outcome is None and not e.ordered]
    if silent:
        where = "; ".join(f"rank {e.rank} {e.doing}" for e in silent)
        others = f"; {named_ranks(list(outcomes))} had finished" if outcomes else ""
        return Verdict("failed", None, f"{deadlock or f'no end within {timeout:g} s'}: {where}{others}")
    for ending in endings:
        if ending.outcome is not None and ending.outcome.kind in LEFT_OUT:
            return Verdict(ending.outcome.kind, ending, ending.outcome.message)
    if len(outcomes) == len(endings) and (difference := unmatched(_calls(outcomes))):
        return Verdict("failed", None, f"the test left a collective unmatched: {difference}")
    return Verdict("passed")


def _disagreement(endings: Sequence[Ending]) -> str:
    """Return a line that says which ranks skipped the test, if others did not; otherwise an empty string.

    Ranks that skip may make the other ranks wait or fail.
    """
    kinds = [(e.rank, e.outcome.kind if e.outcome is not None else "silent") for e in endings if not e.ordered]
    by_kind = ranks_by_value(kinds)
    left_out = {kind: ranks for kind, ranks in by_kind.items() if kind in LEFT_OUT}
    if not left_out or len(by_kind) == 1:
        return ""
    reasons = {e.rank: e.outcome.message for e in endings if e.outcome is not None}
    parts = [f"{named_ranks(ranks)} {kind} ({reasons[ranks[0]]})" for kind, ranks in left_out.items()]
    rest = [rank for rank, kind in kinds if kind not in LEFT_OUT]
    return (
        f"{', '.join(parts)}{f', and {named_ranks(rest)} did not' if rest else ''}; use a skip condition "
        "that is the same on all ranks, and return early on ranks without work"
    )


def others(endings: Sequence[Ending], first: Ending | None) -> list[tuple[str, str]]:
    """Return a title and a text for each rank other than `first`."""
    return [_other(ending, first) for ending in endings if ending is not first]


def _other(ending: Ending, first: Ending | None) -> tuple[str, str]:
    if ending.ordered:
        return f"the test ended rank {ending.rank}: {ending.ordered}", ""
    if ending.code is not None:
        return _died(ending), ending.stack
    if ending.outcome is None:
        return f"rank {ending.rank} {ending.doing}", ending.stack
    outcome = ending.outcome
    if outcome.kind == "failed":
        same = first is not None and first.outcome is not None and str(outcome.report) == str(first.outcome.report)
        if same:
            return f"rank {ending.rank} raised the same", ""
        return f"rank {ending.rank} also raised: {outcome.message}", str(outcome.report)
    return f"rank {ending.rank} {outcome.kind} after {ending.when:.2f} s", ""


def _died(ending: Ending) -> str:
    assert ending.code is not None
    if ending.code < 0:
        return f"rank {ending.rank} was killed by {signal_name(-ending.code)}"
    return f"rank {ending.rank} ended with exit code {ending.code}"


def _calls(outcomes: Mapping[int, Outcome]) -> dict[int, Calls]:
    return {rank: outcome.calls for rank, outcome in outcomes.items() if outcome.kind != "skipped"}


def own_frames(stack: str) -> str:
    """Return a stack without frames of pytest and of this package."""
    return "\n".join(line for line in stack.splitlines() if not any(part in line for part in MACHINERY))


def position(note: Mapping[str, Any], stack: str, has_begun: bool) -> str:
    """Describe a rank's position in one line, based on its latest recorded call and its Python stack."""
    if note.get("inside"):
        number = f", its collective {note['number']}" if note["call"] not in ONE_TO_ONE else ""
        return f"is in {note['call']}{number}, called at {note['place']}"
    for path, line, function in FRAME.findall(stack):
        if is_users(path):
            return f"is at {path.rpartition('/')[2]}:{line} in {function}"
    if not stack:
        return "does not answer" if has_begun else "has not joined the world"
    return "is in a library" if has_begun else "has not joined the world"
