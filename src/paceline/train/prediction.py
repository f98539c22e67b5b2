"""Predictions for all samples of a loader, in the data set's order, for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.output.wording import with_article
from paceline.core.state.virtual_ranks import Slices
from paceline.data import DataLoader, GlobalBatchSampler
from paceline.ddp import DistributedDataParallel, gather_for_metrics
from paceline.errors import UsageError
from paceline.train.evaluation import begin_anew, in_eval_mode, parts_of
from paceline.train.metrics.reductions import check_same_data
from paceline.train.validation import validate_loader, validate_wrapper

PredictStep = Callable[[nn.Module, Any], Any]
"""``predict_step(module, batch)`` returns a row for each sample of the batch; see :func:`predict`."""


def apply_module(module: nn.Module, batch: Any) -> Any:
    """Return the module's output for a batch, or for its first item if it is a tuple or list of inputs and targets."""
    return module(batch[0] if isinstance(batch, list | tuple) else batch)


@torch.no_grad()
def predict(model: DistributedDataParallel, loader: DataLoader, predict_step: PredictStep = apply_module) -> Any:
    """Return the rows of all samples on every rank, on the CPU, in the data set's order, each once. Collective.

    A shuffled loader's rows are put in order; a stream's are in the order in which it was read. All rows are in memory
    on every rank. For a model with ``virtual_ranks`` batches are cut into as many slices, so that rows have the same
    bits on any number of ranks.

    Args:
        model: the wrapped model; it runs without its wrapper, in eval mode.
        loader: what to predict for; its first epoch.
        predict_step: returns, for one batch, a tensor or a list with a row for each sample, or a tuple, list or dict of
            such tensors and lists.

    Raises:
        UsageError: for a model that is not wrapped, another loader, or rows that are not one for each sample.
        DesyncError: if ranks differ in the data.
    """
    validate_wrapper(model, "predict()")
    validate_loader(loader, "predict()")
    begin_anew(loader, model)
    # Of each row: its sample, and its place in the epoch, because an order may name a sample several times.
    places: list[tuple[int, int]] = []
    rows: list[Any] = []
    with in_eval_mode(model) as module:
        check_same_data(loader, model, epoch=0)
        samples_of = _samples_by_slice(loader)
        for number, batch in enumerate(loader):
            for share, part in parts_of(batch, loader):
                output = predict_step(module, part)
                first = (number * loader.progress.slicing.shares()[0] + share) * loader.progress.batch_size
                in_epoch = range(first, first + max(0, _length(output)))
                samples = samples_of(number, share, in_epoch)
                _check_rows(output, len(samples))
                places += zip(samples, in_epoch, strict=True)
                rows.append(output)
    own = (torch.tensor(places, dtype=torch.int64).view(-1, 2), concatenated(rows) if rows else None)
    order, everything = gather_for_metrics(own)
    keys = order.tolist()
    return taken(everything, sorted(range(len(keys)), key=keys.__getitem__))


def _samples_by_slice(loader: DataLoader) -> Callable[[int, int, Sequence[int]], Sequence[int]]:
    """Return a function that gives, for the numbers of a batch and a slice, and its places in the epoch, its samples.

    A stream's samples have no numbers but their places.
    """
    progress = loader.progress
    if not isinstance(progress, GlobalBatchSampler):
        return lambda _batch, _slice, places: places
    progress.begin()  # the slices of a pass are those of the place where it began
    slices = {}
    for ticket in progress.tickets():
        for each in ticket if isinstance(ticket, Slices) else [ticket]:
            slices[each.number, each.share] = each
    return lambda batch, share, _places: slices[batch, share]


def _length(part: Any) -> int:
    """Return the number of rows of the first tensor or list in a part; -1 if there is none."""
    if isinstance(part, dict | tuple):
        return _length(next(iter(_items(part)), None))
    return len(part) if isinstance(part, list) or (isinstance(part, Tensor) and part.dim()) else -1


def _check_rows(part: Any, samples: int) -> None:
    """Refuse a part in which something has not a row for each of so many samples.

    Raises:
        UsageError: names what it is.
    """
    if isinstance(part, dict | tuple):
        for item in _items(part):
            _check_rows(item, samples)
        return
    found = f"{with_article(type(part).__name__)} without rows" if (count := _length(part)) < 0 else f"{count} rows"
    if isinstance(part, list) and any(isinstance(row, Tensor) for row in part):
        found, count = "a list of tensors", -1
    if count != samples:
        raise UsageError(
            f"predict_step returned {found} for a batch of {samples} samples; return a tensor or a list of objects "
            "with a row for each sample, or a tuple or dict of such tensors and lists"
        )


def concatenated(parts: Sequence[Any]) -> Any:
    """Return the rows of all `parts`, which have one structure, in one, on the CPU.

    Raises:
        UsageError: if tensors have rows of different shapes.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        if len(shapes := sorted({tuple(part.shape[1:]) for part in parts})) > 1:
            raise UsageError(
                f"predict_step returned rows of the shapes {shapes[0]} and {shapes[-1]}; pad them to one shape, or "
                "return a list of objects that are no tensors"
            )
        return torch.cat([part.cpu() for part in parts])
    if isinstance(first, list):
        return [row for part in parts for row in part]
    return _like(first, [concatenated(items) for items in zip(*map(_items, parts), strict=True)])


def taken(rows: Any, order: Sequence[int]) -> Any:
    """Return the `rows`, of whatever structure, in `order`."""
    if isinstance(rows, Tensor):
        return rows[list(order)]
    if isinstance(rows, list):
        return [rows[index] for index in order]
    return _like(rows, [taken(item, order) for item in _items(rows)])


def _items(structure: Any) -> list[Any]:
    return list(structure.values() if isinstance(structure, dict) else structure)


def _like(structure: Any, items: list[Any]) -> Any:
    """Return `items` in a dict with the keys of `structure`, or in a tuple of its kind."""
    if isinstance(structure, dict):
        return dict(zip(structure, items, strict=True))
    # A named tuple takes its items one by one.
    return type(structure)(*items) if hasattr(structure, "_fields") else tuple(items)
