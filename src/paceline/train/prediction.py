"""Predictions for all samples of a loader, in the data set's order, for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.output.wording import with_article
from paceline.core.state.virtual_ranks import Slices
from paceline.core.torch_internals.tensors import tree_leaves, tree_map
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
                count = _length(next(iter(tree_leaves(output, is_leaf=_is_list)), None))
                in_epoch = range(first, first + max(0, count))
                samples = samples_of(number, share, in_epoch)
                _check_rows(output, len(samples))
                places += zip(samples, in_epoch, strict=True)
                rows.append(output)
    own = (torch.tensor(places, dtype=torch.int64).view(-1, 2), _concatenated(rows) if rows else None)
    keys, everything = gather_for_metrics(own)
    found = keys.tolist()
    order = sorted(range(len(found)), key=found.__getitem__)
    return tree_map(lambda part: _chosen(part, order), everything, is_leaf=_is_list)


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


def _is_list(part: Any) -> bool:
    """Return whether a part of an output is a list, whose items are rows and not parts."""
    return isinstance(part, list)


def _length(part: Any) -> int:
    """Return the number of rows of a tensor or list; -1 for anything else, which has no rows."""
    holds_tensors = isinstance(part, list) and any(isinstance(row, Tensor) for row in part)
    has_rows = isinstance(part, list) or (isinstance(part, Tensor) and part.dim() > 0)
    return len(part) if has_rows and not holds_tensors else -1


def _check_rows(output: Any, samples: int) -> None:
    """Refuse an output in which something has not a row for each of so many samples."""
    for part in tree_leaves(output, is_leaf=_is_list):
        if (count := _length(part)) != samples:
            name = with_article(type(part).__name__)
            found = f"{count} rows" if count >= 0 else "a list of tensors" if _is_list(part) else f"{name} without rows"
            raise UsageError(
                f"predict_step returned {found} for a batch of {samples} samples; return a tensor or a list of objects "
                "with a row for each sample, or a tuple or dict of such tensors and lists"
            )


def _concatenated(outputs: Sequence[Any]) -> Any:
    """Return the rows of all `outputs`, which have one structure, in one, on the CPU."""

    def join(*parts: Any) -> Any:
        if _is_list(parts[0]):
            return [row for part in parts for row in part]
        if len(shapes := sorted({tuple(part.shape[1:]) for part in parts})) > 1:
            raise UsageError(
                f"predict_step returned rows of the shapes {shapes[0]} and {shapes[-1]}; pad them to one shape, or "
                "return a list of objects that are not tensors"
            )
        return torch.cat([part.cpu() for part in parts])

    return tree_map(join, *outputs, is_leaf=_is_list)


def _chosen(part: Any, order: Sequence[int]) -> Any:
    return [part[index] for index in order] if _is_list(part) else part[list(order)]
