"""Gathers values from every rank for metrics, after checking that they are compatible."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from functools import reduce
from numbers import Real
from operator import add
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.messages import with_article
from paceline.core.missing_ranks import called_by_all, collective
from paceline.errors import UsageError

Part = tuple[int, Any]
"""A rank, and the part of its value at one place in the gathered structure; the part is never None."""


def gather_for_metrics(value: Any) -> Any:
    """Return every rank's `value`, concatenated along dimension 0 in rank order, on every rank.

    Ranks may hold different numbers of rows; the result has every row exactly once. If called for each batch of a
    :class:`paceline.data.DataLoader` without ``cost``, it returns rows in the order of the global batch, which without
    ``shuffle`` is the dataset's order. If called once for the rows of several batches, it returns all of rank 0's rows
    first, which is not the dataset's order; for that order, use :func:`paceline.train.predict`.

    Args:
        value: a tensor with at least one dimension; a list of picklable objects without tensors, such as strings, where
            each object is a row; or a (nested) tuple, list or dict of such tensors and lists. On a rank without rows,
            ``None`` may replace any of these. A tensor without rows adopts the dtype and shape of the other ranks'
            tensors, and an empty list adopts the kind of their values.

    Returns:
        The same structure, on the CPU, on every rank; tuples and named tuples keep their type. ``None`` if no rank had
        rows.

    Raises:
        UsageError: on every rank, if any rank passed an object outside a list, an object that cannot be pickled or a
            tensor without dimensions, or if ranks differ in structure, dtype or row shape. The message names the place
            and the ranks.
    """
    try:
        part, refusal = _rows_on_cpu(value, "value"), None
    except UsageError as error:  # raised on all ranks below, because the other ranks are about to enter the collective
        part, refusal = None, str(error)
    parts = _from_every_rank("gather_for_metrics", part, refusal)
    return _combine(enumerate(parts), "value")


@overload
def mean_over_ranks(value: Tensor, weight: float | Tensor = 1.0) -> Tensor: ...


@overload
def mean_over_ranks(value: float, weight: float | Tensor = 1.0) -> float: ...


@overload
def mean_over_ranks(value: None, weight: float | Tensor = 1.0) -> Any: ...


def mean_over_ranks(value: Any, weight: float | Tensor = 1.0) -> Any:
    """Return the weighted mean of all ranks' values, bit-identical on every rank: Σ weight · value / Σ weight.

    Use it for numbers that differ between ranks, such as the mean loss of a slice. With the number of samples as
    `weight`, the result is the mean over all samples. The mean is computed in float64. Without a process group, the
    result is `value`.

    Args:
        value: a number, or a tensor of the same shape and dtype on every rank. It is ignored if `weight` is 0, so a
            rank without samples may pass NaN or None.
        weight: the weight of this rank's value, at least 0.

    Returns:
        A float for numbers; for tensors, a tensor on this rank's device, with the same dtype if it is floating-point or
        complex, otherwise with torch's default dtype.

    Raises:
        UsageError: on every rank, if any rank passed another type, if ranks differ in kind, shape or dtype, or if no
            rank has a weight above 0. The message names the ranks.
    """
    local, refusal = None, None
    try:
        number = _weight(weight)
        local = (number, _own_part(value) if number else None)
    except UsageError as error:  # raised on all ranks below
        refusal = str(error)
    gathered = _from_every_rank("mean_over_ranks", local, refusal)
    weighted = [(rank, weight, part) for rank, (weight, part) in enumerate(gathered) if weight]
    if not weighted:
        raise UsageError("mean_over_ranks: the weight is 0 on every rank, so the mean is undefined; skip the call")
    kinds = [(rank, _mean_kind(part)) for rank, _, part in weighted]
    _check_equal(kinds, "value is", "give the same on every rank", "mean_over_ranks")
    first = weighted[0][2]
    total = sum(weight for _, weight, _ in weighted)
    # Every rank adds in rank order, so that the result is bit-identical.
    mean = reduce(add, (weight * _wide(part) for _, weight, part in weighted)) / total
    if not isinstance(first, Tensor):
        return float(mean)
    dtype = first.dtype if first.is_floating_point() or first.is_complex() else torch.get_default_dtype()
    return mean.to(dtype).to(value.device if isinstance(value, Tensor) else "cpu")


def _from_every_rank(call: str, local: Any, refusal: str | None) -> list[Any]:
    """Return each rank's value, in rank order; if any rank has an error, raise the first one on every rank."""
    gathered: list[Any] = [(local, refusal)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        gathered = [None] * dist.get_world_size()
        try:
            packed = _packed(local)
        except Exception as error:  # an object's __getstate__ may raise anything
            packed, refusal = _packed(None), f"{call}: value cannot be pickled ({type(error).__name__}: {error})"
        with called_by_all(f"{call}()"), collective("all-gather"):
            dist.all_gather_object(gathered, (packed, refusal))
        gathered = [(_unpacked(part), text) for part, text in gathered]
    for rank, (_, text) in enumerate(gathered):
        if text is not None:
            raise UsageError(f"rank {rank}: {text}")
    return [part for part, _ in gathered]


def _packed(value: Any) -> bytes:
    """Serialize `value` with ``torch.save``."""
    # A plain pickle cannot hold tensors with uint16, float8 and other new dtypes.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(part: bytes) -> Any:
    # Like all_gather_object(), trust the other ranks of this job.
    return torch.load(io.BytesIO(part), weights_only=False)


def _weight(weight: Any) -> float:
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"mean_over_ranks takes a number as weight, not {weight!r}") from None
    if not (math.isfinite(number) and number >= 0):
        raise UsageError(f"mean_over_ranks takes a finite weight of at least 0, not {number}")
    return number


