"""The bytes of state that an optimizer keeps for a parameter, determined by a step with a tiny parameter."""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.core.output.wording import counted
from paceline.errors import UsageError
from paceline.nn.data_parallel import nested_tensors
from paceline.tools.shared.hub import one_line

Gradient = Literal["dense", "sparse", "none"]
EXTENTS = (11, 7, 5, 3, 2, 13, 17, 19)
"""Sizes of the tiny parameter's dimensions, all different so that a size in a state tensor identifies a dimension."""
DEFAULT_MOMENTUM = 0.9
"""Value of a numeric option that is given without a value."""


class OptimizerState:
    """Computes the bytes of state of ``optimizer_class(…, **options)``."""

    def __init__(self, optimizer_class: type[Optimizer], options: Mapping[str, Any]) -> None:
        self.optimizer_class, self.options = optimizer_class, options
        self._layouts = cache(self._layout)

    @property
    def title(self) -> str:
        """The optimizer as code: ``SGD(momentum=0.9)``."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.optimizer_class.__name__}({options})" if options else self.optimizer_class.__name__

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype, gradient: Gradient = "dense") -> int:
        """Return the bytes of state for a parameter of `shape` and `dtype` after a step."""
        return sum(
            itemsize
            * (prod(shape) if extents is None else prod(shape[extent] if extent < 0 else extent for extent in extents))
            for extents, itemsize in self._layouts(len(shape), dtype, gradient)
        )

    def _layout(
        self, dimensions: int, dtype: torch.dtype, gradient: Gradient
    ) -> list[tuple[tuple[int, ...] | None, int]]:
        """Return extents and bytes per element of each state tensor.

        An extent is a number, or a negative index into the parameter's shape; None stands for the whole shape.
        """
        shape = EXTENTS[:dimensions]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as warnings about the tiny parameter
                parameter = nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=gradient != "none")
                optimizer: Any = self.optimizer_class([parameter], **self.options)
                if gradient != "none":
                    dense = torch.ones(shape, dtype=dtype)
                    parameter.grad = dense.to_sparse() if gradient == "sparse" else dense
                    optimizer.step()
        except Exception as error:  # of the optimizer
            raise UsageError(
                f"{self.title} failed to update a parameter with {counted(dimensions, 'dimension')} in "
                f"{str(dtype).removeprefix('torch.')} (gradient: {gradient}): {one_line(error)}; choose another "
                "--optimizer or other options"
            ) from error
        index = {extent: place - dimensions for place, extent in enumerate(shape)}
        return [
            (
                None if tensor.numel() == prod(shape) else tuple(index.get(extent, extent) for extent in tensor.shape),
                tensor.element_size(),
            )
            for tensor in nested_tensors(optimizer.state.get(parameter))
        ]


def parse_optimizer(text: str) -> OptimizerState:
    """Return the torch optimizer that `text` names: ``adamw``, ``sgd+momentum``, ``adamw+betas=(0.9, 0.95)``."""
    name, *settings = text.split("+")
    classes = {
        kind.__name__.lower(): kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    if (optimizer_class := classes.get(name.strip().lower())) is None:
        raise UsageError(
            f"--optimizer {text}: torch has no optimizer {name!r}; choose one of {', '.join(sorted(classes))}"
        )
    parameters = dict(inspect.signature(optimizer_class).parameters)
    del parameters["params"]
    options: dict[str, Any] = {}
    for setting in settings:
        key, _, value = (word.strip() for word in setting.partition("="))
        if key not in parameters:
            raise UsageError(
                f"--optimizer {text}: {optimizer_class.__name__} has no option {key!r}; choose from "
                f"{', '.join(parameters)}"
            )
        is_number = type(parameters[key].default) in (int, float)
        try:
            options[key] = ast.literal_eval(value) if value else (DEFAULT_MOMENTUM if is_number else True)
        except (ValueError, SyntaxError):
            raise UsageError(f"--optimizer {text}: {key}={value} is not a Python literal; give a number") from None
    return OptimizerState(optimizer_class, options)
