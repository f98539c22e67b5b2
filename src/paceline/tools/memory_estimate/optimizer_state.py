"""The bytes of state that an optimizer keeps for a parameter, determined by a step with a tiny parameter."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.core.option_rules import choice
from paceline.core.output.wording import counted
from paceline.errors import UsageError
from paceline.nn.data_parallel import nested_tensors
from paceline.tools.shared.hub import one_line

EXTENTS = (11, 7, 5, 3, 2, 13, 17, 19)
"""Sizes of the tiny parameter's dimensions, all different so that a size in a state tensor identifies a dimension."""
DEFAULT_MOMENTUM = 0.9
"""Value of a numeric option."""


class OptimizerState:
    """Computes the bytes of state of ``optimizer_class(…, **options)``."""

    def __init__(self, optimizer_class: type[Optimizer], options: Mapping[str, Any]) -> None:
        self.optimizer_class, self.options = optimizer_class, options
        self.title = "+".join([optimizer_class.__name__, *options])
        """The optimizer with its options: ``SGD+momentum``."""
        self._layouts = cache(self._layout)

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the bytes of state for a parameter of `shape` and `dtype` after a step."""
        return sum(
            itemsize * prod(shape[extent] if extent < 0 else extent for extent in extents)
            for extents, itemsize in self._layouts(len(shape), dtype)
        )

    def _layout(self, dimensions: int, dtype: torch.dtype) -> list[tuple[tuple[int, ...], int]]:
        """Return extents and bytes per element of each state tensor.

        An extent is a number, or a negative index into the parameter's shape.
        """
        shape = EXTENTS[:dimensions]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as warnings about the tiny parameter
                parameter = nn.Parameter(torch.ones(shape, dtype=dtype, device="cpu"))
                parameter.grad = torch.ones_like(parameter)
                optimizer: Any = self.optimizer_class([parameter], **self.options)
                optimizer.step()
        except Exception as error:  # of the optimizer
            raise UsageError(
                f"{self.title} failed to update a parameter with {counted(dimensions, 'dimension')} in "
                f"{str(dtype).removeprefix('torch.')}: {one_line(error)}; choose another --optimizer or other options"
            ) from error
        index = {extent: place - dimensions for place, extent in enumerate(shape)}
        return [
            (tuple(index.get(extent, extent) for extent in tensor.shape), tensor.element_size())
            for tensor in nested_tensors(optimizer.state.get(parameter))
        ]


def parse_optimizer(text: str) -> OptimizerState:
    """Return the torch optimizer that `text` names: ``adamw``, ``sgd+momentum``, ``adamw+amsgrad``."""
    name, *options = (word.strip().lower() for word in text.split("+"))
    classes = {
        kind.__name__.lower(): kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    optimizer_class = classes[choice("--optimizer", name, tuple(sorted(classes)))]
    parameters = dict(inspect.signature(optimizer_class).parameters)
    del parameters["params"]
    # Only which options are set decides the size of the state, not their values.
    values: dict[str, Any] = {}
    for option in options:
        default = parameters[choice(f"an option of --optimizer {name}", option, tuple(parameters))].default
        values[option] = DEFAULT_MOMENTUM if type(default) in (int, float) else True
    return OptimizerState(optimizer_class, values)
