"""Moves a checkpoint's tensors and documents between ranks, as raw bytes and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from paceline.checkpoint.format.safetensors_file import Spec, packed, runs, unpacked
from paceline.core.processes.consensus import carrier, decode, encode
from paceline.core.processes.missing_ranks import collective
from paceline.core.processes.world import World


def broadcast_tensors(
    world: World, specs: Mapping[str, Spec], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return rank 0's `tensors`, which have `specs`, on the CPU of every rank; one collective per run."""
    if world.size == 1:
        return dict(tensors)
    received: dict[str, torch.Tensor] = {}
    for run in runs(specs):
        moved = packed(run, tensors if world.rank == 0 else None).to(carrier())
        if moved.numel():
            with collective(f"broadcast of {next(iter(run))!r}"):
                dist.broadcast(moved, src=0)
        if world.rank != 0:
            received |= unpacked(run, moved)
    return dict(tensors) if world.rank == 0 else received


def send_tensors(to: int, specs: Mapping[str, Spec], tensors: Mapping[str, torch.Tensor]) -> None:
    """Send `tensors`, which have `specs`, to the rank `to`."""
    for run in runs(specs):
        moved = packed(run, tensors).to(carrier())
        if moved.numel():
            _send(moved, to)


def receive_tensors(source: int, specs: Mapping[str, Spec]) -> dict[str, torch.Tensor]:
    """Return the tensors that the rank `source` sends, on the CPU."""
    received: dict[str, torch.Tensor] = {}
    for run in runs(specs):
        moved = packed(run).to(carrier())
        if moved.numel():
            _receive(moved, source)
        received |= unpacked(run, moved)
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
