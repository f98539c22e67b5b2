"""Ends ranks that save their last step first: those that mark their steps with a Checkpointer."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from paceline.core.telemetry.step_progress import Stopping, present_records


class Preemption:
    """The ranks of the current start, and their reactions to such signals according to their step records.

    Args:
        folder: the job's folder; None if it has none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def would_save(self, pids: Collection[int]) -> bool:
        """Return whether all these ranks would end after a step, which they save; or have."""
        states = self._states()
        return bool(pids) and all(states.get(pid) in (Stopping.READY, Stopping.ASKED, Stopping.SAVED) for pid in pids)

    def are_ready(self, pids: Collection[int]) -> bool:
        """Return whether a signal would end all these ranks after a step, which they save, and none has got one."""
        states = self._states()
        return bool(pids) and all(states.get(pid) is Stopping.READY for pid in pids)

    def is_in_vain(self) -> bool:
        """Return whether the ranks mark their steps, but have no folder on disk to save to."""
        states = self._states().values()
        return bool(states) and set(states) == {Stopping.IN_VAIN}

    def request_stop(self, number: signal.Signals, pids: Collection[int]) -> None:
        """Send the signal to the ranks that have not received one from elsewhere, because a second one would end them.

        Only the ranks get it, because they need their DataLoader's workers until the step has ended. They are ready for
        SIGTERM; other signals may have a meaning of their own in the script, such as Ctrl-C.
        """
        sent = number if number == signal.SIGUSR1 else signal.SIGTERM
        for pid, state in self._states().items():
            if pid in pids and state is Stopping.READY:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, sent)

    def saved(self) -> tuple[signal.Signals, int] | None:
        """Return the signal for which all ranks have agreed to end, and the step that they have saved; None if not."""
        for records in present_records(self._folder).values():
            for record in records:
                if record.stopping is Stopping.SAVED:  # then all have agreed and saved it, and are about to end
                    number, step = record.stopped
                    return signal.Signals(number), step
        return None

    def _states(self) -> dict[int, Stopping]:
        """Return the state of each rank, by its process; with several Checkpointers, the most advanced one."""
        states: dict[int, Stopping] = {}
        for records in present_records(self._folder).values():
            for record in records:
                states[record.pid] = max(record.stopping, states.get(record.pid, Stopping.NOT), key=_weight)
        return states


def _weight(state: Stopping) -> int:
    # Its number is the largest, but it means least: another Checkpointer of the rank may save.
    return 0 if state is Stopping.IN_VAIN else state
