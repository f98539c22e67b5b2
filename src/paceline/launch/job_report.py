"""The report of a job as JSON, for ``paceline run --report FILE``: how it ended, and each failure along the way.

    ok          true or false; null while the job runs, and permanently if the launcher was killed
    exit_code   exit code of the launcher; null when ``ok`` is null
    restarts    number of times that all ranks have been restarted
    steps_redone
                completed optimizer steps that had to be computed again after failures, as counted by Checkpointers
    rescued_from
                source of the last restart's state: "memory" or "disk"; null if it started from scratch or if there was
                no restart
    changes     changes to the ranks, in order:
        time        time of the decision, in seconds since the epoch
        from, to    number of ranks before and after; equal if ranks only moved to other slots
        why         the reason that the launcher prints
        steps_redone
                    completed steps that the next start computed again; null until that start has ended
    failures    failed starts of the ranks, in order:
        attempt     0 for the first start
        time        time of the first failure, in seconds since the epoch
        summary     the sentence that the launcher prints
        first       the rank that failed first, or caused the failure by leaving early or being absent; null if unknown
        others      the other ranks that ended, in order

Every rank has ``rank``, ``host``, ``kind``, ``exit_code`` or ``signal``, ``exception`` with ``type``
and ``message``, ``traceback``, ``step`` (the job's step, from 1), ``phase``, ``phase_seconds``, ``bucket``, ``hang``
and ``stacks``. Values that do not apply are null.

``kind`` is ``exception``, ``signal`` or ``exit code`` for a rank that failed by itself, ``hang`` if the launcher killed
it because it made no progress, ``consequence`` if it failed because of another rank, ``left`` if it exited without an
error, ``absent`` if it kept the others waiting, and ``stopped`` if the launcher terminated it.
"""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.core.messages import signal_name
from paceline.core.output_files import check_file, write_file
from paceline.errors import UsageError
from paceline.launch.failure_record import Record
from paceline.launch.root_cause import UNKNOWN, End, failures, headline, missed
from paceline.launch.verdict import Change

OPTION = "--report"
_CLASS = re.compile(r"([A-Za-z_][\w.]*): ?(.*)", re.DOTALL)


class JobReport:
    """The report file. It is written when the job begins, after each failure, and when the job ends.

    Args:
        file: the file to write; None for no report.
        say: prints a message if the file can no longer be written.
    """

    def __init__(self, file: str | None, say: Callable[[str], None]) -> None:
        check_file(OPTION, file)
        self._file, self._say = file, say
        self._failures: list[dict[str, Any]] = []
        self._changes: list[dict[str, Any]] = []
        self._restarts = 0
        self._steps_redone = 0
        self._rescued_from: str | None = None
        self._write(None)

    def failed(self, ends: Sequence[End]) -> None:
        """Add a failed start of the ranks."""
        self._failures.append({"attempt": self._restarts} | failure_of(ends, platform.node()))
        self._write_late(None)

    def note_progress(self, steps_redone: int, rescued_from: str | None) -> None:
        """Record the progress that the ranks of the current start have reported."""
        if self._changes and self._changes[-1]["steps_redone"] is None:
            self._changes[-1]["steps_redone"] = max(0, steps_redone - self._steps_redone)
        self._steps_redone, self._rescued_from = steps_redone, rescued_from

    def restarted(self, change: Change | None = None) -> None:
        """Count a restart of all ranks, and record the change in their number or slots, if any."""
        self._restarts += 1
        if change is not None:
            numbers = {"from": change.before, "to": change.after}
            self._changes.append({"time": time.time(), **numbers, "why": change.why, "steps_redone": None})
        self._write_late(None)

    def end(self, exit_code: int) -> int:
        """Write how the job ended; return the exit code, or 2 instead of 0 if the report cannot be written."""
        return exit_code if self._write_late(exit_code) else exit_code or 2

    def _write_late(self, exit_code: int | None) -> bool:
        try:
            self._write(exit_code)
        except UsageError as error:
            self._say(f"error: {error}")
            return False
        return True

    def _write(self, exit_code: int | None) -> None:
        content = {
            "ok": None if exit_code is None else exit_code == 0,
            "exit_code": exit_code,
            "restarts": self._restarts,
            "steps_redone": self._steps_redone,
            "rescued_from": self._rescued_from if self._restarts else None,
            "changes": self._changes,
            "failures": self._failures,
        }
        write_file(OPTION, self._file, json.dumps(content, indent=2) + "\n")


def failure_of(ends: Sequence[End], host: str) -> dict[str, Any]:
    """Return the report entry for a failed start of the ranks on `host`."""
    failed, early_exits = failures(ends), missed(ends)
    first = next(iter(early_exits or failed), None)
    entries = {end.rank: _entry(end, _kind(end, first, early_exits), host) for end in ends}
    return {
        "time": first.when if first else None,
        "summary": headline(ends),
        "first": entries.pop(first.rank) if first else None,
        "others": [entries[rank] for rank in sorted(entries)],
    }


def _kind(end: End, first: End | None, early_exits: Sequence[End]) -> str:
    if end.has_left:
        return "left"
    if end.stopped and end.record is None:
        return "absent" if end in early_exits else "stopped"
    if end.suspicion and end is not first:
        return "consequence"
    if end.hang:
        return "hang"
    if end.record is not None:
        return "exception"
    return "signal" if end.code < 0 else "exit code"


def _entry(end: End, kind: str, host: str) -> dict[str, Any]:
    state, has_code = end.state, not end.stopped and 0 <= end.code < UNKNOWN
    is_killed = end.code < 0 and not (end.stopped or end.hang)
    return {
        "rank": end.rank,
        "host": host,
        "kind": kind,
        "exit_code": end.code if has_code else None,
        "signal": signal_name(-end.code) if is_killed else None,
        "exception": exception_of(end.record) if end.record else None,
        "traceback": end.record.trace if end.record else None,
        "step": state.step if state else None,
        "phase": state.phase if state else None,
        "phase_seconds": round(state.seconds, 6) if state else None,
        "bucket": state.bucket if state else None,
        "hang": end.hang or None,
        "stacks": end.stacks or None,
    }


def exception_of(record: Record) -> dict[str, str | None]:
    """Return the class, if known, and the message of the exception that a rank recorded."""
    if record.usage:
        return {"type": "UsageError", "message": record.message}
    match = _CLASS.fullmatch(record.message)
    return {"type": match[1] if match else None, "message": match[2] if match else record.message}
