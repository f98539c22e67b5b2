"""Questions about many gradients at once, without a line of Python for each: models have hundreds, in every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import TypeGuard

import torch
from torch import Tensor

_gradient, _layout, _is_none = attrgetter("grad"), attrgetter("layout"), partial(is_, None)
_STRIDED = {torch.strided}


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """Return ``p.grad`` of each parameter."""
    return list(map(_gradient, parameters))


def present(parameters: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the gradients that are there, by the parameter's place."""
    if none_has_gradient(parameters):
        return {}
    return {place: gradient for place, gradient in enumerate(gradients_of(parameters)) if gradient is not None}


def any_missing(gradients: Iterable[Tensor | None]) -> bool:
    """Whether one of `gradients` is None."""
    return any(map(_is_none, gradients))


def none_has_gradient(parameters: Iterable[Tensor]) -> bool:
    """Whether no parameter has a gradient."""
    return all(map(_is_none, map(_gradient, parameters)))


def are_dense(gradients: Sequence[Tensor | None]) -> TypeGuard[list[Tensor]]:
    """Whether all `gradients` are there, and dense."""
    try:
        return set(map(_layout, gradients)) <= _STRIDED
    except AttributeError:  # of None
        return False
