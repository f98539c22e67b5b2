"""Restarts of a job: reads the ranks' progress, decides whether to restart, and keeps rescued checkpoints.

Progress is read from the ranks' step records (:mod:`paceline.core.step_progress`). Ranks without step records
are restarted only if the user asks for it. The rules are in :mod:`paceline.launch.verdict`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from paceline.checkpoint.step_names import newest_step, step_name
from paceline.core.messages import counted
from paceline.core.step_progress import BEFORE, RESCUE, RESTARTS, STEPS, StepRecord, present_records, spare_page
from paceline.launch.hook.run_module import module_command
from paceline.launch.signals import sheltered
from paceline.launch.verdict import LIMIT, Cause, Change, Failure, Past, Reached, Slots, Verdict, verdict

RESCUE_S = 5.0
"""Seconds, in addition to two steps, for the remaining ranks to notice a failure and save their last step."""
SIGNALLED_S = 5.0
"""Seconds for the remaining ranks to save their last step after the launcher has signaled them."""
WRITING_S = 300.0
"""Seconds for the remaining ranks to save their last step while one of them is writing it."""
GPUS = "CUDA_VISIBLE_DEVICES"


class Restarts:
    """The restarts of one job.

    Args:
        folder: the job's folder.
        limit: maximum number of consecutive restarts without progress. None means :data:`LIMIT` if the ranks report
            their steps, else 0.
        slots: the slots of the ranks; the next start may use fewer slots.
    """

    def __init__(self, folder: Path, limit: int | None, slots: Slots | None = None) -> None:
        self._folder, self._limit = folder, limit
        self._slots = slots or Slots(1)
        self._virtual_ranks: int | None = None
        """Number of virtual ranks, as last reported by the ranks; None before the first report."""
        self.change: Change | None = None
        """Change in the number or slots of ranks from the last start to the next; None if both stay the same."""
        self.count = 0
        """Number of restarts of all ranks."""
        self._began = time.monotonic()
        """Time of the latest start."""
        self._past = Past()
        """The failed starts."""
        self.verdict: Verdict | None = None
        """The verdict on the latest failed start; None before a failure."""

    @property
    def limit(self) -> int:
        """Maximum number of consecutive restarts without progress."""
        return LIMIT if self._limit is None else self._limit

    @property
    def size(self) -> int:
        """Number of ranks in the next start."""
        return len(self._slots.used)

    def environment(self, of_job: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables that ranks get in addition to `of_job`."""
        variables = {"TORCHELASTIC_RESTART_COUNT": str(self.count), RESTARTS: str(self.limit)}
        if not self._slots.are_the_first:  # each local rank uses the visible GPU with its number
            variables[GPUS] = ",".join(self._slots.select(_visible_gpus(of_job)))
        return variables

    def reached(self) -> list[Reached]:
        """Return the progress of the current start in each checkpoint folder."""
        return [_reached(self._folder, key, records) for key, records in present_records(self._folder).items()]

    def progress(self) -> tuple[int, str | None]:
        """Return the number of steps that the current start computed again, and the source of its state."""
        reached = self.reached()
        redone = sum(record.redone for record in reached)
        return redone, next((record.source for record in reached if record.source), None)

    def begin(self) -> None:
        """Keep the records of the previous start for the ranks of the next one."""
        self._began = time.monotonic()
        previous = self._folder / BEFORE
        # If this fails, the only effect is that the next ranks do not know the progress of the previous start.
        with suppress(OSError):
            previous.mkdir(exist_ok=True)
            for path in (self._folder / STEPS).iterdir():
                # Keep the pages of older records for reuse, because ranks cannot get new pages when memory is full.
                _set_aside(previous / path.name)
                shutil.rmtree(previous / path.name, ignore_errors=True)
                path.rename(previous / path.name)
            for path in previous.glob("*/rank-*.*"):  # copies of states for a rescue
                path.unlink()

    @property
    def refusal(self) -> str | None:
        """The message to print if a restart is allowed but would not help; otherwise None."""
        if self.verdict not in (Verdict.MISTAKE, Verdict.REPEATED):
            return None
        could_be = self.limit and (self._limit is not None or bool(self._past.best))
        return f"{self.verdict.value}: the ranks are not restarted" if could_be else None

    def decide(self, cause: Cause) -> str | None:
        """Decide whether to restart after a failure; return the message for the restart, or None for no restart."""
        now = time.monotonic()
        failure = Failure(cause, self.reached(), now - self._began)
        if self._slots.failed(cause.rank, failure.seconds, now) and cause.may_pass:
            self._past = replace(self._past, error=None)  # a device error may not recur on other devices
        self.verdict = verdict(failure, self._past, self._limit)
        self._past = self._past.with_one_more(failure)
        if self.verdict is not Verdict.RESTART:
            return None
        self.count += 1
        reached, in_vain = failure.reached, self._past.in_vain
        where = max(reached, key=lambda record: record.completed).goes_on if reached else ""
        number = f"restart {self.count}"
        if self.count == in_vain:
            number += f" of {self.limit}"
        elif in_vain:
            number += f", {self._past.next_in_vain} of {self.limit} without progress"
        self._learn_virtual_ranks(reached)
        return self._start_again(where, number, now)

    def can_grow(self) -> bool:
        """Return whether more ranks than are running can start now."""
        if not self._slots.lacks_some:
            return False
        if self._virtual_ranks is None:
            self._learn_virtual_ranks(self.reached())
        return len(self._slots.next(self._virtual_ranks, time.monotonic())) > self.size

    def grow(self, step: int) -> str:
        """Prepare a start with more ranks, after all ranks have saved `step` and exited; return the message."""
        self.count += 1
        return f"step {step} is saved; {self._start_again('', f'restart {self.count}', time.monotonic())}"

    def _start_again(self, where: str, number: str, now: float) -> str:
        self.change = change = self._slots.move(self._virtual_ranks, now)
        if change is None:
            return f"restarting all ranks{where} ({number})"
        ranks = counted(change.after, "rank")
        how = f"instead of {change.before}" if change.after != change.before else "in other slots"
        return f"restarting with {ranks} {how}{where} ({number}): {change.why}"

    def _learn_virtual_ranks(self, reached: Sequence[Reached]) -> None:
        if any(record.has_begun for record in reached):  # by then, all state is registered with the Checkpointer
            self._virtual_ranks = max(record.virtual_ranks for record in reached)

    def wait_for_rescue(
        self, running: Callable[[], Sequence[int]], poll: Callable[[float], None], signal_ranks: Callable[[], None]
    ) -> None:
        """Wait for the remaining ranks to notice the failure and save their last step.

        Args:
            running: returns the running ranks.
            poll: waits up to the given number of seconds for a rank to exit.
            signal_ranks: signals the ranks. Without a signal, it may take long until they synchronize and notice the
                failure.
        """
        reached = self.reached()
        if not self.limit or all(record.is_alone for record in reached):
            return
        patience = RESCUE_S + 2 * max(record.pace for record in reached)  # ranks synchronize in every step
        began, is_signalled = time.monotonic(), False
        while running():
            # If no step was completed, there is none to rescue.
            if all(record.is_rescued or record.completed == record.restored for record in self.reached()):
                return
            waited = time.monotonic() - began
            is_writing = any((self._folder / RESCUE).glob("*/.writing-*"))
            if waited > (WRITING_S if is_writing else patience):
                if is_signalled:
                    return
                signal_ranks()
                is_signalled, patience = True, waited + SIGNALLED_S
            poll(0.02)

    def unsaved(self) -> Path | None:
        """Return a checkpoint folder with missing steps that the job should have saved; None if there is none."""
        present = present_records(self._folder).values()
        return next((record.folder for records in present for record in records if record.is_unsaved), None)

    def keep_rescued(self, say: Callable[[str], None]) -> int | None:
        """After the job's end, copy checkpoints that are only in memory into the checkpoint folders.

        Returns:
            The ranks' last completed step, if it was copied; otherwise None.
        """
        if not any((self._folder / RESCUE).glob("*/step-*")):
            return None
        reached = self.reached()
        command = module_command("paceline.checkpoint.persist_rescued", str(self._folder / RESCUE))
        with sheltered():
            run = subprocess.run(command, capture_output=True, text=True, check=False)
        for line in (run.stdout or run.stderr).splitlines()[-3:]:
            say(line)
        are_saved = [(self._folder / RESCUE / item.key / step_name(item.completed)).is_dir() for item in reached]
        # The command also succeeds if the folder on disk already contains the step.
        return max(item.completed for item in reached) if are_saved and all(are_saved) and not run.returncode else None


def _reached(folder: Path, key: str, records: Sequence[StepRecord]) -> Reached:
    restored = max(record.restored for record in records)
    return Reached(
        key,
        restored,
        max(restored, *(record.completed for record in records)),
        min(record.prepared for record in records),
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
    """Keep the pages of `records`, which are no longer needed, for ranks that have used up their spare pages."""
    for path in list(records.glob("rank-*")):
        spare = spare_page(path)
        if not path.suffix and not spare.exists():
            path.rename(spare)
