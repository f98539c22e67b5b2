"""Lets ranks save a step before they exit after a signal, if they mark their steps with a Checkpointer."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from paceline.core.telemetry.step_progress import Stopping, present_records


class Preemption:
    """How the ranks of the current start react to a signal, according to their step records.

    Args:
        folder: the job's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def would_save(self, pids: Collection[int]) -> bool:
        """Return whether every rank would save a step and exit after a signal, or has already done so."""
        states = self._states()
        return bool(pids) and all(states.get(pid) in (Stopping.READY, Stopping.ASKED, Stopping.SAVED) for pid in pids)

    def are_ready(self, pids: Collection[int]) -> bool:
        """Return whether every rank would save a step and exit after a signal, and none has received one yet."""
        states = self._states()
        return bool(pids) and all(states.get(pid) is Stopping.READY for pid in pids)

    def is_in_vain(self) -> bool:
        """Return whether the ranks mark their steps, but have no checkpoint folder on disk."""
        states = self._states().values()
        return bool(states) and set(states) == {Stopping.IN_VAIN}

    def request_stop(self, number: signal.Signals, pids: Collection[int]) -> None:
        """Send the signal to ranks that have not received one, because a second signal would end a rank at once.

        Their child processes get no signal, because DataLoader workers are needed until the end of the step. Ranks get
        SIGTERM instead of signals that a script may handle itself, such as SIGINT.
        """
        sent = number if number == signal.SIGUSR1 else signal.SIGTERM
        for pid, state in self._states().items():
            if pid in pids and state is Stopping.READY:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, sent)

    def saved(self) -> tuple[signal.Signals, int] | None:
        """Return the signal and the step if all ranks have agreed to exit and saved the step; otherwise None."""
        for records in present_records(self._folder).values():
            for record in records:
                if record.stopping is Stopping.SAVED:  # on all ranks
                    number, step = record.stopped
                    return signal.Signals(number), step
        return None

    def _states(self) -> dict[int, Stopping]:
        """Return each rank's state by process id; with several Checkpointers, the most advanced state."""
        states: dict[int, Stopping] = {}
        for records in present_records(self._folder).values():
            for record in records:
                states[record.pid] = max(record.stopping, states.get(record.pid, Stopping.NOT))
        return states
