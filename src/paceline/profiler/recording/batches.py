"""Batch sizes, taken from the inputs of the program's models."""

from __future__ import annotations

import math
from typing import Any

import torch

from paceline.core.telemetry.spans import LAUNCH, WAIT
from paceline.nn.data_parallel import nested_tensors
from paceline.profiler.records.steps import Step


class Forwards:
    """The forward passes of a step, by model. Several models in a program may process the same samples."""

    def __init__(self) -> None:
        self._by_model: dict[int, tuple[int, int, int]] = {}

    def add(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a forward pass of `model` with these arguments."""
        number, rows, cells = self._by_model.get(id(model), (0, 0, 0))
        more, cells_more = size_of_input(args, kwargs)
        self._by_model[id(model)] = number + 1, rows + more, cells + cells_more

    def describe(self, step: Step) -> None:
        """Set the batches of `step` from the model with the most samples, and count the averaging backward passes."""
        step.batches, step.rows, step.cells = max(self._by_model.values(), default=(0, 0, 0))
        # Averaging gradients launches every bucket once. With torch's wrapper only the wait is visible.
        first = sum(span.label == LAUNCH and span.bucket == 0 for span in step.spans)
        averages = first or sum(span.label == WAIT for span in step.spans)
        step.averages = min(step.batches, averages // max(1, len(self._by_model)))

    def __len__(self) -> int:
        """Return the number of models."""
        return len(self._by_model)


def size_of_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the rows and cells (rows times columns, including padding) of the first tensor among the inputs."""
    first = args[0] if args else None  # the only input of most models
    if not (isinstance(first, torch.Tensor) and first.dim()):
        first = next((tensor for tensor in nested_tensors((args, kwargs)) if tensor.dim()), None)
    return (0, 0) if first is None else (len(first), math.prod(first.shape[:2]))
