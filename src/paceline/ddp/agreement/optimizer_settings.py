"""Numeric settings of optimizers, such as learning rates, which the ranks compare in each synchronized backward pass.

The settings are read at the end of the backward pass, from the optimizers that have stepped since the last one. So a
difference is found before a step is taken with it, unless settings change between backward and step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

from torch import Tensor
from torch.optim import Optimizer

from paceline.core.state.data_position import who_has


class OptimizerSettings:
    """The settings of one wrapper's optimizers on this rank, in groups with parameters that the wrapper averages.

    Only settings that the optimizer itself defines count. A tensor on a GPU is left out, because reading it would wait.
    """

    is_compared = False
    """Whether ranks compare them; the same on every rank."""

    def __init__(self) -> None:
        self.averaged: Mapping[int, int] = {}
        """Index of each averaged parameter, by id."""
        self.stepped: WeakKeyDictionary[Optimizer, None] = WeakKeyDictionary()
        """The optimizers that stepped last, each once; cleared when one of them steps again."""
        self._values, self._digest = list[Any](), 0

    def digest(self) -> int:
        """Return a number that is equal on all ranks if the settings are; 0 if they are not compared."""
        values = [value for optimizer in self.stepped for group in optimizer.param_groups for value in group.values()]
        if len(values) != len(self._values) or not all(map(is_, values, self._values)):
            self._digest = crc32(repr(sorted(str(settings) for _, settings in self._groups())).encode())
            # The content of a tensor may change.
            self._values = [] if any(isinstance(value, Tensor) for value in values) else values
        return self._digest if self.is_compared else 0

    def by_parameter(self) -> dict[int, dict[str, str]]:
        """Return the settings for each averaged parameter, by its index."""
        pairs = [(id(parameter), settings) for group, settings in self._groups() for parameter in group]
        return {self.averaged[key]: settings for key, settings in pairs if key in self.averaged}

    def _groups(self) -> Iterator[tuple[list[Tensor], dict[str, str]]]:
        for optimizer in self.stepped:
            for number, group in enumerate(optimizer.param_groups):
                if any(id(parameter) in self.averaged for parameter in group["params"]):
                    place = f"in group {number} of {type(optimizer).__name__}"
                    yield group["params"], {f"{name} {place}": _number(group.get(name)) for name in optimizer.defaults}


def _number(value: Any) -> str:
    if isinstance(value, Tensor) and value.is_cpu:
        value = value.tolist()
    return str(value) if isinstance(value, int | float | tuple) else ""


def find_difference(ranks: Sequence[Mapping[int, Mapping[str, str]]]) -> str | None:
    """Describe the first setting that differs between ranks for the same parameter.

    Returns None if there is none, because ranks may train different parameters.
    """
    for index in sorted(set().union(*ranks)):
        held = {rank: settings[index] for rank, settings in enumerate(ranks) if index in settings}
        for name in next(iter(held.values())):
            values = {rank: settings[name] for rank, settings in held.items() if name in settings}
            if len(set(values.values())) > 1:
                remedy = "use equal settings on all ranks; give a scheduler paceline.mean_over_ranks(loss)"
                return f"ranks differ: {who_has(values, f'as {name}')}; {remedy}"
    return None
