"""The restarts of a job: the reported progress of the ranks, the decision to restart, and the rescued checkpoints.

The ranks' step records show progress, see :mod:`paceline.core.telemetry.step_progress`. Ranks without them are
restarted as often as the user said, and not at all by default. :mod:`paceline.launch.failures.verdict` decides.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from paceline.checkpoint.step_names import newest_step, step_name
from paceline.core.output.wording import counted
from paceline.core.telemetry.step_progress import (
    BEFORE,
    RESCUE,
    RESTARTS,
    STEPS,
    StepRecord,
    present_records,
    spare_page,
)
from paceline.launch.failures.places import Change, Places
from paceline.launch.failures.verdict import LIMIT, Cause, Failure, Past, Reached, Verdict, verdict
from paceline.launch.pinning import CORES
from paceline.launch.watching.signals import sheltered

RESCUE_S = 5.0
"""How long the remaining ranks may take, beyond two steps, to notice the failure and save their last step."""
TOLD_S = 5.0
"""How long they may take once they have been signalled."""
WRITING_S = 300.0
"""How long they may take once one of them is writing."""
GPUS = "CUDA_VISIBLE_DEVICES"


class Restarts:
    """The restarts of one job.

    Args:
        folder: the job's; None if it has none.
        limit: restarts without progress, one after another; None for :data:`LIMIT` if the ranks tell how far they are,
            else none.
        places: of the ranks; they may be fewer in the next start.
    """

    def __init__(self, folder: Path | None, limit: int | None, places: Places | None = None) -> None:
        self._folder, self._limit = folder, limit
        self._places = places or Places(1)
        self._virtual_ranks: int | None = None
        """Number of virtual ranks, as the ranks last told it; None before they have."""
        self.change: Change | None = None
        """How the ranks of the next start differ from those of the last, in number or place."""
        self.count = 0
        """Number of restarts of all ranks."""
        self._began = time.monotonic()
        """When the ranks were last started."""
        self._past = Past()
        """The starts that have failed."""
        self.verdict: Verdict | None = None
        """The verdict on the last start that failed; None before a failure."""

    @property
    def limit(self) -> int:
        """Restarts without progress, at most."""
        return LIMIT if self._limit is None else self._limit

    @property
    def size(self) -> int:
        """Number of ranks of the next start."""
        return len(self._places.used)

    def environment(self, of_job: Mapping[str, str]) -> dict[str, str]:
        """Return environment variables for the ranks, beside those `of_job`."""
        variables = {"TORCHELASTIC_RESTART_COUNT": str(self.count), RESTARTS: str(self.limit)}
        if not self._places.are_the_first:  # ranks count on the first cores and GPUs
            cores, gpus = of_job.get(CORES, "").split(";"), _visible_gpus(of_job)
            variables |= {CORES: ";".join(self._places.select(cores)), GPUS: ",".join(self._places.select(gpus))}
        return variables

    def reached(self) -> list[Reached]:
        """Return how far the present start has come, for each checkpoint folder."""
        if self._folder is None:
            return []
        return [_reached(self._folder, key, records) for key, records in present_records(self._folder).items()]

    def progress(self) -> tuple[int, str | None]:
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
        # The next ranks can go on without them, and only do not know how far the start before came.
        with suppress(OSError):
            before.mkdir(exist_ok=True)
            for path in (self._folder / STEPS).iterdir():
                # First: the records of the start before are dropped here, and their pages are the only ones that full
                # memory allows.
                _set_aside(before / path.name)
                shutil.rmtree(before / path.name, ignore_errors=True)
                path.rename(before / path.name)
            for path in before.glob("*/rank-*.*"):  # copies of states, which are no longer needed for a rescue
                path.unlink()

    @property
    def refusal(self) -> str | None:
        """Text that says why there is no restart although there could be one; otherwise None."""
        if self.verdict not in (Verdict.MISTAKE, Verdict.REPEATED):
            return None
        could_be = self.limit and (self._limit is not None or bool(self._past.best))
        return f"{self.verdict.value}: the ranks are not started again" if could_be else None

    def decide(self, cause: Cause) -> str | None:
        """Return the message about the restart after a failure; None if there is no restart."""
        now = time.monotonic()
        failure = Failure(cause, self.reached(), now - self._began)
        if self._places.failed(cause.rank, failure.seconds, now) and cause.may_pass:
            self._past = replace(self._past, error=None)  # an error of a device may not come again in other places
        self.verdict = verdict(failure, self._past, self._limit)
        self._past = self._past.with_one_more(failure)
        if self.verdict is not Verdict.RESTART:
            return None
        self.count += 1
        reached, in_vain = failure.reached, self._past.in_vain
        where = max(reached, key=lambda each: each.completed).goes_on if reached else ""
        number = f"restart {self.count}"
        if self.count == in_vain:
            number += f" of {self.limit}"
        elif in_vain:
            number += f", {in_vain} of {self.limit} without progress"
        self._learn_virtual_ranks(reached)
        return self._start_again(where, number, now)

    def can_grow(self) -> bool:
        """Return whether more ranks could be started now than are running."""
        if not self._places.lacks_some:
            return False
        if self._virtual_ranks is None:
            self._learn_virtual_ranks(self.reached())
        return len(self._places.next(self._virtual_ranks, time.monotonic())) > self.size

    def grow(self, step: int) -> str:
        """Start all ranks again, with more of them; they have saved `step` and ended. Return the message about it."""
        self.count += 1
        return f"step {step} is saved; {self._start_again('', f'restart {self.count}', time.monotonic())}"

    def _start_again(self, where: str, number: str, now: float) -> str:
        self.change = change = self._places.move(self._virtual_ranks, now)
        if change is None:
            return f"starting all ranks again{where} ({number})"
        ranks = counted(change.after, "rank")
        how = f"in place of {change.before}" if change.after != change.before else "in other places"
        return f"starting {ranks} {how}{where} ({number}): {change.why}"

    def _learn_virtual_ranks(self, reached: Sequence[Reached]) -> None:
        if any(each.has_begun for each in reached):  # then everything was registered
            self._virtual_ranks = max(each.virtual_ranks for each in reached)

    def wait_for_rescue(
        self, running: Callable[[], Sequence[int]], poll: Callable[[float], None], signal_ranks: Callable[[], None]
    ) -> None:
        """Wait for the remaining ranks to notice that one is gone, and to save their last step.

        Args:
            running: returns the ranks that have not ended.
            poll: waits for a rank to end, for at most the given seconds.
            signal_ranks: signals the ranks. They notice the failure when they meet, but that may take long.
        """
        reached = self.reached()
        if not self.limit or all(each.is_alone for each in reached):
            return
        patience = RESCUE_S + 2 * max(each.pace for each in reached)  # they notice when they meet, in every step
        began, is_told = time.monotonic(), False
        while running():
            # The checkpoint from which a start resumed is still where it was.
            if all(each.is_rescued or each.completed == each.restored for each in self.reached()):
                return
            waited = time.monotonic() - began
            if waited > (WRITING_S if self._is_writing() else patience):
                if is_told:
                    return
                signal_ranks()
                is_told, patience = True, waited + TOLD_S
            poll(0.02)

    def unsaved(self) -> Path | None:
        """Return the checkpoint folder to which the job should have saved steps but has not; None if all is well."""
        present = [] if self._folder is None else present_records(self._folder).values()
        return next((record.folder for records in present for record in records if record.is_unsaved), None)

    def _is_writing(self) -> bool:
        assert self._folder is not None
        return any((self._folder / RESCUE).glob("*/.writing-*"))

    def keep_rescued(self, say: Callable[[str], None]) -> int | None:
        """Copy checkpoints that are only in memory into the checkpoint folders, when the job has finally ended.

        Returns:
            the last step that the ranks completed, if it is there now; None if it was not in memory, or not copied.
        """
        if self._folder is None or not any((self._folder / RESCUE).glob("*/step-*")):
            return None
        reached = self.reached()
        command = [sys.executable, "-m", "paceline.checkpoint.recovery.persist_rescued", str(self._folder / RESCUE)]
        with sheltered():
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        for line in (done.stdout or done.stderr).splitlines()[-3:]:
            say(line)
        are_saved = [(self._folder / RESCUE / each.key / step_name(each.completed)).is_dir() for each in reached]
        # Looked for, although the command has told: it also succeeds where a folder on disk has the step already.
        return max(each.completed for each in reached) if are_saved and all(are_saved) and not done.returncode else None


def _reached(folder: Path, key: str, records: Sequence[StepRecord]) -> Reached:
    restored = max(record.restored for record in records)
    return Reached(
        key,
        restored,
        max(restored, *(record.completed for record in records)),
        redone=max(record.redone for record in records),
        source=next((record.source for record in records if record.source), None),
        rescued=newest_step(folder / RESCUE / key),
        on_disk=newest_step(records[0].folder),
        has_begun=any(record.completed >= 0 for record in records),
        has_saved=any(record.is_durable for record in records),
        has_ended=all(record.has_ended for record in records),
        pace=max(record.pace for record in records),
        is_unsaved=any(record.is_unsaved for record in records),
        is_alone=any(record.is_alone for record in records),
        virtual_ranks=max(record.virtual_ranks for record in records),
    )


def _visible_gpus(of_job: Mapping[str, str]) -> list[str]:
    visible = of_job.get(GPUS, os.environ.get(GPUS))
    return [*map(str, range(torch.cuda.device_count()))] if visible is None else visible.split(",")


def _set_aside(records: Path) -> None:
    """Keep unneeded pages of `records` for ranks that have used their own."""
    for path in list(records.glob("rank-*")):
        spare = spare_page(path)
        if not path.suffix and not spare.exists():
            path.rename(spare)
