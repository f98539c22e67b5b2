"""Whether ranks are started again after a failure, and from where they go on.

Restarts are counted only while nothing is gained: a start that completes a step that none had completed before sets the
count back. Progress is told by the ranks' step records, see :mod:`paceline.step_records`; ranks without them
are started again as often as the user said, and not at all by default.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.signals import sheltered
from paceline.step_records import (
    BEFORE,
    RESCUE,
    RESTARTS,
    STEPS,
    StepRecord,
    newest_step,
    present_records,
    spare_page,
)

LIMIT = 3
"""Starts without progress, by default."""
EARLY_S = 120.0
"""A start that is killed so soon, before a step is known of, has lost nothing."""
RESCUE_S = 5.0
"""How long the ranks that are left may take, beyond two steps, to notice the failure and save their last step."""
TOLD_S = 5.0
"""How long they may take once they are told, as they are by then."""
WRITING_S = 300.0
"""The same, once one of them is writing."""


@dataclass(frozen=True)
class Cause:
    """The cause of a failed start, as far as it says whether the next one would end in the same way.

    ``error`` is the first rank's own exception with its traceback, None if it ended otherwise. ``is_early_kill`` says
    that it was killed before any rank had completed a step.
    """

    error: str | None = None
    is_early_kill: bool = False


@dataclass(frozen=True)
class Reached:
    """How far a start of the ranks came with one checkpoint folder."""

    key: str
    """Of the folder."""
    restored: int
    """The step that it went on from."""
    completed: int
    """The last step that a rank completed; that which it went on from if there is none."""
    redone: int
    source: str | None
    rescued: int | None
    """The newest step in memory."""
    on_disk: int | None
    """The newest step in the checkpoint folder."""
    has_ended: bool
    """Whether all ranks had come to the end of their training."""
    pace: float
    """Seconds that the last step took."""
    is_unsaved: bool
    """Whether steps were to be saved on disk, and none was, by no start."""
    is_alone: bool
    """Whether a rank has stepped without the others, so that none can save the last step for all."""

    @property
    def is_rescued(self) -> bool:
        """Whether the last step is where the next start finds it."""
        return self.completed in (self.rescued, self.on_disk)

    @property
    def goes_on(self) -> str:
        """Words for where the next start goes on from: what its ranks find, by the same folders."""
        found, on_disk = max(self.rescued or 0, self.on_disk or 0), self.on_disk or 0
        if not self.completed:
            return ""
        place = "on disk" if found == on_disk else "in memory"
        where = f" from step {found}, which is {place}" if found else " from the beginning"
        return where if found >= self.completed else f"{where}, as nobody could save step {self.completed}"


class Restarts:
    """The restarts of one job.

    Args:
        folder: the job's; None if it has none.
        limit: restarts without progress, one after another; None for :data:`LIMIT` if the ranks tell how far they are,
            else none.
    """

    def __init__(self, folder: Path | None, limit: int | None) -> None:
        self._folder, self._limit = folder, limit
        self.count = 0
        """How often all ranks were started again."""
        self._in_vain = 0
        """Restarts since a start made progress."""
        self._began = time.monotonic()
        """When the ranks were last started."""
        self.is_repeated = False
        """Whether the last start ended with the same error, in the same place and step, as the one before."""
        self._error: tuple[object, ...] | None = None
        """The error that ended the last start, with the steps completed until then; None if there was none."""
        self._best: dict[str, int] = {}
        """The last step that any start has completed, by the key of the checkpoint folder."""

    @property
    def limit(self) -> int:
        """Restarts without progress, at most."""
        return LIMIT if self._limit is None else self._limit

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the ranks."""
        return {"TORCHELASTIC_RESTART_COUNT": str(self.count), RESTARTS: str(self.limit)}

    def reached(self) -> list[Reached]:
        """Return how far the present start has come, for each checkpoint folder."""
        if self._folder is None:
            return []
        return [_reached(self._folder, key, records) for key, records in present_records(self._folder).items()]

    def told(self) -> tuple[int, str | None]:
        """Return how many steps were computed again, and where the present start went on from."""
        reached = self.reached()
        redone = sum(each.redone for each in reached)
        return redone, next((each.source for each in reached if each.source), None)

    def begin(self) -> None:
        """Keep the records of the start before, for the ranks that are started next."""
        self._began = time.monotonic()
        if self._folder is None:
            return
        before = self._folder / BEFORE
        with suppress(OSError):
            before.mkdir(exist_ok=True)
            for path in (self._folder / STEPS).iterdir():
                _set_aside(before / path.name)
                shutil.rmtree(before / path.name, ignore_errors=True)
                path.rename(before / path.name)
            for path in before.glob("*/rank-*.*"):  # copies of states, whatever was to rescue of them is rescued
                path.unlink()

    def decide(self, cause: Cause) -> str | None:
        """Return words for the restart that comes now, after a failure; None if there is none.

        There is none after the same error in the same place at the same step as in the start before: it is a mistake,
        which would be made again.
        """
        reached = self.reached()
        # A start that did not come to a Checkpointer's making says nothing; one before it may have. A rank that was
        # killed before any step has cost nothing.
        is_early = cause.is_early_kill and time.monotonic() - self._began < EARLY_S
        is_over = all(each.has_ended for each in reached) if reached else not (self._best or is_early)
        error = None if cause.error is None else (cause.error, *sorted((each.key, each.completed) for each in reached))
        self.is_repeated = error is not None and error == self._error
        if self.is_repeated:
            return None
        self._error = error
        if is_over and (self._limit is None or any(each.is_unsaved for each in reached)):
            return None
        is_progress = any(each.completed > self._best.get(each.key, 0) for each in reached)
        self._best |= {each.key: max(each.completed, self._best.get(each.key, 0)) for each in reached}
        self._in_vain = 0 if is_progress else self._in_vain + 1
        if self._in_vain > self.limit or not self.limit:
            return None
        self.count += 1
        where = max(reached, key=lambda each: each.completed).goes_on if reached else ""
        number = f"restart {self.count}"
        if self.count == self._in_vain:
            number += f" of {self.limit}"
        elif self._in_vain:
            number += f", {self._in_vain} of {self.limit} without progress"
        return f"starting all ranks again{where} ({number})"

    def wait_for_rescue(
        self, running: Callable[[], Sequence[int]], look: Callable[[float], None], tell: Callable[[], None]
    ) -> None:
        """Let the ranks that are left notice that one is gone, and save their last step.

        Args:
            running: gives the ranks that have not ended.
            look: waits for a rank to end, so many seconds at most.
            tell: tells the ranks, which notice it by themselves when they meet, but may be far from that.
        """
        reached = self.reached()
        if not self.limit or all(each.is_alone for each in reached):
            return
        patience = RESCUE_S + 2 * max(each.pace for each in reached)  # they notice when they meet, in every step
        began, is_told = time.monotonic(), False
        while running():
            # What a start went on from is kept where it came from.
            if all(each.is_rescued or each.completed == each.restored for each in self.reached()):
                return
            waited = time.monotonic() - began
            if waited > (WRITING_S if self._is_writing() else patience):
                if is_told:
                    return
                tell()
                is_told, patience = True, waited + TOLD_S
            look(0.02)

    def unsaved(self) -> Path | None:
        """Return the checkpoint folder to which the job was to save steps, and has saved none; None if all is well."""
        present = [] if self._folder is None else present_records(self._folder).values()
        return next((record.folder for records in present for record in records if record.is_unsaved), None)

    def _is_writing(self) -> bool:
        assert self._folder is not None
        return any((self._folder / RESCUE).glob("*/.writing-*"))

    def keep_rescued(self, say: Callable[[str], None]) -> int | None:
        """Copy what is only in memory into the checkpoint folders, when the job has ended for good.

        Returns:
            the last step that the ranks completed, if it is there now; None if it was not in memory, or not copied.
        """
        if self._folder is None or not any((self._folder / RESCUE).glob("*/step-*")):
            return None
        reached = self.reached()
        command = [sys.executable, "-m", "paceline.checkpoint.keep_rescued", str(self._folder / RESCUE)]
        with sheltered():
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        for line in (done.stdout or done.stderr).splitlines()[-3:]:
            say(line)
        are_saved = [(self._folder / RESCUE / each.key / f"step-{each.completed:08d}").is_dir() for each in reached]
        return max(each.completed for each in reached) if are_saved and all(are_saved) and not done.returncode else None


def _reached(folder: Path, key: str, records: Sequence[StepRecord]) -> Reached:
    restored = max(record.restored for record in records)
    completed = max(restored, *(record.completed for record in records))
    return Reached(
        key,
        restored,
        completed,
        max(record.redone for record in records),
        next((record.source for record in records if record.source), None),
        newest_step(folder / RESCUE / key),
        newest_step(records[0].folder),
        all(record.has_ended for record in records),
        max(record.pace for record in records),
        any(record.is_unsaved for record in records),
        any(record.is_alone for record in records),
    )


def _set_aside(records: Path) -> None:
    """Keep pages of `records` that nobody needs any more for ranks whose own was used."""
    for path in list(records.glob("rank-*")):
        spare = spare_page(path)
        if not path.suffix and not spare.exists():
            path.rename(spare)
