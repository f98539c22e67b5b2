"""Evaluation in which every sample counts exactly once, for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.core.output.wording import with_article
from paceline.core.state.rng import rng_state, seed_all, set_rng_state
from paceline.core.state.unwrapping import unwrap
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.train.config import TrainConfig
from paceline.train.metrics.reductions import all_sum, check_same_data
from paceline.train.validation import described, is_number, validate_loader, validate_wrapper

Sums = Callable[[nn.Module, Any], tuple[dict[str, Tensor], int]]


@dataclass(frozen=True)
class Evaluation:
    """The data and metrics of an evaluation.

    ``sums(module, batch)`` gives, for one batch, the *sum* of each metric over its samples, as tensors without
    dimensions, and the number of samples.
    """

    loader: DataLoader
    sums: Sums
    names: tuple[str, ...]
    """The metrics' names. Every rank needs them, even if all its slices are empty."""
    derive: Callable[[dict[str, float]], dict[str, float]] | None = None
    """Computes metrics that are not means over samples, such as F1, from the means; None to report the means."""


@torch.no_grad()
def evaluate(
    model: DistributedDataParallel, evaluation: Evaluation, after_batch: Callable[[], None] | None = None
) -> dict[str, float]:
    """Return the mean of each metric over all samples of the evaluation's loader; the same on every rank. Collective.

    With ``evaluation.derive``, return its result for the means. The module runs without its wrapper, in eval mode,
    with rank 0's running statistics. It may draw random numbers: the generators are restored afterwards, so training
    continues with the same numbers with and without an evaluation. ``after_batch`` is called after each batch, and may
    end the evaluation by an exception. For a model with ``virtual_ranks`` batches are cut into as many slices, so that
    means have the same bits on any number of ranks.

    Raises:
        DesyncError: if ranks differ in the evaluation's data.
        UsageError: for a model that is not wrapped, an evaluation of another type, or if ``sums`` gives something else
            than sums of the evaluation's names, and a count.
    """
    validate_wrapper(model, "evaluate()")
    validate_evaluation(evaluation)
    loader = evaluation.loader
    begin_anew(loader, model)
    # In float64, because sums over a data set outgrow the 24 bits of float32. A row for each slice of virtual ranks,
    # because sums of ranks would depend on their number.
    totals = torch.zeros(loader.virtual_ranks or 1, len(evaluation.names) + 1, dtype=torch.float64)
    with in_eval_mode(model) as module:
        check_same_data(loader, model, epoch=0)
        for batch in loader:
            for share, part in parts_of(batch, loader):
                row = 0 if loader.virtual_ranks is None else share
                sums, count = _summed(evaluation.sums(module, part), evaluation.names)
                totals[row] += torch.tensor(
                    [*(float(sums[name]) for name in evaluation.names), float(count)], dtype=torch.float64
                )
            if after_batch is not None:
                after_batch()
    totals = all_sum(totals, model).sum(0)
    # Not strict, because the last total is the number of samples.
    means = {name: float(total / totals[-1]) for name, total in zip(evaluation.names, totals, strict=False)}
    return means if evaluation.derive is None else evaluation.derive(means)


def begin_anew(loader: DataLoader, model: DistributedDataParallel) -> None:
    """Have the next pass give the first epoch's batches, whatever came before, cut for the model's virtual ranks."""
    if (slices := model.virtual_ranks) is not None:
        loader.use_virtual_ranks(slices)
    loader.progress.set_epoch(0)
    loader.progress.restart()


def parts_of(batch: Any, loader: DataLoader) -> Iterator[tuple[int, Any]]:
    """Yield the slices of a global batch that this rank computes and that have samples, each after its number.

    With virtual ranks each has random streams of its own; without them the one slice has the rank's number.
    """
    shares = loader.progress.slicing.shares()[1]
    if loader.virtual_ranks is None:
        if batch is not None:
            yield shares[0], batch
        return
    for share, part, seed in zip(shares, batch, batch.seeds, strict=True):
        if part is not None:
            # So that a model that draws random numbers draws a slice's on any number of ranks.
            seed_all(seed)
            yield share, part


