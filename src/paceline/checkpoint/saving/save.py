"""A save on every rank: states are captured, the ranks agree, and rank 0 writes the states of all ranks."""

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
"""A rank and its own states, or None and the state of a shared object."""


@dataclass(frozen=True)
class Save:
    """A save of `step` by `world_size` ranks, with `size` bytes of tensors and the user's notes."""

    step: int
    world_size: int
    size: int
    notes: Notes


def capture_all(
    world: World, step: int, entries: Sequence[Registered], note: Callable[[], Notes]
) -> tuple[Save, list[Capture]]:
    """Capture the states of `entries` at `step`, and check that all ranks save the same step and objects.

    Returns:
        The description of the save, and this rank's captures: one for each shared object, then one with this rank's own
        states.
    """
    notes: list[Notes] = []
    captured: list[Capture] = []

    def take() -> None:
        captured.extend(captures.shared(entry, world.rank == 0) for entry in entries if not entry.per_rank)
        captured.append(captures.own([*(entry for entry in entries if entry.per_rank), captures.generators()]))

    def prepare() -> None:
        notes.append(note())
        _check_can_be_saved(step, entries)
        with _explained(step):
            if not any(entry.is_sharded for entry in entries):
                take()
                return
            # A dry run on this rank's shards detects states that cannot be saved, without waiting for other ranks.
            for entry in entries:
                entry.capture(Encoder(None if entry.per_rank else local_of))

    def gather() -> None:
        with _explained(step):
            take()

    names = [f"{entry.name} (per rank)" if entry.per_rank else entry.name for entry in entries]
    sizes = _agree(world, step, names, prepare, captured)
    if not captured:
        # DTensors are gathered after all ranks have prepared without an error, because a gather needs all ranks.
        sizes = _agree(world, step, names, gather, captured)
    return Save(step, world.size, sum(sizes), notes[0]), captured


def _check_can_be_saved(step: Any, entries: Iterable[Registered]) -> None:
    if type(step) is not int or not 0 <= step < 10**18:
        raise UsageError(f"step must be a whole number >= 0, not {step!r}")
    for entry in entries:
        entry.check_window(step)


def _agree(
    world: World, step: int, names: list[str], action: Callable[[], None], captured: Sequence[Capture]
) -> list[int]:
    """Call `action` on every rank, compare `step` and `names`, and return the number of bytes that each rank saves."""
    error = consensus.error_of(action)
    saved = captured if world.rank == 0 else captured[-1:]
    size = sum(free_space.needed(capture.tensors.values()) for capture in saved)
    facts = consensus.agree(world, error, None if error else {"step": step, "names": names, "size": size})
    for rank, report in enumerate(facts):
        if report["names"] != names:
            raise UsageError(
                f"rank {rank} has registered {report['names']} but rank {world.rank} has registered {names}; register "
                "the same objects in the same order on every rank"
            )
        if report["step"] != step:
            raise DesyncError(
                f"rank {rank} saves step {report['step']} but rank {world.rank} saves step {step}; "
                "save after the same number of steps on every rank"
            )
    return [report["size"] for report in facts]


@contextmanager
def _explained(step: int) -> Iterator[None]:
    try:
        yield
    # The state_dict() of a user's object can raise anything.
    except Exception as error:
        raise CheckpointError(f"step {step} was not saved: {error}") from error


@contextmanager
def parts(world_size: int, own_captures: Sequence[Capture]) -> Iterator[Iterator[Part]]:
    """Yield rank 0's captures (its own states last), then fetch and yield the capture of each other rank.

    If the block raises, rank 0 declines the captures of the remaining ranks.
    """
    *shared, own_states = own_captures
    waiting = list(range(1, world_size))

    def all_parts() -> Iterator[Part]:
        for states in shared:
            yield None, states
        yield 0, own_states
        while waiting:  # fetch captures one by one, so that rank 0 never holds the states of all ranks
            rank = waiting.pop(0)
            yield rank, captures.fetch(rank)

    try:
        yield all_parts()
    finally:
        # Skip the rank whose transfer has begun, because it can no longer be declined.
        for rank in waiting:
            captures.decline(rank)
