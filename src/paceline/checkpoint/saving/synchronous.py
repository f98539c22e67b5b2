"""Rank 0's part of a save: collects the captures of all ranks, and writes them before it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.exchange import collected_states
from paceline.checkpoint.exchange.collected_states import Capture
from paceline.checkpoint.format.metadata import Keep, Notes
from paceline.checkpoint.objects.registered import Registered
from paceline.checkpoint.saving.checkpoint_writer import Draft
from paceline.checkpoint.storage import free_space
from paceline.checkpoint.storage.step_folders import Storage, reason
from paceline.core.processes import consensus
from paceline.core.processes.world import World
from paceline.errors import CheckpointError

Part = tuple[int | None, Capture]
"""A rank and its own states, or None and an object that all ranks share."""


@dataclass(frozen=True)
class Save:
    """A save of `step` by `world_size` ranks, whose tensors take `size` bytes, with the user's notes."""

    step: int
    world_size: int
    size: int
    notes: Notes


def collect(
    world: World, step: int, entries: Sequence[Registered], note: Callable[[], Notes]
) -> tuple[list[Capture], Notes]:
    """Return the states of `entries` at `step`, and the notes; an error on any rank is raised on all.

    DTensors are gathered last, once no rank has another error, because the gather needs all ranks.

    Raises:
        UsageError: if a state cannot be saved now, or the notes cannot.
        CheckpointError: if a state cannot be taken.
    """
    captures, checked = list[Capture](), list[Notes]()
    is_sharded = any(entry.is_sharded for entry in entries)

    def take() -> None:
        captures.extend(collected_states.of_all(world, step, entries))

    def check() -> None:
        checked.append(note())
        collected_states.check(step, entries)
        if not is_sharded:
            take()

    consensus.agree(world, consensus.error_of(check))
    if is_sharded:
        consensus.agree(world, consensus.error_of(take))
    return captures, checked[0]


@contextmanager
def parts(world: World, captures: Sequence[Capture]) -> Iterator[Iterator[Part]]:
    """Yield rank 0's `captures` (its own states last), then those that the other ranks send, one by one.

    If the block raises, the ranks whose turn has not come are told that their captures are not needed.
    """
    *shared, own_states = captures
    waiting = list(range(1, world.size))

    def each() -> Iterator[Part]:
        for states in shared:
            yield None, states
        yield 0, own_states
        while waiting:
            rank = waiting.pop(0)
            yield rank, collected_states.fetch(rank)

    try:
        yield each()
    finally:
        for rank in waiting:
            collected_states.dismiss(rank)


class Writer:
    """Writes a save while the caller waits: it is durable when :meth:`save` returns."""

    in_background = False

    def __init__(self, store: Storage, keep: Keep) -> None:
        self._store = store
        self._keep = keep

    def save(self, order: Save, states: Iterable[Part]) -> Path:
        """Write `states` as the checkpoint that `order` describes, then prune old checkpoints.

        Raises:
            CheckpointError: if it cannot be written; nothing is deleted then.
        """
        with self._explained(order):
            return self._write(order, self._draft(order), states)

    def failure(self) -> CheckpointError | None:
        """Return the error of a save that :meth:`finish` has not raised yet; None if there is none."""
        return None

    def join(self) -> None:
        """Wait until nothing is being written."""

    def finish(self) -> None:
        """Wait until nothing is being written, and raise the error of a failed save, once."""

    def close(self) -> None:
        """Wait until nothing is being written, and release the memory."""

    def _draft(self, order: Save) -> Draft:
        return Draft(self._store, order.step, order.world_size, order.size)

    def _write(self, order: Save, draft: Draft, states: Iterable[Part]) -> Path:
        with draft:
            for rank, part in states:
                if rank is None:
                    draft.add_shared(part)
                else:
                    draft.add_own(rank, part)
            draft.add_notes(order.notes)
            path = draft.commit()
        self._store.prune(order.step, self._keep)
        return path

    @contextmanager
    def _explained(self, order: Save) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, MemoryError) as error:
            raise self._unsaved(order, error) from error

    def _unsaved(self, order: Save, error: BaseException) -> CheckpointError:
        if isinstance(error, OSError):
            why = free_space.explained(error, reason(error), self._store.folder, order.size)
        else:
            why = str(error) or type(error).__name__
        return CheckpointError(
            f"rank 0 could not save step {order.step} to {self._store.path(order.step)}: {why}; the checkpoints before "
            "it are intact, remove the cause and save again"
        )
