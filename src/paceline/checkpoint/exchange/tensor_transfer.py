"""Moves a checkpoint's tensors and documents between ranks, as raw bytes and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from paceline.checkpoint.format.safetensors_file import Spec, stored
from paceline.core.processes.consensus import carrier, decode, encode
from paceline.core.processes.missing_ranks import collective
from paceline.core.processes.world import World


def broadcast_tensors(
    world: World, specs: Mapping[str, Spec], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return rank 0's `tensors`, which have `specs`, on the CPU of every rank; one collective per tensor."""
    if world.size == 1:
        return dict(tensors)
    received = {}
    for name, spec in specs.items():
        tensor = tensors[name] if world.rank == 0 else spec.empty()
        moved = _bytes_view(tensor).to(carrier())
        if moved.numel():
            with collective(f"broadcast of {name!r}"):
                dist.broadcast(moved, src=0)
        received[name] = _back(moved, tensor) if world.rank != 0 else tensor
    return received


def send_tensors(to: int, specs: Mapping[str, Spec], tensors: Mapping[str, torch.Tensor]) -> None:
    """Send `tensors`, which have `specs`, to the rank `to`."""
    for name in specs:
        moved = _bytes_view(stored(tensors[name])).to(carrier())
        if moved.numel():
            _send(moved, to)


def receive_tensors(source: int, specs: Mapping[str, Spec]) -> dict[str, torch.Tensor]:
    """Return the tensors that the rank `source` sends, on the CPU."""
    received = {}
    for name, spec in specs.items():
        tensor = spec.empty()
        moved = _bytes_view(tensor).to(carrier())
        if moved.numel():
            _receive(moved, source)
        received[name] = _back(moved, tensor)
    return received


def send_document(to: int, value: Any) -> None:
    """Send the JSON value `value` to the rank `to`."""
    raw = encode(value)
    _send(torch.tensor([raw.numel()], device=raw.device), to)
    _send(raw, to)


def receive_document(source: int) -> Any:
    """Return the JSON value that the rank `source` sends."""
    size = torch.zeros(1, dtype=torch.int64, device=carrier())
    _receive(size, source)
    raw = torch.empty(int(size), dtype=torch.uint8, device=carrier())
    _receive(raw, source)
    return decode(raw)


def _send(tensor: torch.Tensor, to: int) -> None:
    with collective(f"transfer from rank {dist.get_rank()} to rank {to}"):
        dist.send(tensor, dst=to)


def _receive(tensor: torch.Tensor, source: int) -> None:
    with collective(f"transfer from rank {source} to rank {dist.get_rank()}"):
        dist.recv(tensor, src=source)


def _bytes_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of the contiguous `tensor` as bytes, so that any dtype can be sent."""
    return tensor.reshape(-1).view(torch.uint8)


def _back(moved: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copy the bytes `moved` back into `tensor`, and return it."""
    view = _bytes_view(tensor)
    if moved.data_ptr() != view.data_ptr():
        view.copy_(moved)
    return tensor
