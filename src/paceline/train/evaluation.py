"""Evaluation in which every sample counts exactly once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.modules import unwrap
from paceline.train.agreement import all_sum, expect_same_data

Sums = Callable[[nn.Module, Any], tuple[dict[str, Tensor], int]]


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate on, and how.

    ``sums(module, batch)`` gives, for one batch, the *sum* of each metric over its samples, as tensors without
    dimensions, and the number of samples.
    """

    loader: DataLoader
    sums: Sums
    names: tuple[str, ...]
    """The metrics' names, which every rank needs, also one whose slices are all empty."""


@torch.no_grad()
def evaluate(model: DistributedDataParallel, evaluation: Evaluation) -> dict[str, float]:
    """The mean of each metric over all samples of the evaluation's loader; the same on every rank.

    Runs the module without its wrapper, in eval mode, with rank 0's running statistics. Collective.

    Raises:
        DesyncError: if ranks differ in the evaluation's data.
        UsageError: if ``sums`` gives other names than the evaluation's.
    """
    model.sync_buffers()
    module = unwrap(model)
    modes = {part: part.training for part in module.modules()}
    module.eval()
    totals = torch.zeros(len(evaluation.names) + 1, dtype=torch.float64)
    evaluation.loader.progress.set_epoch(0)  # the same batches every time, also after a resume
    evaluation.loader.progress.restart()
    expect_same_data(evaluation.loader, model, epoch=0)
    try:
        for batch in evaluation.loader:
            if batch is None:
                continue
            sums, count = evaluation.sums(module, batch)
            if set(sums) != set(evaluation.names):
                raise UsageError(f"the evaluation gave {sorted(sums)}, but its names are {sorted(evaluation.names)}")
            totals += torch.tensor([float(sums[name]) for name in evaluation.names] + [count], dtype=torch.float64)
    finally:
        for part, training in modes.items():
            part.training = training
    totals = all_sum(totals, model)
    return {name: float(total / totals[-1]) for name, total in zip(evaluation.names, totals, strict=False)}
