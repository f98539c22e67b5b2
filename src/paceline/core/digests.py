"""Digests of tensors and weights, to compare replicas and runs bit by bit."""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache

import torch
from torch import Tensor, nn

from paceline.core.unwrapping import unwrap

PIECE = 2**14
"""Number of 64-bit words that are digested at once on the CPU, so that they fit into the cache."""


def tensor_digest(tensor: Tensor) -> bytes:
    """Return the SHA-256 of a tensor's elements in logical order, on any device and with any strides."""
    # In logical order, so that channels-last and contiguous replicas compare equal.
    plain = tensor.detach().cpu().resolve_conj().contiguous()
    size = plain.numel() * plain.element_size()
    if size == 0:
        return hashlib.sha256(b"").digest()
    # Read the tensor's memory, which works for every dtype and without NumPy.
    return hashlib.sha256((ctypes.c_char * size).from_address(plain.data_ptr())).digest()


def quick_digest(tensor: Tensor) -> Tensor:
    """Return 64 bits that depend on every element of a tensor, in a scalar int64 tensor on its device.

    It takes about as long as reading the tensor. It is the sum, modulo 2**64, of the tensor's 64-bit words, each mixed
    and multiplied by a different odd number. A flipped bit always changes it, and swapped values almost always do. It
    protects against accidents, not against attacks.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).view(-1)
    bytes_ = flat.view(torch.uint8)
    aligned = len(bytes_) // 8 * 8
    if bytes_.storage_offset() % 8:
        bytes_ = bytes_.clone()  # words must be aligned
    words, tail = bytes_[:aligned].view(torch.int64), bytes_[aligned:]
    piece = PIECE if words.device.type == "cpu" else 64 * PIECE
    sums = [_mixed_sum(part) for part in words.split(piece)] if len(words) else []
    if len(tail):
        last = torch.zeros(8, dtype=torch.uint8, device=tail.device)
        last[: len(tail)] = tail
        sums.append(_mixed_sum(last.view(torch.int64)))
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    return _mixed_sum(torch.stack(sums))


def _mixed_sum(words: Tensor) -> Tensor:
    # Fold high bits onto low bits first, because in a product modulo 2**64 high bits do not affect low bits.
    return ((words ^ (words >> 32)) * _odd_numbers(len(words), words.device)).sum()


@cache
def _all_odd_numbers(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(2**31 - 1)
    numbers = torch.randint(-(2**62), 2**62, (count,), generator=generator, dtype=torch.int64, device="cpu")
    return (2 * numbers + 1).to(device)


def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """Return random odd numbers, the same on every rank."""
    # Round the length up, usually to one of two values, because the numbers are cached for each length.
    held = PIECE if count <= PIECE else 64 * PIECE
    return _all_odd_numbers(max(held, count), device)[:count]


def weights_sha256(module: nn.Module) -> str:
    """Return one hexadecimal SHA-256 over the names and values of all parameters and buffers."""
    total = hashlib.sha256()
    for name, tensor in sorted(unwrap(module).state_dict().items()):
        if isinstance(tensor, Tensor):
            total.update(name.encode() + b"\0" + tensor_digest(tensor))
    return total.hexdigest()
