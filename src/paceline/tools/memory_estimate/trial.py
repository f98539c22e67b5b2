"""The bytes that an optimizer keeps for a parameter, and those of its step, learned from steps on tiny ones."""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.hub import one_line
from paceline.core.output.wording import counted
from paceline.errors import UsageError
from paceline.nn.data_parallel import nested_tensors
from paceline.tools.memory_estimate.live_bytes import LiveBytes

Gradient = Literal["dense", "sparse", "none"]
_EXTENTS = (11, 7, 5, 3, 2, 13, 17, 19)
"""Extents of a tiny parameter: all different, so that each dimension of its state shows its origin."""
_ELEMENTS = 4096
"""Elements of the parameter by which temporaries are measured: many, so that scalars among them do not count."""
_MOMENTUM = 0.9
"""Value of an option that takes a number and is named without one."""


class StateTensor(NamedTuple):
    """A tensor that an optimizer keeps for each parameter."""

    factors: tuple[int | str, ...]
    """Extents: numbers, ``"0"``, ``"1"``, … for the parameter's dimensions, ``"all"`` for all its elements."""
    itemsize: int

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return its bytes for a parameter of `shape`."""
        if self.factors == ("all",):
            return prod(shape) * self.itemsize
        return prod(each if isinstance(each, int) else shape[int(each)] for each in self.factors) * self.itemsize


class Temporaries(NamedTuple):
    """The tensors that exist during a step alone, in bytes for each byte of a parameter."""

    own: float
    """Largest number while the parameter is updated."""
    carried: float
    """Bytes that are left when the next one is updated, because a loop's variables still hold them."""
    is_for_all: bool
    """Whether all parameters have theirs at once, as with ``foreach=True``, not one after the other."""


class Trial:
    """Measures the state and the temporaries of ``optimizer_class(…, **options)``."""

    def __init__(
        self, optimizer_class: type[Optimizer], options: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.optimizer_class, self.options, self._defaults = optimizer_class, options, defaults or {}
        self._tensors = cache(self._step)
        self._temporaries = cache(self._later_step)

    @property
    def title(self) -> str:
        """The optimizer in code: ``SGD(momentum=0.9)``."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.optimizer_class.__name__}({given})" if given else self.optimizer_class.__name__

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype, gradient: Gradient = "dense") -> int:
        """Return the bytes of state for a parameter, after a step.

        Args:
            shape: of the parameter.
            dtype: of the parameter.
            gradient: its kind; a frozen parameter has none, but some optimizers keep a state for it all the same.

        Raises:
            UsageError: if the optimizer cannot train such a parameter.
        """
        return sum(tensor.nbytes(shape) for tensor in self._tensors(len(shape), dtype, gradient))

    def temporary_bytes(self, parts: Iterable[tuple[int, int, torch.dtype]]) -> int:
        """Return the largest number of bytes of temporaries in a step.

        Args:
            parts: dimensions, elements and dtype of each trained parameter with a dense gradient.
        """
        one_by_one, together, carried = 0.0, 0.0, 0.0
        for dimensions, numel, dtype in parts:
            found, nbytes = self._temporaries(dimensions, dtype), numel * dtype.itemsize
            if found.is_for_all:
                together += found.own * nbytes
            else:
                one_by_one = max(one_by_one, carried + found.own * nbytes)
            carried = found.carried * nbytes
        return int(one_by_one + together)

    def _later_step(self, dimensions: int, dtype: torch.dtype) -> Temporaries:
        shape = (round(_ELEMENTS ** (1 / dimensions)),) * dimensions if dimensions else ()
        one, two, three = (
            self._peak_of_step(shape, dtype, count) / (prod(shape) * dtype.itemsize) for count in (1, 2, 3)
        )
        # One by one a third parameter adds nothing; all at once it adds as much as the first. A half lies between.
        return Temporaries(one, two - one, three > two + 0.5)

    def _peak_of_step(self, shape: tuple[int, ...], dtype: torch.dtype, count: int) -> int:
        """Return the most bytes of temporaries in a step of `count` parameters that has found its state."""
        parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for _ in range(count)]
        optimizer: Any = self.optimizer_class(parameters, **self.options, **self._defaults)
        gradients = [torch.ones(shape, dtype=dtype) for _ in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        state = nested_tensors(list(optimizer.state.values()))
        with LiveBytes([*parameters, *gradients, *state]) as live:
            optimizer.step()
        peak: int = live.peak
        return peak

    def _step(self, dimensions: int, dtype: torch.dtype, kind: Gradient) -> list[StateTensor]:
        shape = _EXTENTS[:dimensions]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they are about the tiny parameter, not about the user's model
                parameter = nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=kind != "none")
                optimizer: Any = self.optimizer_class([parameter], **self.options)
                if kind != "none":
                    gradient = torch.ones(shape, dtype=dtype)
                    parameter.grad = gradient.to_sparse() if kind == "sparse" else gradient
                    optimizer.step()
        except Exception as error:  # the optimizer's, of any class
            sparse = " with a sparse gradient" if kind == "sparse" else ""
            raise UsageError(
                f"{self.title} failed at a step with a parameter of {counted(dimensions, 'dimension')} in "
                f"{str(dtype).removeprefix('torch.')}{sparse}: {one_line(error)}; choose another --optimizer, or other "
                "options"
            ) from error
        return [_described(tensor, shape) for tensor in nested_tensors(optimizer.state.get(parameter))]


def _described(tensor: Tensor, shape: tuple[int, ...]) -> StateTensor:
    if tensor.numel() == prod(shape):
        return StateTensor(("all",), tensor.element_size())
    place = {extent: str(index) for index, extent in enumerate(shape)}
    return StateTensor(tuple(place.get(extent, extent) for extent in tensor.shape), tensor.element_size())


def parse_optimizer(text: str, *, is_foreach: bool = False) -> Trial:
    """Return the trial of an optimizer of torch: ``adamw``, ``sgd+momentum``, ``adamw+amsgrad+betas=(0.9, 0.95)``.

    Args:
        text: name and options.
        is_foreach: whether it updates all parameters at once, unless `text` says otherwise.

    Raises:
        UsageError: if torch has no such optimizer, or it has no such option.
    """
    name, *settings = text.split("+")
    known = {kind.__name__.lower(): kind for kind in vars(torch.optim).values() if _is_optimizer(kind)}
    optimizer_class = known.get(name.strip().lower())
    if optimizer_class is None:
        names = ", ".join(sorted(known))
        raise UsageError(f"--optimizer {text}: torch has no optimizer {name!r}; choose one of {names}")
    taken = inspect.signature(optimizer_class).parameters
    options: dict[str, Any] = {}
    for part in settings:
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in taken or key == "params":
            names = ", ".join(name for name in taken if name != "params")
            raise UsageError(
                f"--optimizer {text}: {optimizer_class.__name__} has no option {key!r}; its options are {names}"
            )
        default = taken[key].default
        if not value:
            # A bool is an int, too, but an option such as nesterov is meant to be switched on.
            is_number = isinstance(default, int | float) and not isinstance(default, bool)
            options[key] = _MOMENTUM if is_number else True
            continue
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise UsageError(
                f"--optimizer {text}: {value!r} is not a value for {key}; give a number or the like"
            ) from None
    # Either of the two is the user's choice, as torch takes one of them at most.
    if is_foreach and "foreach" in taken and not {"foreach", "fused"} & options.keys():
        return Trial(optimizer_class, options, {"foreach": True})
    return Trial(optimizer_class, options)


def _is_optimizer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
