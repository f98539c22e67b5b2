"""Batches without samples, for ranks whose slice of a global batch is empty."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.nn.utils.rnn import PackedSequence

from paceline.core.output.wording import with_article


class WithEmpty(NamedTuple):
    """A fetched batch, together with an empty batch of the same structure."""

    batch: Any
    empty: Any
    """None if the structure cannot be emptied."""
    reason: str = ""
    """Why it cannot be emptied."""


def with_empty(batch: Any, collate: Callable[[list[Any]], Any], fetch: Callable[[], Any]) -> WithEmpty:
    """Return `batch` with an empty batch, made by comparing batches of two and three copies of a fetched sample."""
    cuts: list[bool] = []
    try:
        sample = fetch()
        # Copies, because `collate` may change its samples.
        few, more = (collate([copy.deepcopy(sample) for _ in range(count)]) for count in (2, 3))
        empty = _emptied(few, more, cuts)
    except Exception as error:  # from the dataset, from collate_fn, or from a type that cannot be cut
        return WithEmpty(batch, None, f"{type(error).__name__}: {error}")
    return WithEmpty(batch, empty) if any(cuts) else WithEmpty(batch, None, "no tensor has one row per sample")


def _emptied(few: Any, more: Any, cuts: list[bool]) -> Any:
    """Cut the tensors in `few` where those in `more` are larger; for each, append to `cuts` whether it was cut."""
    if (shape := getattr(few, "shape", None)) is not None:
        grows = [size != larger for size, larger in zip(shape, more.shape, strict=True)]
        cuts.append(any(grows))
        return few[tuple(slice(0 if is_cut else None) for is_cut in grows)]
    if isinstance(few, Mapping):
        empty: Any = copy.copy(few)
        empty.update({key: _emptied(value, more[key], cuts) for key, value in few.items()})
        return empty
    if isinstance(few, list | tuple) and not isinstance(few, PackedSequence):
        if len(few) == len(more):
            parts: Any = [_emptied(part, other, cuts) for part, other in zip(few, more, strict=True)]
            return type(few)(*parts) if hasattr(few, "_fields") else type(few)(parts)
        if all(isinstance(part, int | float | str | bytes) for part in few):
            return type(few)()
    elif isinstance(few, int | float | complex | str | bytes | None):
        return few
    raise TypeError(f"it contains {with_article(type(few).__name__)}, which cannot be emptied")
