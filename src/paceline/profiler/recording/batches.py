"""The batches of a program: the sizes of its models' inputs."""

from __future__ import annotations

import math
from typing import Any

import torch

from paceline.core.telemetry.spans import LAUNCH, WAIT
from paceline.nn.data_parallel import nested_tensors
from paceline.profiler.records.steps import Step


class Forwards:
    """The forwards of a step, by model: some programs wrap several, which see the same samples."""

    def __init__(self) -> None:
        self._by_model: dict[int, tuple[int, int, int]] = {}

    def add(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a forward of `model` with these arguments."""
        number, rows, cells = self._by_model.get(id(model), (0, 0, 0))
        more, cells_more = size_of_input(args, kwargs)
        self._by_model[id(model)] = number + 1, rows + more, cells + cells_more

    def describe(self, step: Step) -> None:
        """Note in `step` the batches of the model with most, and how many of its backwards averaged gradients."""
        step.batches, step.rows, step.cells = max(self._by_model.values(), default=(0, 0, 0))
        # Each averaging launches every bucket once; torch's wrapper shows the wait for them alone.
        first = sum(span.label == LAUNCH and span.bucket == 0 for span in step.spans)
        averages = first or sum(span.label == WAIT for span in step.spans)
        step.averages = min(step.batches, averages // max(1, len(self._by_model)))

    def __len__(self) -> int:
        """Return the number of models."""
        return len(self._by_model)


def size_of_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the rows of the first input that is a tensor, and its cells: rows times columns, padding included."""
    first = args[0] if args else None  # most models' only input
    if not (isinstance(first, torch.Tensor) and first.dim()):
        first = next((tensor for tensor in nested_tensors((args, kwargs)) if tensor.dim()), None)
    return (0, 0) if first is None else (len(first), math.prod(first.shape[:2]))
