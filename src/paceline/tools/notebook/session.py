"""The ranks of one notebook, from ``%dist_init`` to ``%dist_shutdown``."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import torch

from paceline.core.black_box import snapshot_of
from paceline.core.messages import counted
from paceline.errors import PacelineError, UsageError
from paceline.tools.notebook.cell_parser import Start
from paceline.tools.notebook.execution import Conversation, Outcome, Shown, problem, replaced
from paceline.tools.notebook.output import Screen
from paceline.tools.notebook.processes import Processes

JOIN_S = 60.0
"""Timeout in seconds for creating a process group."""
REMEDY = "start ranks again with %dist_init"
NO_GROUP = "in no process group"


class Session:
    """Ranks that run cells."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self._processes = Processes(start)
        try:
            self._processes.spawn(list(range(start.nproc)))
            self.place = self._join()
            """Device and backend of rank 0."""
        # Catch Ctrl-C too, so that ranks that have already started are ended.
        except BaseException:
            self._processes.close()
            raise

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.start.nproc

    def execute(self, ranks: Sequence[int], *message: Any) -> None:
        """Send a message to `ranks` and show their output until they have answered."""
        self._replace_dead()
        outcome = Conversation(self._processes, ranks, Screen(ranks, self.size)).hold(*message)
        failure = problem(outcome, self.size)
        repair = self._repair(outcome)
        if failure is not None:
            raise Shown(failure.name, failure.lines + repair)

    def pull(self, names: Sequence[str], rank: int | None) -> dict[str, Any]:
        """Return variables of `rank`, or lists over all ranks if `rank` is None. Tensors are moved to the CPU."""
        self._replace_dead()
        ranks = range(self.size) if rank is None else [rank]
        outcome = Conversation(self._processes, ranks).hold("pull", list(names))
        self._repair(outcome)
        for failure in outcome.failures.values():
            raise UsageError(f"%pull: {failure.message}")
        if outcome.deaths:
            raise PacelineError(f"%pull: rank {min(outcome.deaths)} died; run the cell again")
        values: dict[str, Any] = {}
        for index, name in enumerate(names):
            of_ranks = [_loaded(name, number, outcome.results[number][index]) for number in ranks]
            values[name] = of_ranks if rank is None else of_ranks[0]
        return values

    def status(self) -> list[str]:
        """Return a summary line and a line for each rank."""
        alive = [rank for rank in sorted(self._processes.ranks) if self._processes.end_of(rank) is None]
        # Ask the ranks each time, because a cell may have created another process group.
        places = Conversation(self._processes, alive).hold("place").results
        place = next(filter(None, places.values()), NO_GROUP)
        lines = [f"{counted(self.size, 'rank')}, {place}"]
        for rank, process in sorted(self._processes.ranks.items()):
            end, doing = self._processes.end_of(rank), "ready"
            if places.get(rank) == "" and place != NO_GROUP:
                doing += f", {NO_GROUP}"
            if (box := snapshot_of(self._processes.boxes.path, rank)) is not None:
                doing += "" if box.completed is None else f", after step {box.completed}"
            lines.append(f"rank {rank} | process {process.pid} | {doing if end is None else f'died ({end})'}")
        return lines

    def close(self) -> None:
        """End all ranks."""
        self._processes.close()

    def _join(self) -> str:
        """Create a process group of all ranks; return its device and backends."""
        outcome = Conversation(self._processes, range(self.size)).hold("join", self.start.backend, seconds=JOIN_S)
        if outcome.interrupted:
            raise PacelineError("interrupted while the process group was created; run %dist_init again")
        for rank, how in outcome.deaths.items():
            raise PacelineError(f"rank {rank} ended while the process group was created ({how}); run %dist_init again")
        # Raise root causes before errors that other ranks caused.
        for _, failure in sorted(outcome.failures.items(), key=lambda item: (item[1].breaks_group, item[0])):
            raise PacelineError(failure.message)
        return str(outcome.results[0])

    def _replace_dead(self) -> None:
        """Replace and report ranks that have died since the last cell."""
        deaths = {rank: end for rank in self._processes.ranks if (end := self._processes.end_of(rank)) is not None}
        for rank, end in sorted(deaths.items()):
            print(f"rank {rank} died since the last cell: {end}")
        for line in self._repair(Outcome(deaths=deaths)):
            print(line)

    def _repair(self, outcome: Outcome) -> list[str]:
        """Replace dead ranks, create a new process group if the old one is broken, and return messages about both."""
        if not outcome.breaks_group:
            return []
        try:
            for rank in outcome.deaths:
                self._processes.remove(rank)
            answers = Conversation(self._processes, sorted(self._processes.ranks)).hold("leave", seconds=JOIN_S)
            lost = {*outcome.deaths, *answers.deaths}
            for rank in answers.deaths:
                self._processes.remove(rank)
            # Start new ranks only after the others have left the old group, because they can only join a new one.
            self._processes.spawn(sorted(lost))
            self._join()
        except BaseException as error:
            self._processes.close()
            raise Shown(
                "PacelineError", [f"all ranks were ended, because a new process group failed ({error}); {REMEDY}"]
            ) from None
        return replaced(sorted(lost), self.size)


def _loaded(name: str, rank: int, value: bytes) -> Any:
    try:
        # Pickle supports values of any class. It is safe, because the data comes from the user's own process.
        return torch.load(BytesIO(value), map_location="cpu", weights_only=False)
    except Exception as error:
        raise UsageError(
            f"%pull: cannot load {name!r} of rank {rank} ({error}); pull plain values such as a state_dict()"
        ) from None
