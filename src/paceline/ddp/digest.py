"""The digest: a few bytes that show, without another collective, that ranks do not need control blocks.

The settings are read at the end of the backward pass, from the optimizers that have stepped since the last one. So a
difference is found before a step is taken with it, unless settings change between backward and step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import inf
from numbers import Real
from operator import is_
from struct import pack, unpack
from typing import Any, TypeAlias
from weakref import ref
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.data_position import who_has
from paceline.ddp.weights import UNWEIGHTED

# The digest: a few bytes that show, without another collective, that ranks do not need control blocks.
#
# Each rank writes its weight and a digest of its status to its slot in the tail of the last bucket. A rank that needs
# to
# report anything else leaves its slot at zero. After the bucket is reduced, every rank reads the same tail: if all
# digests are present and equal, the step is over; otherwise all ranks exchange their control blocks. Each rank decides
# on
# its own, but because all read the same tail, they launch the same collectives.
#
#     [ slot of rank 0 | slot of rank 1 | … ]     a slot: 1, 8 bytes of digest, 8 bytes of weight, one byte per element
#
# Only one rank writes to each slot, so sums are exact in every floating-point type, including bfloat16.
#
# Decision 0049 says why.


# One byte per element, because bfloat16 represents every whole number only up to 256.
_DIGEST = 1 + 8  # elements of a slot that precede the weight
_SLOT = _DIGEST + 8
Notes = Sequence[tuple[float, float]]
"""Weight and weighting of every rank; see :class:`~paceline.ddp.control_block.Status`."""


def width(size: int) -> int:
    """Return the number of elements in the tail for a group of `size` ranks."""
    return _SLOT * size


class StatusDigest:
    """Writes this rank's digest and weight, and compares the digests of all ranks.

    Args:
        rank: this rank in its group.
        size: number of ranks in the group.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._bytes = bytearray(width(size))
        self._slots = torch.frombuffer(self._bytes, dtype=torch.uint8)  # shares memory, so a step creates no tensor
        self._own = slice(rank * _SLOT, (rank + 1) * _SLOT)
        self._starts = range(0, width(size), _SLOT)
        self._unweighted = [(0.0, UNWEIGHTED)] * size

    def write(self, tail: Tensor, numbers: Sequence[int] | None, weight: float) -> None:
        """Fill the `tail` of a bucket with the weight and a digest of `numbers`, which must be equal on every rank.

        If `numbers` is None, this rank has more to report, and the tail is filled with zeros.
        """
        if numbers is None:
            tail.zero_()
            return
        packed = pack(f"<{len(numbers)}q", *numbers)
        # The leading 1 distinguishes a digest of zeros from an empty slot.
        self._bytes[self._own] = b"\1" + blake2b(packed, digest_size=8).digest() + pack("<d", weight)
        tail.copy_(self._slots)

    def read(self, tail: Tensor, weighting: int) -> Notes | None:
        """Return each rank's weight, paired with `weighting`, if the digests agree; otherwise None."""
        slots = tail.tolist()
        first = slots[:_DIGEST]
        # Zeros mean that a rank has more to report; Inf or NaN means that the sum went wrong.
        if not 0 < first[0] < inf or any(slots[start : start + _DIGEST] != first for start in self._starts):
            return None
        if weighting == UNWEIGHTED:
            return self._unweighted
        weights = [bytes(map(int, slots[start + _DIGEST : start + _SLOT])) for start in self._starts]
        return [(unpack("<d", weight)[0], weighting) for weight in weights]


ByParameter: TypeAlias = Mapping[int, tuple[str, Mapping[str, Any]]]
"""For each averaged parameter, by index: its group in words, and the group's settings."""
_PLAIN = {float, int, bool, type(None)}


class OptimizerSettings:
    """The settings of one wrapper's optimizers on this rank, in groups with parameters that the wrapper averages.

    Only settings that the optimizer itself defines count. A tensor on a GPU is left out, because reading it would wait.
    """

    comparisons_left = 0
    """How many more times digests may differ although the settings of each parameter agree, because ranks group the
    parameters differently; at 0, ranks stop comparing. The same on every rank."""

    def __init__(self) -> None:
        self.averaged: Mapping[int, int] = {}
        """Index of each averaged parameter, by id."""
        self.stepped: list[ref[Optimizer]] = []
        """The optimizers that stepped last, each once; cleared when one of them steps again."""
        self._values, self._digest = list[Any](), 0

    def digest(self) -> int:
        """Return a number that is equal on all ranks if the settings are; 0 if they are not compared."""
        if not self.comparisons_left:
            return 0
        groups = self._groups()
        values = [value for _, _, group in groups for value in group.values()]
        if len(values) != len(self._values) or not all(map(is_, values, self._values)):
            settings = [
                [value if type(value) in _PLAIN else _number(value) for value in map(group.get, optimizer.defaults)]
                for optimizer, _, group in groups
                if not self.averaged.keys().isdisjoint(map(id, group["params"]))
            ]
            self._digest = crc32(repr(settings).encode())
            # The content of a tensor may change.
            self._values = [] if Tensor in map(type, values) else values
        return self._digest

    def by_parameter(self) -> ByParameter:
        return {
            self.averaged[id(parameter)]: (f"in group {number} of {type(optimizer).__name__}", settings)
            for optimizer, number, group in self._groups()
            for settings in [{name: _number(group.get(name)) for name in optimizer.defaults}]
            for parameter in group["params"]
            if id(parameter) in self.averaged
        }

    def _groups(self) -> list[tuple[Optimizer, int, dict[str, Any]]]:
        optimizers = [optimizer for reference in [*self.stepped] if (optimizer := reference()) is not None]
        return [(optimizer, *numbered) for optimizer in optimizers for numbered in enumerate(optimizer.param_groups)]


def _number(value: Any) -> Any:
    """Return a number, or a tuple of numbers, that does not depend on the type of `value`; None for other values."""
    if isinstance(value, Tensor):
        return value.item() if value.is_cpu and value.numel() == 1 else None
    if isinstance(value, tuple):
        return tuple(map(_number, value))
    return value if type(value) in _PLAIN else float(value) if isinstance(value, Real) else None


def find_difference(ranks: Sequence[ByParameter]) -> str | None:
    """Describe the first setting that differs between ranks for the same parameter; None if there is none."""
    for index in sorted(set().union(*ranks)):
        held = {rank: found[index] for rank, found in enumerate(ranks) if index in found}
        place, settings = next(iter(held.values()))
        for name in settings:
            values = {rank: found[name] for rank, (_, found) in held.items() if name in found}
            if len(set(values.values())) > 1:
                remedy = "use equal settings on all ranks; step ReduceLROnPlateau with paceline.mean_over_ranks(loss)"
                return f"ranks differ: {who_has(values, f'as {name} {place}')}; {remedy}"
    return None
