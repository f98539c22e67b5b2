"""Batches without samples, for ranks whose slice of a global batch is empty."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from torch.nn.utils.rnn import PackedSequence

SKIP = "call model.sync_gradients() instead of forward and backward if loader.slice_is_empty, or give drop_last=True"
"""Remedy for code that does not accept 0 rows."""


def emptied(few: Any, more: Any, cuts: list[bool], kept: list[Any]) -> Any:
    """Return `few` with 0 rows: each tensor is cut in the dimensions that are larger in `more`, which has more rows.

    Numbers that differ become 0, because they are sums or counts. Appends to `cuts`, for each tensor, whether it was
    cut, and to `kept` the objects that cannot be cut.
    """

    def part(one: Any, other: Any) -> Any:
        return emptied(one, other, cuts, kept)

    if (shape := getattr(few, "shape", None)) == () or isinstance(few, int | float | complex):
        return few if few == more else few * 0
    if shape is not None:
        grows = [size != larger for size, larger in zip(shape, more.shape, strict=True)]
        cuts.append(any(grows))
        return few[tuple(slice(0 if is_cut else None) for is_cut in grows)]
    if isinstance(few, Mapping):
        empty: Any = copy.copy(few)
        for key, value in few.items():
            empty[key] = part(value, more[key])
        return empty
    if dataclasses.is_dataclass(few) and not isinstance(few, type):
        names = [field.name for field in dataclasses.fields(few) if field.init]
        return dataclasses.replace(few, **{name: part(getattr(few, name), getattr(more, name)) for name in names})
    if isinstance(few, list | tuple) and not isinstance(few, PackedSequence):
        if len(few) == len(more):
            parts: Any = map(part, few, more)
            return type(few)(*parts) if hasattr(few, "_fields") else type(few)(parts)
        if all(isinstance(value, int | float | str | bytes) for value in few):
            return type(few)()
    if not isinstance(few, str | bytes | None):
        kept.append(few)
    return few
