"""Many gradients at once, without a line of Python for each where that can be: questions, and the way into buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.state.buckets import Bucket
from paceline.core.torch_internals.tensors import LARGE, copy_each, copy_scaled
from paceline.ddp.consistency.trained import Trained
from paceline.ddp.reducer.backward import Backward
from paceline.errors import UsageError

gradient_of: Callable[[Tensor], Tensor | None] = attrgetter("grad")
is_none: Callable[[object], bool] = partial(is_, None)
"""By identity: a tensor says something else of ==."""


def present(parameters: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the gradients that are there, by the parameter's place."""
    if none_has_gradient(parameters):
        return {}
    return {place: gradient for place, gradient in enumerate(map(gradient_of, parameters)) if gradient is not None}


def none_has_gradient(parameters: Iterable[Tensor]) -> bool:
    """Whether no parameter has a gradient."""
    return all(map(is_none, map(gradient_of, parameters)))


def copy_into(bucket: Bucket, gradients: list[Any], parameters: Sequence[nn.Parameter]) -> bool:
    """Copy the `gradients` of `parameters`, tensors or None, into `bucket`, and free the parameters' own.

    Returns False, and does nothing, where one of them is missing or not dense.
    """
    factor = bucket.prescale
    try:  # cheaper than to ask whether all are there, and dense
        if factor == 1.0:
            copy_each(bucket.views, gradients)
        else:
            copy_times(bucket.views, gradients, factor, bucket.flat if bucket.largest < LARGE else None)
    except (AttributeError, RuntimeError, TypeError):  # then a look at each tells why
        return False
    for parameter in parameters:
        parameter.grad = None
    return True


def copy_times(targets: list[Tensor], sources: list[Any], factor: float, whole: Tensor | None = None) -> None:
    """Copy `sources`, times `factor`, into `targets`, which may together be `whole`: that is multiplied at once."""
    if whole is None:
        copy_scaled(targets, sources, factor)
    else:
        copy_each(targets, sources)
        whole.mul_(factor)


def copy_one_by_one(backward: Backward, bucket: Bucket, trained: Trained, rank: int) -> None:
    """Copy gradients where some are absent, sparse, another wrapper's, or were there before; note which in `backward`.

    Raises:
        UsageError: for a layout that is neither dense nor sparse.
    """
    sources, targets, absent, sparse = [], [], [], []
    held = dict(backward.held)
    for index, view in zip(bucket.indices, bucket.views, strict=True):
        parameter = trained.parameters[index]
        gradient = None if index in backward.elsewhere else parameter.grad
        if gradient is None or gradient.is_sparse:
            view.zero_()
            if gradient is not None:
                sparse.append(index)
            elif index not in backward.elsewhere:
                absent.append(index)
            continue
        if gradient is not view:
            _check_strided(gradient, trained.names[index], rank)
            if not backward.cleared:
                held[index] = gradient
        if gradient is not view or bucket.prescale != 1.0:
            sources.append(gradient)
            targets.append(view)
        parameter.grad = None
    if sources:
        copy_times(targets, sources, bucket.prescale)
    backward.held = held
    backward.absent = [*backward.absent, *absent]
    backward.sparse_in_buckets = [*backward.sparse_in_buckets, *sparse]


def _check_strided(gradient: Tensor, name: str, rank: int) -> None:
    if gradient.layout is not torch.strided:
        raise UsageError(
            f"rank {rank}: parameter {name!r} has a {gradient.layout} gradient, which buckets cannot hold; use a layer "
            "with dense gradients"
        )


def find_apart(backward: Backward, trained: Trained, unbucketed: Iterable[int]) -> None:
    """Find, at the end of backward, this rank's gradients that are in no bucket, and the parameters that have none.

    Every bucket has been filled, and the gradients in it are no parameter's any more.
    """
    elsewhere = backward.elsewhere
    apart = {index: gradient for index, gradient in present(trained.parameters).items() if index not in elsewhere}
    # A sparse gradient that comes after a dense one was launched is a late delta like any other.
    alone = {*backward.absent, *backward.sparse_in_buckets, *unbucketed}
    backward.sparse = sparse = [index for index, gradient in apart.items() if gradient.is_sparse and index in alone]
    backward.late = [index for index in apart if index not in sparse] if len(sparse) < len(apart) else []
    # A gradient that comes late is present, too: its parameter must not end as None.
    outside = [index for index in unbucketed if index not in elsewhere]
    backward.absent = [index for index in (*backward.absent, *outside) if index not in apart]
    backward.apart = apart
