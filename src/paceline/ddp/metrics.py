"""Values of every rank brought together for metrics, after making sure that they belong together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import UsageError
from paceline.rollcall import called_by_all, collective

Part = tuple[int, Any]
"""A rank and what it gave at some place of its value; never None."""


def gather_for_metrics(value: Any) -> Any:
    """Every rank's `value`, concatenated along dimension 0 in the order of ranks, on every rank.

    Ranks may hold different numbers of rows; every row is there exactly once. With slices of a
    :class:`paceline.data.GlobalBatchSampler` the result is in the order of the global batch.

    Args:
        value: a tensor of at least one dimension, or a tuple, list or dict of them (nested); ``None``, also inside, on
            a rank that has no rows. A tensor without rows takes the others' dtype and shape.

    Returns:
        The same structure, tuples as tuples and named ones by their names, on the CPU of every rank; ``None`` where no
        rank had rows.

    Raises:
        UsageError: on every rank, if one gave a value that is no tensor, or a tensor without dimensions, or if ranks
            differ in structure, in dtype or in the shape of rows; names the place and the ranks.
    """
    try:
        own, refusal = _rows_on_cpu(value, "value"), None
    except UsageError as error:  # the others have to hear of it
        own, refusal = None, str(error)
    everyone: list[Any] = [(own, refusal)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        with called_by_all("gather_for_metrics()"), collective("all-gather"):
            dist.all_gather_object(everyone, (own, refusal))
    for rank, (_, text) in enumerate(everyone):
        if text is not None:
            raise UsageError(f"rank {rank}: {text}")
    return _together([(rank, part) for rank, (part, _) in enumerate(everyone)], "value")


def _rows_on_cpu(value: Any, place: str) -> Any:
    if value is None:
        return None
    if isinstance(value, Tensor):
        if value.dim() == 0:
            raise UsageError(
                f"gather_for_metrics takes tensors with rows, but {place} is a scalar; use {place}.unsqueeze(0)"
            )
        rows = value.detach().cpu()
        # A view is sent with all the memory that it is a part of.
        return rows.clone() if rows.layout is torch.strided and _is_part(rows) else rows
    if isinstance(value, dict):
        return {key: _rows_on_cpu(item, f"{place}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return _alike(value, [_rows_on_cpu(item, f"{place}[{at}]") for at, item in enumerate(value)])
    raise UsageError(
        f"gather_for_metrics takes tensors, or tuples, lists and dicts of them, but {place} is a {type(value).__name__}"
    )


def _is_part(rows: Tensor) -> bool:
    return rows.untyped_storage().nbytes() > rows.numel() * rows.element_size()


def _together(parts: Iterable[Part], place: str) -> Any:
    """The ranks' `parts`, as one; all ranks come to the same verdict."""
    given = [(rank, part) for rank, part in parts if part is not None]
    if not given:
        return None
    _expect_alike([(rank, _kind(part)) for rank, part in given], f"{place} is", "give the same structure on every rank")
    first = given[0][1]
    if isinstance(first, Tensor):
        return _concatenated(given, place)
    if isinstance(first, dict):
        keys = [(rank, sorted(map(repr, part))) for rank, part in given]
        _expect_alike(keys, f"{place} has keys", "give the same on every rank, with None for what has no rows")
        return {key: _together([(rank, part[key]) for rank, part in given], f"{place}[{key!r}]") for key in first}
    lengths = [(rank, len(part)) for rank, part in given]
    _expect_alike(lengths, f"{place} has length", "give as many on every rank, with None for what has no rows")
    items = [_together([(rank, part[at]) for rank, part in given], f"{place}[{at}]") for at in range(len(first))]
    return _alike(first, items)


def _concatenated(given: Sequence[tuple[int, Tensor]], place: str) -> Tensor:
    """The rows of all tensors; those without rows have no say in dtype and shape."""
    with_rows = [(rank, tensor) for rank, tensor in given if len(tensor)]
    if not with_rows:
        return max((tensor for _, tensor in given), key=Tensor.dim)
    dtypes = [(rank, tensor.dtype) for rank, tensor in with_rows]
    _expect_alike(dtypes, f"{place} is", "convert it to one dtype on every rank")
    shapes = [(rank, tuple(tensor.shape[1:])) for rank, tensor in with_rows]
    _expect_alike(shapes, f"{place} has rows of shape", "pad them to one shape, or gather what is computed from them")
    return torch.cat([tensor for _, tensor in with_rows])


def _kind(part: Any) -> str:
    """What has to be the same on all ranks; a subclass of dict is a dict."""
    if isinstance(part, Tensor):
        return "a tensor"
    return "a dict" if isinstance(part, dict) else f"a {type(part).__name__}"


def _expect_alike(seen: Sequence[Part], claim: str, remedy: str) -> None:
    (first_rank, first), *others = seen
    for rank, other in others:
        if other != first:
            raise UsageError(
                f"gather_for_metrics: {claim} {_shown(first)} on rank {first_rank} but {_shown(other)} on rank {rank}; "
                f"{remedy}"
            )


def _shown(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, list) else str(value)


def _alike(model: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    """`items` as the kind of sequence that `model` is."""
    if isinstance(model, list):
        return items
    return type(model)(*items) if hasattr(model, "_fields") else tuple(items)
