"""Cuts a rank's steps into parts, and writes them to its file in batches."""

from __future__ import annotations

import time
from typing import TextIO

from paceline.profiler.recording.gradient_norms import GradientNorms
from paceline.profiler.recording.stack_samples import StackSampler, between_spans
from paceline.profiler.records import rank_file
from paceline.profiler.records.rank_file import RankRecord
from paceline.profiler.records.steps import (
    DETAILED,
    FLUSH_S,
    KEPT,
    TRACED,
    WARM_UP,
    Step,
    cut_into_stretches,
    seconds_by_part,
)


class StepWriter:
    """Holds the steps of `record` that are not in the file yet."""

    def __init__(self, file: TextIO, record: RankRecord, stacks: StackSampler) -> None:
        self.steps: list[Step] = []
        self.norms: dict[int, GradientNorms] = {}
        """Gradient norms by step, until the step is written."""
        self._file, self._record, self._stacks = file, record, stacks
        self._flushed = time.perf_counter()

    def is_due(self, now: float) -> bool:
        """Return whether it is time to write."""
        # Write warm-up steps immediately, so that the record of a job that is stopped early shows how many there were.
        is_warm_up = bool(self.steps) and self.steps[-1].number < WARM_UP
        return is_warm_up or now - self._flushed > FLUSH_S

    def flush(self) -> None:
        """Write the steps and forget them, even if writing raises ``OSError``."""
        steps, self.steps, self._flushed = self.steps, [], time.perf_counter()
        rank_file.write_steps(self._file, map(self._cut, steps))

    def _cut(self, step: Step) -> Step:
        """Return `step` cut into parts, without spans once enough steps have kept theirs."""
        stretches, step.meetings = cut_into_stretches(step.spans, step.start, step.end)
        step.seconds = seconds_by_part(stretches)
        # Take the samples of every step, because unused ones would stay in the queue.
        samples = self._stacks.of(step.start, step.end)
        if step.is_measured():
            for name in between_spans(samples, stretches):
                self._record.own_code[name] = self._record.own_code.get(name, 0) + 1
        norms = self.norms.pop(step.number, None)
        step.norms = None if norms is None else norms.squared()
        if step.number >= WARM_UP + DETAILED + TRACED + KEPT:
            step.spans = []
        return step
