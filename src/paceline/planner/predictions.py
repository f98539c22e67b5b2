"""Predicted step time, throughput and efficiency on N ranks, and what a change would save."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.ddp.options.config import capacities
from paceline.planner.calibration import CROWD, FLOOR, PUBLISHED, Calibration
from paceline.planner.cluster import Cluster
from paceline.planner.simulation import StepTime, simulate
from paceline.planner.workload import Layer, Workload

WORTH = 1.5
"""Doubling the ranks pays while it multiplies the useful throughput by at least this: half of what was added."""
CAST_TRAFFIC, INT8_TRAFFIC = 6, 50
"""Bytes that a compressor reads and writes per byte of float32 gradients, counted from its operations."""
BUCKETS_MIB = (0.25, 1, 2, 5, 10, 25, 50, 100, 400)
"""Capacities to try."""


@dataclass(frozen=True)
class Prediction:
    """A step on N ranks."""

    ranks: int
    step: StepTime
    samples_per_s: float
    efficiency: float
    """Throughput divided by N times the throughput of one rank."""
    low: float
    high: float
    """The 80 % interval of the efficiency."""
    progress: float = 1.0
    """Progress per sample, relative to a batch far below the critical batch size; 1 if that is unknown."""

    def seconds(self, samples: float) -> float:
        """Return the seconds for `samples`, such as those of an epoch."""
        return samples / self.samples_per_s


@dataclass(frozen=True)
class Job:
    """What is predicted: a workload on a cluster, with constants."""

    workload: Workload
    cluster: Cluster
    calibration: Calibration = PUBLISHED
    critical_batch: float | None = None
    """Critical batch size in samples; None if unknown."""

    def step(self, ranks: int) -> StepTime:
        """Return the time of a step on `ranks` ranks."""
        work, calibration = self.workload, self.calibration
        stretch = self.cluster.stretch(ranks, work.busy_cores)
        if stretch > 1:
            work = stretched(work, stretch)
        if ranks == 1:
            return StepTime(work.compute_s, 0.0)

        def reduce_seconds(nbytes: float) -> float:
            return self.cluster.all_reduce_seconds(ranks, nbytes, calibration, stretch)

        step = simulate(work, reduce_seconds, calibration.interference)
        # Ranks that share a core compute while others wait, so they vary like one.
        apart = max(1.0, ranks / self.cluster.crowd(ranks, work.busy_cores))
        if work.jitter is not None:
            return replace(step, jitter_s=work.jitter * work.compute_s * spread(apart))
        contention = calibration.contention + calibration.host_bound * work.is_host_bound
        jitter = contention * work.compute_s * spread(min(apart, CROWD)) + calibration.jitter_s * spread(apart)
        return replace(step, jitter_s=jitter)

    def predict(self, ranks: int, baseline: int = 1) -> Prediction:
        """Return the prediction for `ranks` ranks, with the efficiency relative to `baseline` ranks."""
        step = self.step(ranks)
        efficiency = self.step(baseline).length_s / step.length_s
        loss = FLOOR + max(0.0, 1 - efficiency)
        batch = ranks * self.workload.samples
        return Prediction(
            ranks,
            step,
            batch / step.length_s,
            efficiency,
            max(0.0, efficiency + self.calibration.low * loss) if ranks > 1 else 1.0,
            efficiency + self.calibration.high * loss if ranks > 1 else 1.0,
            1.0 if self.critical_batch is None else 1 / (1 + batch / self.critical_batch),
        )


def spread(ranks: float) -> float:
    """Return the expected maximum of `ranks` normal variables, in standard deviations: an upper bound."""
    return math.sqrt(2 * math.log(ranks))


def stretched(work: Workload, factor: float) -> Workload:
    """Return `work` with all times multiplied by `factor`."""
    return replace(
        work,
        forward_s=factor * work.forward_s,
        layers=[Layer(factor * layer.backward_s, layer.nbytes) for layer in work.layers],
        optimizer_s=factor * work.optimizer_s,
        other_s=factor * work.other_s,
    )


def stops_paying(job: Job, most: int) -> int | None:
    """Return the number of ranks, a power of two, that is not worth doubling; None if that is beyond `most`."""
    current = job.predict(1)
    while 2 * current.ranks <= most:
        doubled = job.predict(2 * current.ranks)
        if doubled.samples_per_s * doubled.progress < WORTH * current.samples_per_s * current.progress:
            return current.ranks
        current = doubled
    return None


@dataclass(frozen=True)
class Effect:
    """What a change does to the time per sample."""

    change: str
    saving: float
    """Share of the time per sample that it saves; negative if it costs time."""


def effects(job: Job, ranks: int, compute_speedup: float | None = None) -> Sequence[Effect]:
    """Return the predicted effects of changes on `ranks` ranks.

    Args:
        job: the job to change.
        ranks: the number of ranks.
        compute_speedup: factor by which a lower precision speeds up computing; None if unknown.
    """
    now = job.step(ranks).length_s / job.workload.samples
    return [
        Effect(change, 1 - seconds / samples / now)
        for change, seconds, samples in _changed(job, ranks, compute_speedup)
    ]


def best_bucket_mib(job: Job, ranks: int, candidates: Sequence[float] = BUCKETS_MIB) -> tuple[float, float]:
    """Return the capacity in MiB with the shortest step, and the step's seconds."""
    steps = [(with_buckets(job, size).step(ranks).length_s, size) for size in candidates]
    seconds, size = min(steps)
    return size, seconds


def with_buckets(job: Job, mib: float) -> Job:
    """Return `job` with ``bucket_cap_mb=mib``."""
    return replace(job, workload=replace(job.workload, bucket_bytes=capacities(mib, None)))


def _compressed(work: Workload, factor: float, traffic: float) -> Workload:
    """Return `work` with gradients of `factor` times the bytes; compressing reads and writes `traffic` times theirs."""
    layers = [
        Layer(layer.backward_s + traffic * layer.nbytes / work.memory, round(factor * layer.nbytes))
        for layer in work.layers
    ]
    # Buckets are filled by the uncompressed gradients.
    sizes = tuple(max(1, int(factor * size)) for size in work.bucket_bytes)
    return replace(work, layers=layers, bucket_bytes=sizes)


def _changed(job: Job, ranks: int, compute_speedup: float | None) -> Iterator[tuple[str, float, float]]:
    """Yield each change with the step's seconds and samples per rank after it."""
    work = job.workload

    def seconds(changed: Workload) -> float:
        return replace(job, workload=changed).step(ranks).length_s

    size, shortest = best_bucket_mib(job, ranks)
    yield f"bucket_cap_mb={size:g}", shortest, work.samples
    for factor in (2, 4):
        accumulated = replace(work, micro_batches=factor * work.micro_batches)
        yield f"accumulate {factor} batches", seconds(accumulated), factor * work.samples
    if compute_speedup is not None:
        yield "bf16 precision", seconds(stretched(work, 1 / compute_speedup)), work.samples
    yield "bf16 gradients (Cast)", seconds(_compressed(work, 1 / 2, CAST_TRAFFIC)), work.samples
    yield "8-bit gradients (Int8)", seconds(_compressed(work, 1 / 4, INT8_TRAFFIC)), work.samples
    # The updated parameters are gathered after the step: half of an all-reduce.
    stretch = job.cluster.stretch(ranks, work.busy_cores)
    gather = job.cluster.all_reduce_seconds(ranks, work.nbytes, job.calibration, stretch) / 2
    yield "sharded optimizer", seconds(replace(work, optimizer_s=work.optimizer_s / ranks)) + gather, work.samples
