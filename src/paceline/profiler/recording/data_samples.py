"""A look at a program's data: by which expression samples differ in length, and the size of a model's input."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from paceline.core.state.rng import preserved
from paceline.core.telemetry.spans import LAUNCH, WAIT
from paceline.core.torch_internals.data import parts_of
from paceline.nn.data_parallel import nested_tensors
from paceline.profiler.records.rank_file import RankRecord
from paceline.profiler.records.steps import Step

MOST, PATIENCE_S = 256, 0.3
"""Samples that are read, and the seconds after which no more are: reading them may take long."""


def describe_loader(record: RankRecord, iterator: Any) -> None:
    """Note in `record` how the loader of `iterator` splits batches, its workers, and the lengths of its samples.

    Reads samples of the data set once more, without a trace in the random streams of the rank. A data set that cannot
    be read at will leaves no lengths.
    """
    dataset, sampler, record.workers = parts_of(iterator)
    if (progress := getattr(sampler, "progress", None)) is not None:  # a loader of ours, around torch's
        record.balance, dataset = getattr(progress, "balance", ""), dataset.dataset
        if (cuts := progress.cuts) is not None:
            record.speed = "measured" if cuts.is_measured else "given"
    with suppress(Exception), preserved():
        size = len(dataset)
        places = range(0, size, -(-size // MOST))
        samples, deadline = [], time.perf_counter() + PATIENCE_S
        for place in places:
            samples.append(dataset[place])
            if time.perf_counter() > deadline:
                break
        record.cost, record.lengths = differing_length(samples)


def differing_length(samples: Sequence[Any]) -> tuple[str, list[int]]:
    """Return the expression of a ``sample`` by which `samples` differ most in length, and its values; else nothing."""
    known: dict[str, list[int]] = {}
    for sample in samples:
        for expression, length in _lengths(sample):
            known.setdefault(expression, []).append(length)
    differing = {
        expression: lengths
        for expression, lengths in known.items()
        if len(lengths) == len(samples) and min(lengths) < max(lengths)
    }
    if not differing:
        return "", []
    best = max(differing, key=lambda expression: max(differing[expression]) - min(differing[expression]))
    return best, differing[best]


def _lengths(sample: Any) -> Iterator[tuple[str, int]]:
    """Yield the length of `sample`, or of each of its fields, with its expression."""
    if isinstance(sample, Mapping):
        fields = [(f"sample[{key!r}]", value) for key, value in sample.items()]
    # A list of numbers is one sequence, such as token ids, and not a sample's fields.
    elif isinstance(sample, tuple | list) and not all(isinstance(value, int | float) for value in sample):
        fields = [(f"sample[{index}]", value) for index, value in enumerate(sample)]
    else:
        fields = [("sample", sample)]
    for expression, value in fields:
        # Tensors, and arrays of NumPy, which need not be installed: those without dimensions have no length.
        if getattr(value, "ndim", 0) or isinstance(value, list | tuple | str):
            yield f"len({expression})", len(value)


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
