"""Checks many gradients at once and copies them into buckets, without per-gradient Python code if possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.processes.missing_ranks import named_ranks
from paceline.core.state.digests import quick_digest
from paceline.core.torch_internals.tensors import LARGE, copy_each, copy_scaled
from paceline.ddp.consistency.module_changes import Trained
from paceline.ddp.options.buckets import Bucket
from paceline.ddp.reducer.backward import Backward
from paceline.ddp.transport.channel import Channel
from paceline.errors import UsageError

gradient_of: Callable[[Tensor], Tensor | None] = attrgetter("grad")
is_none: Callable[[object], bool] = partial(is_, None)
"""Compares by identity, because ``==`` of a tensor compares elements."""


def present(parameters: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the gradients that are not None, keyed by parameter index."""
    # The usual case at the end of a backward pass, detected without per-parameter Python code.
    if grads_are_none(parameters):
        return {}
    return {place: gradient for place, gradient in enumerate(map(gradient_of, parameters)) if gradient is not None}


def grads_are_none(parameters: Iterable[Tensor]) -> bool:
    return all(map(is_none, map(gradient_of, parameters)))


def copy_into(bucket: Bucket, gradients: list[Any], parameters: Sequence[nn.Parameter]) -> bool:
    """Copy the `gradients` of `parameters` (tensors or None) into `bucket`, and set each ``p.grad`` to None.

    Returns False, with ``p.grad`` unchanged, if one of them is missing or not dense.
    """
    factor = bucket.prescale
    try:  # cheaper than checking first whether all are present and dense
        if factor == 1.0:
            copy_each(bucket.views, gradients)
        else:
            copy_times(bucket.views, gradients, factor, bucket.flat if bucket.largest < LARGE else None)
    except (AttributeError, RuntimeError, TypeError):  # the caller then copies one by one and handles each case
        return False
    # Freed here rather than at the end of backward, so that only one bucket's gradients exist twice at a time.
    for parameter in parameters:
        parameter.grad = None
    return True


def copy_times(targets: list[Tensor], sources: list[Any], factor: float, flat: Tensor | None = None) -> None:
    """Copy `sources`, times `factor`, into `targets`; `flat`, if given, is their joint memory, scaled in one call."""
    if flat is None:
        copy_scaled(targets, sources, factor)
    else:
        copy_each(targets, sources)
        flat.mul_(factor)


def copy_one_by_one(backward: Backward, bucket: Bucket, trained: Trained, rank: int) -> None:
    """Copy gradients, some of which may be absent, sparse, older or another wrapper's; record these in `backward`."""
    sources, targets, absent, sparse = [], [], [], []
    saved_gradients = dict(backward.saved_gradients)
    for index, view in zip(bucket.indices, bucket.views, strict=True):
        parameter = trained.parameters[index]
        gradient = None if index in backward.averaged_elsewhere else parameter.grad
        if gradient is None or gradient.is_sparse:
            view.zero_()  # the bucket holds the averages of the last step
            if gradient is not None:
                sparse.append(index)  # stays in p.grad for the second pass
            elif index not in backward.averaged_elsewhere:
                absent.append(index)
            continue
        if gradient is not view:
            if gradient.layout is not torch.strided:
                raise UsageError(
                    f"rank {rank}: parameter {trained.names[index]!r} has a {gradient.layout} gradient, which buckets "
                    "cannot hold; use a layer with dense gradients"
                )
            if not backward.grads_were_none:
                saved_gradients[index] = gradient
        # After zero_grad(set_to_none=False) the gradient was accumulated into the bucket view itself.
        if gradient is not view or bucket.prescale != 1.0:
            sources.append(gradient)
            targets.append(view)
        parameter.grad = None
    if sources:
        copy_times(targets, sources, bucket.prescale)
    backward.saved_gradients = saved_gradients
    backward.absent = [*backward.absent, *absent]
    backward.sparse_in_buckets = [*backward.sparse_in_buckets, *sparse]


def find_out_of_bucket(backward: Backward, trained: Trained, unbucketed: Iterable[int]) -> None:
    """At the end of backward, find this rank's gradients outside the buckets, and the parameters without a gradient.

    Called after every bucket has been filled, which sets the copied gradients to None.
    """
    elsewhere = backward.averaged_elsewhere
    gradients = {index: gradient for index, gradient in present(trained.parameters).items() if index not in elsewhere}
    # A sparse gradient that arrives after a dense one was launched is a late delta like any other.
    alone = {*backward.absent, *backward.sparse_in_buckets, *unbucketed}
    backward.sparse = sparse = [index for index, gradient in gradients.items() if gradient.is_sparse and index in alone]
    backward.late = [index for index in gradients if index not in sparse] if len(sparse) < len(gradients) else []
    # A parameter with a late gradient is not absent: its gradient must not become None.
    outside = [index for index in unbucketed if index not in elsewhere]
    backward.absent = [index for index in (*backward.absent, *outside) if index not in gradients]
    backward.out_of_bucket = gradients


_ABSENT = 0x6E6F6E65
"""The number used as the digest of a gradient that is None."""


def check_equal_gradients(names: Sequence[str], parameters: Sequence[nn.Parameter], channel: Channel) -> None:
    """Compare 64-bit digests of the gradients between the ranks of `channel`, in one small collective."""
    digests = torch.tensor([digest_of(parameter.grad) for parameter in parameters], dtype=torch.int64, device="cpu")
    table = channel.gathered_rows(digests, "comparison of gradients")
    if (difference := unequal(names, table.tolist())) is not None:
        raise UsageError(
            f"model.gradients_are_averaged() found gradients that differ between ranks: {difference}; average them "
            "over the ranks first, or call model.sync_gradients() instead, which does so"
        )


def unequal(names: Sequence[str], rows: Sequence[Sequence[int]]) -> str | None:
    """Describe the first gradient that differs between ranks, given every rank's digests; None if all are equal."""
    differing = [place for place in range(len(names)) if len({row[place] for row in rows}) > 1]
    if not differing:
        return None
    place = differing[0]
    odd = [rank for rank, row in enumerate(rows) if row[place] != rows[0][place]]
    others = f" (and of {len(differing) - 1} more parameters)" if len(differing) > 1 else ""
    return f"that of {names[place]!r}{others} is not the same on {named_ranks(odd)} as on rank 0"


def digest_of(gradient: Tensor | None) -> int:
    if gradient is None:
        return _ABSENT
    if gradient.is_sparse:
        coalesced = gradient.detach().coalesce()
        return int(quick_digest(coalesced.indices()) ^ quick_digest(coalesced.values()))
    return int(quick_digest(gradient))
