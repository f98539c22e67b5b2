"""States captured from registered objects, and their transfer between ranks: tensors as bytes, the rest as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from paceline.checkpoint.manifest import GENERATORS
from paceline.checkpoint.registered import Registered
from paceline.checkpoint.safetensors_file import Spec, packed, runs, specs_of, unpacked
from paceline.checkpoint.state_codec import Encoder
from paceline.core.consensus import carrier, decode, encode
from paceline.core.missing_ranks import collective
from paceline.core.rng import rng_state, set_rng_state
from paceline.core.torch_distributed import local_of, whole_of
from paceline.core.world import World


@dataclass(frozen=True)
class Capture:
    """Captured states of objects: one node per object, which refers to its tensors by name."""

    nodes: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]


def shared(entry: Registered, keep: bool = True) -> Capture:
    """Return the state of a shared object, with full DTensors if `keep` is true, otherwise with this rank's parts."""

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        full_tensor = whole_of(tensor)  # a collective
        return full_tensor if keep else local_of(tensor)

    encoder = Encoder(gathered)
    return Capture({entry.name: entry.capture(encoder)}, encoder.tensors, encoder.aliases)


def own(entries: Iterable[Registered]) -> Capture:
    """Return this rank's states of per-rank objects; each tensor's name starts with the name of its object."""
    encoder = Encoder()
    nodes = {entry.name: entry.capture(encoder, entry.name) for entry in entries}
    return Capture(nodes, encoder.tensors, encoder.aliases)


def generators() -> Registered:
    """Return an entry for this rank's random generators."""
    return Registered(GENERATORS, SimpleNamespace(state_dict=rng_state, load_state_dict=set_rng_state), per_rank=True)


def hand_over(capture: Capture) -> None:
    """Send `capture` to rank 0, unless rank 0 declines it because the save has failed."""
    # Rank 0 asks first, because a large send would hang if rank 0 had failed.
    is_wanted = torch.zeros(1, dtype=torch.bool, device=carrier())
    _receive(is_wanted, 0)
    if not is_wanted:
        return
    specs = specs_of(capture.tensors)
    listed = {name: [spec.shape, spec.dtype] for name, spec in specs.items()}
    document = encode({"nodes": capture.nodes, "specs": listed, "aliases": capture.aliases})
    _send(torch.tensor([document.numel()], device=document.device), 0)
    _send(document, 0)
    send_tensors(0, specs, capture.tensors)


def fetch(rank: int) -> Capture:
    """Receive the capture of `rank`; called on rank 0."""
    _send(torch.ones(1, dtype=torch.bool, device=carrier()), rank)
    size = torch.zeros(1, dtype=torch.int64, device=carrier())
    _receive(size, rank)
    document = torch.empty(int(size), dtype=torch.uint8, device=carrier())
    _receive(document, rank)
    state = decode(document)
    specs = {name: Spec(tuple(shape), dtype) for name, (shape, dtype) in state["specs"].items()}
    return Capture(state["nodes"], receive_tensors(rank, specs), state["aliases"])


def decline(rank: int) -> None:
    """Tell `rank` that rank 0 does not need its capture."""
    _send(torch.zeros(1, dtype=torch.bool, device=carrier()), rank)


def broadcast_tensors(
    world: World, specs: Mapping[str, Spec], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Broadcast rank 0's `tensors`, described by `specs`, to the CPU of every rank."""
    if world.size == 1:
        return dict(tensors)
    received: dict[str, torch.Tensor] = {}
    # Send runs of tensors, because one collective per small tensor is slow, and one for all needs a second copy.
    for run in runs(specs):
        moved = packed(run, tensors if world.rank == 0 else None).to(carrier())
        if moved.numel():
            with collective(f"broadcast of {next(iter(run))!r}"):
                dist.broadcast(moved, src=0)
        if world.rank != 0:
            received |= unpacked(run, moved)
    return dict(tensors) if world.rank == 0 else received


def send_tensors(to: int, specs: Mapping[str, Spec], tensors: Mapping[str, torch.Tensor]) -> None:
    """Send `tensors`, described by `specs`, to rank `to`."""
    for run in runs(specs):
        moved = packed(run, tensors).to(carrier())
        if moved.numel():
            _send(moved, to)


def receive_tensors(source: int, specs: Mapping[str, Spec]) -> dict[str, torch.Tensor]:
    """Receive the tensors that rank `source` sends, on the CPU."""
    received: dict[str, torch.Tensor] = {}
    for run in runs(specs):
        moved = packed(run).to(carrier())
        if moved.numel():
            _receive(moved, source)
        received |= unpacked(run, moved)
    return received


def _send(tensor: torch.Tensor, to: int) -> None:
    with collective(f"transfer from rank {dist.get_rank()} to rank {to}"):
        dist.send(tensor, dst=to)


def _receive(tensor: torch.Tensor, source: int) -> None:
    with collective(f"transfer from rank {source} to rank {dist.get_rank()}"):
        dist.recv(tensor, src=source)
