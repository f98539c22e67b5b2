"""The folder of a run, shared by all ranks: rank 0 opens it and answers, and an error on any rank is raised on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint.exchange import collected_states
from paceline.checkpoint.format.metadata import Keep, Notes
from paceline.checkpoint.objects.registered import Registered
from paceline.checkpoint.saving.checkpoint_store import RunFolder
from paceline.checkpoint.saving.synchronous import collect
from paceline.core.processes import consensus
from paceline.core.processes.world import World
from paceline.errors import UsageError


class SharedFolder:
    """The folder `path` of a run, which every rank names and rank 0 opens. `keep` decides which checkpoints stay."""

    def __init__(self, path: Path, keep: Keep) -> None:
        self.path = path
        self.keep = keep
        self.opened: RunFolder | None = None  # rank 0's
        self.is_closed = False
        self.in_flight = False  # the same on all ranks: a background save was started and not waited for
        self._saves_in_background = False

    def open(self, world: World, async_save: bool, memory: Path | None) -> None:
        """Open the folder on rank 0, including the checkpoints rescued into `memory`.

        Raises:
            UsageError: on every rank, if rank 0 cannot use it.
        """

        def open_here() -> bool:
            self.opened = RunFolder(self.path, self.keep, async_save, memory)
            return self.opened.writer.in_background

        self._saves_in_background = bool(consensus.decide(world, open_here))  # rank 0 decides

    def world(self) -> World:
        """Return the ranks.

        Raises:
            UsageError: if the folder is closed.
        """
        if self.is_closed:
            raise UsageError(f"the Checkpointer of {self.path} is closed; make a new one")
        return consensus.here()

    def ask(self, question: Callable[[RunFolder], Any]) -> Any:
        """Return the answer of rank 0's folder to `question`, a JSON value, on every rank."""
        return consensus.decide(self.world(), lambda: question(self.rank_0s))

    def save(self, world: World, step: int, entries: Sequence[Registered], note: Callable[[], Notes]) -> Path:
        """Save `entries` as the checkpoint of `step`; it is durable unless it is :attr:`in_flight` afterwards.

        Raises:
            CheckpointError: on every rank, if it could not be written.
            UsageError: if it cannot be saved now, or the ranks have registered different objects.
            DesyncError: if `step` differs between ranks.
        """
        captures, notes = collect(world, step, entries, note)
        size = collected_states.check_equal(world, step, entries, captures)
        if world.rank != 0:
            collected_states.hand_over(captures[-1])
        path = consensus.decide(world, lambda: str(self.rank_0s.save(world, step, size, notes, captures)))
        self.in_flight = self._saves_in_background
        return Path(path)

    def finish(self, world: World) -> bool:
        """Wait on every rank for the save in the background, and raise its error there; return whether there was one.

        Raises:
            CheckpointError: if it was not written.
        """
        in_flight, self.in_flight = self.in_flight, False
        if in_flight:
            try:
                consensus.decide(world, lambda: self.rank_0s.writer.finish())
            except KeyboardInterrupt:
                self.in_flight = True  # the next call waits for it
                raise
        return in_flight

    def release(self) -> None:
        """Release the folder for other runs."""
        if self.opened is not None:
            self.opened.close()
        self.opened = None

    @property
    def rank_0s(self) -> RunFolder:
        """The open folder, on rank 0."""
        assert self.opened is not None, "only rank 0 uses the folder"
        return self.opened
