"""Predictions for all samples of a loader, in the dataset's order, on any number of ranks."""

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
    """Return the module's output for a batch, or for the first item of a tuple or list."""
    return module(batch[0] if isinstance(batch, list | tuple) else batch)


@torch.no_grad()
def predict(model: DistributedDataParallel, loader: DataLoader, predict_step: PredictStep = apply_module) -> Any:
    """Return one row per sample, on the CPU of every rank, in the dataset's order. Collective.

    The rows of a shuffled loader are put into this order; rows of a stream keep the stream's order. Every rank holds
    all rows in memory. For a model with ``virtual_ranks``, rows are bit-identical on any number of ranks.

    Args:
        model: the wrapped model; it runs without its wrapper, in eval mode.
        loader: loader of the samples; its first epoch is read.
        predict_step: ``predict_step(module, batch)`` returns a tensor with one row per sample, or a tuple, list or dict
            of these. By default it calls the module with the batch, or with the first item of a tuple or list.

    Raises:
        UsageError: if the model is not in Paceline's wrapper, the loader is not Paceline's, or the number of rows is
            wrong.
        DesyncError: if ranks differ in the data.
    """
    validate_wrapper(model, "predict()")
    validate_loader(loader, "predict()")
    slices = model.virtual_ranks
    begin_anew(loader)
    # Each row's sample and its place in the epoch. Both are needed, because an epoch may repeat a sample.
    places: list[tuple[int, int]] = []
    rows: list[Any] = []
    with in_eval_mode(model) as module:
        check_same_data(loader, model, epoch=0)
        samples_of = _samples_by_slice(loader, slices)
        for number, share, part in parts_of(loader, slices):
            output = predict_step(module, part)
            first = (number * (slices or loader.progress.world_size) + share) * loader.progress.batch_size
            count = _length(next(iter(tree_leaves(output)), None))
            in_epoch = range(first, first + max(0, count))
            samples = samples_of(number, share, in_epoch)
            _check_rows(output, len(samples))
            places += zip(samples, in_epoch, strict=True)
            rows.append(output)
    keys, all_rows = gather_for_metrics(
        (torch.tensor(places, dtype=torch.int64, device="cpu").view(-1, 2), _concatenated(rows) if rows else None)
    )
    all_places = keys.tolist()
    order = sorted(range(len(all_places)), key=all_places.__getitem__)
    return tree_map(lambda part: part[order], all_rows)


def _samples_by_slice(loader: DataLoader, slices: int | None) -> Callable[[int, int, Sequence[int]], Sequence[int]]:
    """Return a function that maps a batch number, a slice number and the slice's places in the epoch to sample numbers.

    Samples of a stream are numbered by their places in the epoch.
    """
    progress = loader.progress
    if not isinstance(progress, GlobalBatchSampler):
        return lambda _batch, _slice, places: places
    progress.begin(slices)
    samples = {}
    for ticket in progress.tickets():
        for part in ticket if isinstance(ticket, Slices) else [ticket]:
            samples[part.number, part.share] = part
    return lambda batch, share, _places: samples[batch, share]


def _length(part: Any) -> int:
    """Return the number of rows of a tensor; -1 for anything else."""
    return len(part) if isinstance(part, Tensor) and part.dim() > 0 else -1


def _check_rows(output: Any, samples: int) -> None:
    """Raise a UsageError unless each part of an output has one row per sample."""
    for part in tree_leaves(output) or [output]:  # an empty dict or list has no leaves
        if (count := _length(part)) != samples:
            rows = f"{count} rows" if count >= 0 else f"{with_article(type(part).__name__)} without rows"
            raise UsageError(
                f"predict_step returned {rows} for a batch of {samples} samples; return a tensor with one row "
                "per sample, or a tuple, list or dict of these"
            )


def _concatenated(outputs: Sequence[Any]) -> Any:
    """Return the rows of all `outputs`, concatenated, on the CPU."""

    def join(*parts: Any) -> Any:
        if len(shapes := sorted({tuple(part.shape[1:]) for part in parts})) > 1:
            raise UsageError(
                f"predict_step returned rows of shapes {shapes[0]} and {shapes[-1]}; pad them to one shape"
            )
        return torch.cat([part.cpu() for part in parts])

    return tree_map(join, *outputs)