@contextmanager
def in_eval_mode(model: DistributedDataParallel) -> Iterator[nn.Module]:
    """Give the module without its wrapper in eval mode, with rank 0's buffers, for a block that all ranks enter.

    Afterwards modes and random generators are as before.
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
        for part, training in modes.items():  # one by one, because train() would also thaw parts that were in eval mode
            part.training = training


def evaluated(metrics: dict[str, float]) -> dict[str, float]:
    """Return `metrics` with the prefix ``eval/``, so that ``eval/loss`` differs from the training's loss in logs."""
    return {f"eval/{name}": value for name, value in metrics.items()}


def validate_evaluation(evaluation: Any, training: DataLoader | None = None) -> None:
    """Check that `evaluation` is an :class:`Evaluation` with a Paceline loader other than the `training` loader."""
    if not isinstance(evaluation, Evaluation):
        type_name = type(evaluation).__qualname__
        raise UsageError(
            f"evaluation must be an Evaluation(loader, sums, names), not {with_article(type_name)}; make one of it"
        )
    validate_loader(evaluation.loader, "Evaluation")
    if training is not None and evaluation.loader.progress is training.progress:
        raise UsageError(
            "training and evaluation share one loader or sampler, and an evaluation starts its loader anew, so "
            "training would never end; give Evaluation a DataLoader of its own"
        )


def wanted_metrics(
    config: TrainConfig, keep_best: tuple[str, str] | None, scheduler: Any, callbacks: Iterable[Any]
) -> dict[str, str]:
    """Return the metrics of the evaluation that a run depends on, by a description of who names them."""
    wanted = {} if keep_best is None else {"keep_best": keep_best[0]}
    if isinstance(scheduler, ReduceLROnPlateau):
        wanted["monitor, which the ReduceLROnPlateau follows,"] = config.monitor
    for callback in callbacks:
        if isinstance(metric := getattr(callback, "monitor", None), str):
            wanted[f"the monitor of {type(callback).__qualname__}"] = metric.removeprefix("eval/")
    return wanted


def validate_evaluated(config: TrainConfig, evaluation: Any, wanted: Mapping[str, str]) -> None:
    """Check that there is an evaluation if one is asked for, and that it has the metrics that are `wanted`."""
    if evaluation is None:
        for who, metric in wanted.items():
            raise UsageError(f"{who} is {metric!r}, but there is no evaluation; give Trainer(…, evaluation=…)")
        if config.evaluate_every is not None:
            raise UsageError("evaluate_every is given, but there is no evaluation; give Trainer(…, evaluation=…)")
    elif evaluation.derive is None:
        validate_metrics(wanted, evaluation.names)


def validate_metrics(wanted: Mapping[str, str], metrics: Iterable[str]) -> None:
    """Check that an evaluation's `metrics` have those that are `wanted`."""
    known = sorted(metrics)
    for who, metric in wanted.items():
        if metric not in known:
            raise UsageError(
                f"{who} is {metric!r}, but the evaluation has {', '.join(map(repr, known))}; name one of them"
            )


def _summed(returned: Any, names: tuple[str, ...]) -> tuple[dict[str, Any], Any]:
    """Return the sums by name, and the number of samples, that an evaluation's function has `returned`, checked."""
    if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[0], dict):
        raise UsageError(
            f"the evaluation's sums returned {described(returned)}; return the sum of each metric over the batch by "
            'name, and the number of samples: {"loss": loss.sum()}, len(y)'
        )
    sums, count = returned
    if set(sums) != set(names):
        raise UsageError(f"the evaluation gave {sorted(sums)}, but its names are {sorted(names)}")
    for name, value in [*sums.items(), ("the number of samples", count)]:
        if not is_number(value) or (isinstance(value, Tensor) and value.numel() != 1):
            raise UsageError(f"the evaluation gave {described(value)} as {name!r}; sum it over the batch's samples")
    return sums, count
