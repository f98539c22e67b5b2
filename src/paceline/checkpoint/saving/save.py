"""A save, as every rank runs it: the states are captured, the ranks agree, and rank 0 writes those of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.checkpoint import captures
from paceline.checkpoint.captures import Capture
from paceline.checkpoint.format.metadata import Notes
from paceline.checkpoint.format.state_codec import Encoder
from paceline.checkpoint.objects.registered import Registered
from paceline.checkpoint.storage import free_space
from paceline.core.processes import consensus
from paceline.core.processes.world import World
from paceline.core.torch_internals.distributed.dtensor import local_of
from paceline.errors import CheckpointError, DesyncError, UsageError

Part = tuple[int | None, Capture]
"""A rank and its own states, or None and an object that all ranks share."""


@dataclass(frozen=True)
class Save:
    """A save of `step` by `world_size` ranks, whose tensors take `size` bytes, with the user's notes."""

    step: int
    world_size: int
    size: int
    notes: Notes


def capture_all(
    world: World, step: int, entries: Sequence[Registered], note: Callable[[], Notes]
) -> tuple[Save, list[Capture]]:
    """Capture the states of `entries` at `step`, and check that all ranks are about to save the same.

    Returns:
        The description of the save, and this rank's captures: one for each object that all ranks share, which rank 0
        saves, then one with this rank's own states.
    """
    notes: list[Notes] = []
    found: list[Capture] = []

    def take() -> None:
        found.extend(captures.shared(entry, world.rank == 0) for entry in entries if not entry.per_rank)
        found.append(captures.own([*(entry for entry in entries if entry.per_rank), captures.generators()]))

    def prepare() -> None:
        notes.append(note())
        _check_can_be_saved(step, entries)
        with _explained(step):
            if not any(entry.is_sharded for entry in entries):
                take()
                return
            # A dry run on this rank's shards: it finds states that cannot be saved without waiting for another rank.
            for entry in entries:
                entry.capture(Encoder(None if entry.per_rank else local_of))

    def gather() -> None:
        with _explained(step):
            take()

    names = [f"{entry.name} (per rank)" if entry.per_rank else entry.name for entry in entries]
    sizes = _agree(world, step, names, prepare, found)
    if not found:
        # DTensors are gathered last, once no rank has another error, because a gather needs all ranks.
        sizes = _agree(world, step, names, gather, found)
    return Save(step, world.size, sum(sizes), notes[0]), found


def _check_can_be_saved(step: Any, entries: Iterable[Registered]) -> None:
    if type(step) is not int or not 0 <= step < 10**18:
        raise UsageError(f"step must be a whole number >= 0, not {step!r}")
    for entry in entries:
        entry.check_whole(step)


def _agree(
    world: World, step: int, names: list[str], action: Callable[[], None], found: Sequence[Capture]
) -> list[int]:
    """Call `action` on every rank, and compare `step` and `names`; return the bytes that each rank has `found`."""
    # Kept until all have been told: a rank that raised at once would leave the others waiting for its part.
    error = consensus.error_of(action)
    saved = found if world.rank == 0 else found[-1:]
    size = sum(free_space.needed(each.tensors.values()) for each in saved)
    told = consensus.agree(world, error, None if error else {"step": step, "names": names, "size": size})
    for rank, theirs in enumerate(told):
        if theirs["names"] != names:
            raise UsageError(
                f"rank {rank} has registered {theirs['names']} but rank {world.rank} {names}; register "
                "the same objects in the same order on every rank"
            )
        if theirs["step"] != step:
            raise DesyncError(
                f"rank {rank} saves step {theirs['step']} but rank {world.rank} saves step {step}; "
                "save after the same number of steps on every rank"
            )
    return [theirs["size"] for theirs in told]


@contextmanager
def _explained(step: int) -> Iterator[None]:
    try:
        yield
    # A state_dict() of the user's may raise anything; the training sees one class, with the number of the step.
    except Exception as error:
        raise CheckpointError(f"step {step} was not saved: {error}") from error


@contextmanager
def parts(world_size: int, found: Sequence[Capture]) -> Iterator[Iterator[Part]]:
    """Yield rank 0's captures (its own states last), then those that the other ranks send, one by one.

    If the block raises, the ranks whose turn has not come are told that their captures are not needed.
    """
    *shared, own_states = found
    waiting = list(range(1, world_size))

    def each() -> Iterator[Part]:
        for states in shared:
            yield None, states
        yield 0, own_states
        while waiting:  # fetched when it is written, so that rank 0 need not hold the states of all ranks
            rank = waiting.pop(0)
            yield rank, captures.fetch(rank)

    try:
        yield each()
    finally:
        # The rank whose turn it was is no longer in the list: a transfer with it failed half-way, and cannot be taken
        # back.
        for rank in waiting:
            captures.decline(rank)
