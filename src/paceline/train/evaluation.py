"""Evaluation and prediction that count every sample exactly once on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.core.messages import with_article
from paceline.core.rng import rng_state, set_rng_state
from paceline.core.torch_internals import tree_leaves, tree_map
from paceline.core.unwrapping import unwrap
from paceline.core.virtual_ranks import Slices
from paceline.data import DataLoader, GlobalBatchSampler
from paceline.ddp import DistributedDataParallel, gather_for_metrics
from paceline.errors import UsageError
from paceline.train.config import TrainConfig
from paceline.train.metrics import all_sum, check_same_data, ranks_of
from paceline.train.validation import described, is_number, validate_loader, validate_wrapper

Sums = Callable[[nn.Module, Any], tuple[dict[str, Tensor], int]]
PredictStep = Callable[[nn.Module, Any], Any]
"""``predict_step(module, batch)`` returns a row for each sample of the batch; see :func:`predict`."""


@dataclass(frozen=True)
class Evaluation:
    """The data and metrics of an evaluation.

    ``sums(module, batch)`` returns the *sum* of each metric over the samples of a batch, as scalar tensors by name, and
    the number of samples.
    """

    loader: DataLoader
    sums: Sums
    names: tuple[str, ...]
    """Names of the metrics; needed by ranks whose slices are all empty."""
    derive: Callable[[dict[str, float]], dict[str, float]] | None = None
    """Computes the reported metrics from the means, for metrics such as F1; None to report the means themselves."""


@torch.no_grad()
def evaluate(model: DistributedDataParallel, evaluation: Evaluation) -> dict[str, float]:
    """Return the mean of each metric over all samples of the evaluation's loader. Collective; equal on every rank.

    If ``evaluation.derive`` is set, its result for the means is returned instead. The module runs without its wrapper,
    in eval mode, with rank 0's buffers. Random generators are restored afterwards, so an evaluation does not change the
    training. For a model with ``virtual_ranks``, the means are bit-identical on any number of ranks. With
    :class:`~paceline.optim.LocalSGD`, each island evaluates its part of the samples with its own weights.

    Args:
        model: the wrapped model.
        evaluation: the data and metrics.

    Raises:
        DesyncError: if ranks differ in the evaluation's data.
        UsageError: if the model is not in Paceline's wrapper, or if ``sums`` does not return a sum for each name in
            ``evaluation.names`` and a count.
    """
    validate_wrapper(model, "evaluate()")
    validate_evaluation(evaluation)
    loader, slices = evaluation.loader, model.virtual_ranks
    begin_anew(loader)
    # In float64, because sums over a dataset exceed the precision of float32. One row per slice of virtual ranks,
    # because sums per rank would depend on the number of ranks.
    totals = torch.zeros(slices or 1, len(evaluation.names) + 1, dtype=torch.float64, device="cpu")
    with in_eval_mode(model) as module:
        check_same_data(loader, model, epoch=0)
        for _, share, part in parts_of(loader, slices):
            row = 0 if slices is None else share
            sums, count = _summed(evaluation.sums(module, part), evaluation.names)
            totals[row] += torch.tensor(
                [*(float(sums[name]) for name in evaluation.names), float(count)], dtype=torch.float64, device="cpu"
            )
    totals = all_sum(totals, model, ranks_of(loader, model)).sum(0)
    # strict=False, because the last total is the number of samples.
    means = {name: float(total / totals[-1]) for name, total in zip(evaluation.names, totals, strict=False)}
    return means if evaluation.derive is None else evaluation.derive(means)


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


def begin_anew(loader: DataLoader) -> None:
    """Make the next pass read the first epoch from the beginning."""
    loader.progress.set_epoch(0)
    loader.progress.restart()


def parts_of(loader: DataLoader, virtual_ranks: int | None) -> Iterator[tuple[int, int, Any]]:
    """Iterate over `loader`, and yield each nonempty slice of this rank after the numbers of its batch and its slice.

    Without virtual ranks, each rank has one slice of a batch, numbered by the rank.
    """
    if virtual_ranks is None:
        for number, batch in enumerate(loader):
            if not loader.slice_is_empty:
                yield number, loader.progress.rank, batch
        return
    shares = loader.progress.slicing.shares(virtual_ranks)[1]
    for number, slices in enumerate(loader.in_slices(virtual_ranks)):
        for at, share in enumerate(shares):
            if slices[at] is not None:  # seeded, so that a slice gets the same random numbers on any number of ranks
                yield number, share, slices.seeded(at)


@contextmanager
def in_eval_mode(model: DistributedDataParallel) -> Iterator[nn.Module]:
    """Yield the module without its wrapper, in eval mode, with rank 0's buffers. Collective.

    The modes of all submodules and the random generators are restored afterwards.
    """
    model.sync_buffers()
    generators = rng_state()
    module = unwrap(model)
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield module
    finally:
        set_rng_state(generators)
        for part, training in modes.items():  # not train(), which would change parts that were in eval mode
            part.training = training


def evaluated(metrics: dict[str, float]) -> dict[str, float]:
    """Return `metrics` with the prefix ``eval/``."""
    return {f"eval/{name}": value for name, value in metrics.items()}


def validate_evaluation(evaluation: Any, training: DataLoader | None = None) -> None:
    """Check that `evaluation` is an :class:`Evaluation` with a Paceline loader other than the `training` loader."""
    if not isinstance(evaluation, Evaluation):
        type_name = type(evaluation).__qualname__
        raise UsageError(f"evaluation is {with_article(type_name)}; give an Evaluation(loader, sums, names)")
    validate_loader(evaluation.loader, "Evaluation")
    if training is not None and evaluation.loader.progress is training.progress:
        raise UsageError(
            "training and evaluation share a loader or sampler, which every evaluation restarts; give the Evaluation "
            "another DataLoader"
        )


def wanted_metrics(
    config: TrainConfig, keep_best: tuple[str, str] | None, scheduler: Any, callbacks: Iterable[Any]
) -> dict[str, str]:
    """Return the evaluation metrics that a run depends on; each key describes the setting that names the metric."""
    wanted = {} if keep_best is None else {"keep_best": keep_best[0]}
    if isinstance(scheduler, ReduceLROnPlateau):
        wanted["monitor, which the ReduceLROnPlateau follows,"] = config.monitor
    for callback in callbacks:
        if isinstance(metric := getattr(callback, "monitor", None), str):
            wanted[f"the monitor of {type(callback).__qualname__}"] = metric.removeprefix("eval/")
    return wanted


def validate_evaluated(config: TrainConfig, evaluation: Any, wanted: Mapping[str, str]) -> None:
    """Check that there is an evaluation if the run needs one, and that it has the metrics in `wanted`."""
    if evaluation is None:
        for owner, metric in wanted.items():
            raise UsageError(f"{owner} is {metric!r}, but the Trainer has no evaluation; give Trainer(…, evaluation=…)")
        if config.evaluate_every is not None:
            raise UsageError("evaluate_every needs an evaluation; give Trainer(…, evaluation=…)")
    elif evaluation.derive is None:
        validate_metrics(wanted, evaluation.names)


def validate_metrics(wanted: Mapping[str, str], metrics: Iterable[str]) -> None:
    """Check that an evaluation's `metrics` include every metric in `wanted`."""
    available = sorted(metrics)
    for owner, metric in wanted.items():
        if metric not in available:
            raise UsageError(
                f"{owner} is {metric!r}, but the evaluation has {', '.join(map(repr, available))}; name one of them"
            )


def _summed(returned: Any, names: tuple[str, ...]) -> tuple[dict[str, Any], Any]:
    """Check and return the sums and the number of samples that an evaluation's function `returned`."""
    if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[0], dict):
        raise UsageError(
            f"the evaluation's sums returned {described(returned)}; return sums over the batch by name, and the number "
            'of samples: {"loss": loss.sum()}, len(y)'
        )
    sums, count = returned
    if set(sums) != set(names):
        raise UsageError(f"the evaluation's sums returned {sorted(sums)}, but its names are {sorted(names)}")
    for name, value in [*sums.items(), ("the number of samples", count)]:
        if not is_number(value) or (isinstance(value, Tensor) and value.numel() != 1):
            raise UsageError(f"the evaluation's sums returned {described(value)} as {name!r}; sum it over the batch")
    return sums, count


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