def _own_part(value: Any) -> Tensor | float:
    if isinstance(value, Tensor):
        return _compact_on_cpu(value)
    if isinstance(value, Real):
        return float(value)
    raise UsageError(f"mean_over_ranks takes a number or a tensor, but value is {with_article(type(value).__name__)}")


def _mean_kind(part: Tensor | float) -> str:
    return f"a tensor of shape {tuple(part.shape)}, {part.dtype}" if isinstance(part, Tensor) else "a number"


def _wide(part: Tensor | float) -> Any:
    if not isinstance(part, Tensor):
        return part
    return part.to(torch.complex128 if part.is_complex() else torch.float64)


def _rows_on_cpu(value: Any, place: str) -> Any:
    if value is None:
        return None
    if isinstance(value, Tensor):
        if value.dim() == 0:
            raise UsageError(
                f"gather_for_metrics takes tensors with rows, but {place} is a scalar; use {place}.unsqueeze(0)"
            )
        return _compact_on_cpu(value)
    if isinstance(value, dict):
        return {key: _rows_on_cpu(item, f"{place}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list) and not _holds_tensor(value):
        return value
    if isinstance(value, list | tuple):
        return _same_kind(value, [_rows_on_cpu(item, f"{place}[{index}]") for index, item in enumerate(value)])
    raise UsageError(
        f"gather_for_metrics takes tensors, lists of objects, or tuples, lists and dicts of them, but {place} is a "
        f"{type(value).__name__}; give a list with one object for each row"
    )


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    return any(map(_holds_tensor, value)) if isinstance(value, list | tuple) else isinstance(value, Tensor)


def _compact_on_cpu(value: Tensor) -> Tensor:
    on_cpu = value.detach().cpu()
    if on_cpu.layout is not torch.strided:
        return on_cpu
    # torch.save would write the entire storage of a view.
    is_part = on_cpu.untyped_storage().nbytes() > on_cpu.numel() * on_cpu.element_size()
    return on_cpu.clone() if is_part else on_cpu


def _combine(parts: Iterable[Part], place: str) -> Any:
    """Combine the ranks' `parts` at `place`; either all ranks return the same value, or all raise the same error."""
    parts_ = [(rank, part) for rank, part in parts if part is not None]
    if not parts_:
        return None
    _check_equal([(rank, _kind(part)) for rank, part in parts_], f"{place} is", "give the same structure on every rank")
    first = parts_[0][1]
    if isinstance(first, Tensor):
        return _concatenated(parts_, place)
    if isinstance(first, list) and not any(_holds_tensor(part) for _, part in parts_):
        rows = [row for _, part in parts_ for row in part]
        if any(row is not None for row in rows):  # otherwise a structure whose parts have no rows
            return rows
    # This item is in a list that holds rows on this rank but parts of a structure on another.
    if not isinstance(first, dict | list | tuple):
        raise UsageError(f"gather_for_metrics: {place} is {_kind(first)} on rank {parts_[0][0]}, not a list of rows")
    if isinstance(first, dict):
        keys = [(rank, sorted(map(repr, part))) for rank, part in parts_]
        _check_equal(keys, f"{place} has keys", "give the same keys on every rank, with None for items without rows")
        return {key: _combine([(rank, part[key]) for rank, part in parts_], f"{place}[{key!r}]") for key in first}
    lengths = [(rank, len(part)) for rank, part in parts_]
    _check_equal(lengths, f"{place} has length", "give as many items on every rank, with None for items without rows")
    items = [
        _combine([(rank, part[index]) for rank, part in parts_], f"{place}[{index}]") for index in range(len(first))
    ]
    return _same_kind(first, items)


def _concatenated(parts: Sequence[tuple[int, Tensor]], place: str) -> Tensor:
    """Concatenate the rows of all tensors; tensors without rows do not affect dtype and shape."""
    with_rows = [(rank, tensor) for rank, tensor in parts if len(tensor)]
    if not with_rows:
        return max((tensor for _, tensor in parts), key=Tensor.dim)
    dtypes = [(rank, tensor.dtype) for rank, tensor in with_rows]
    _check_equal(dtypes, f"{place} is", "convert it to one dtype on every rank")
    shapes = [(rank, tuple(tensor.shape[1:])) for rank, tensor in with_rows]
    _check_equal(shapes, f"{place} has rows of shape", "pad them to one shape, or gather what you compute from them")
    return torch.cat([tensor for _, tensor in with_rows])


def _kind(part: Any) -> str:
    """Return the kind that must be the same on all ranks; a subclass of dict counts as a dict."""
    if isinstance(part, Tensor):
        return "a tensor"
    return "a dict" if isinstance(part, dict) else with_article(type(part).__name__)


def _check_equal(kinds: Sequence[Part], claim: str, remedy: str, call: str = "gather_for_metrics") -> None:
    (first_rank, first), *others = kinds
    for rank, other in others:
        if other != first:
            raise UsageError(
                f"{call}: {claim} {_shown(first)} on rank {first_rank} but {_shown(other)} on rank {rank}; {remedy}"
            )


def _shown(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, list) else str(value)


def _same_kind(model: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    """Return `items` as a sequence of the same type as `model`."""
    if isinstance(model, list):
        return items
    return type(model)(*items) if hasattr(model, "_fields") else tuple(items)
