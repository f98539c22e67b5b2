"""Numeric settings of optimizers, such as learning rates, which the ranks compare in each synchronized backward pass.

The settings are read at the end of the backward pass, from the optimizers that have stepped since the last one. So a
difference is found before a step is taken with it, unless settings change between backward and step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from operator import is_
from typing import Any, TypeAlias
from weakref import ref
from zlib import crc32

from torch import Tensor
from torch.optim import Optimizer

from paceline.core.state.data_position import who_has

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
