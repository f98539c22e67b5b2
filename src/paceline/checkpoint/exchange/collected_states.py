"""The states that a save collects from registered objects, and their way from every rank to rank 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from paceline.checkpoint.exchange import tensor_transfer
from paceline.checkpoint.format.manifest import GENERATORS
from paceline.checkpoint.format.safetensors_file import Spec, specs_of
from paceline.checkpoint.format.state_codec import Encoder
from paceline.checkpoint.objects.registered import Registered
from paceline.checkpoint.storage import free_space
from paceline.core.processes import consensus
from paceline.core.processes.world import World
from paceline.core.state.rng import rng_state, set_rng_state
from paceline.core.torch_internals.distributed.dtensor import local_of, whole_of
from paceline.errors import CheckpointError, DesyncError, UsageError

_ASK, _DISMISS = "your turn", "not needed"


@dataclass(frozen=True)
class Capture:
    """The captured states of objects: ``nodes`` has an entry per object and refers to ``tensors``, tied ones once."""

    nodes: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]


def check(step: int, entries: Iterable[Registered]) -> None:
    """Check everything that can fail on this rank alone, before the ranks gather DTensors together.

    Raises:
        UsageError: if `step` is not a number of steps, or a state cannot be saved now.
        CheckpointError: if a state cannot be taken.
    """
    if type(step) is not int or not 0 <= step < 10**18:
        raise UsageError(f"step must be a whole number >= 0, not {step!r}")
    entries = list(entries)
    for entry in entries:
        entry.check_whole(step)
    if any(entry.is_sharded for entry in entries):
        with _explained(step):
            for entry in entries:
                entry.capture(Encoder(None if entry.per_rank else local_of))


def of_all(world: World, step: int, entries: Iterable[Registered]) -> list[Capture]:
    """Return the current state of each shared entry of `entries`, then this rank's own states.

    All ranks gather DTensors together. Only rank 0 keeps them, because it saves them.

    Raises:
        CheckpointError: if a state cannot be taken.
    """
    entries = list(entries)
    with _explained(step):
        found = [shared(entry, world.rank == 0) for entry in entries if not entry.per_rank]
        return [*found, own([*(entry for entry in entries if entry.per_rank), generators()])]


@contextmanager
def _explained(step: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"step {step} was not saved: {error}") from error


def shared(entry: Registered, keep: bool = True) -> Capture:
    """Return the state of an object that all ranks share; DTensors whole if `keep`, otherwise this rank's part.

    Raises:
        UsageError: if it holds a value that cannot be encoded.
    """

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        whole = whole_of(tensor)
        return whole if keep else local_of(tensor)

    encoder = Encoder(gathered)
    return Capture({entry.name: entry.capture(encoder)}, encoder.tensors, encoder.aliases)


def own(entries: Iterable[Registered]) -> Capture:
    """Return the states of objects that differ by rank; names of tensors start with the object's name.

    Raises:
        UsageError: if one holds a value that cannot be encoded.
    """
    encoder = Encoder()
    nodes = {entry.name: entry.capture(encoder, entry.name) for entry in entries}
    return Capture(nodes, encoder.tensors, encoder.aliases)


def check_equal(world: World, step: int, entries: Sequence[Registered], captures: Sequence[Capture]) -> int:
    """Check that the ranks of `world` are about to save the same objects and step; return the size in bytes.

    Args:
        world: the ranks.
        step: the step to save.
        entries: the registered objects.
        captures: the shared states (rank 0's are saved), then this rank's own states as the last item.

    Raises:
        UsageError: if the ranks have registered different objects.
        DesyncError: if `step` differs between them.
    """
    names = [f"{entry.name} (per rank)" if entry.per_rank else entry.name for entry in entries]
    saved = captures if world.rank == 0 else captures[-1:]
    size = sum(free_space.needed(each.tensors.values()) for each in saved)
    found = consensus.gather(world, {"step": step, "names": names, "size": size})
    for rank, theirs in enumerate(found):
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
    return sum(theirs["size"] for theirs in found)


def hand_over(capture: Capture) -> None:
    """Send `capture` to rank 0 when it asks for it. Rank 0 does not ask if the save has failed."""
    if tensor_transfer.receive_document(0) != _ASK:
        return
    specs = specs_of(capture.tensors)
    listed = {name: [spec.shape, spec.dtype] for name, spec in specs.items()}
    tensor_transfer.send_document(0, {"nodes": capture.nodes, "specs": listed, "aliases": capture.aliases})
    tensor_transfer.send_tensors(0, specs, capture.tensors)


def fetch(rank: int) -> Capture:
    """Return, on rank 0, the capture that `rank` sends."""
    tensor_transfer.send_document(rank, _ASK)
    state = tensor_transfer.receive_document(rank)
    specs = {name: Spec(tuple(shape), dtype) for name, (shape, dtype) in state["specs"].items()}
    return Capture(state["nodes"], tensor_transfer.receive_tensors(rank, specs), state["aliases"])


def dismiss(rank: int) -> None:
    """Tell `rank` that its capture is not needed, because the save has failed."""
    tensor_transfer.send_document(rank, _DISMISS)


class _Generators:
    """Adapter that makes this rank's random generators an object with a state."""

    def state_dict(self) -> dict[str, Any]:
        return rng_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_rng_state(state)


def generators() -> Registered:
    """Return this rank's random generators, as if they were registered."""
    return Registered(GENERATORS, _Generators(), per_rank=True)
