"""Predicted step time, throughput and efficiency on N ranks, and what a change would save."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist

from paceline.ddp.options.config import capacities
from paceline.planner.calibration import CROWD, FLOOR, PUBLISHED, Calibration
from paceline.planner.cluster import Cluster
from paceline.planner.simulation import StepTime, simulate
from paceline.planner.workload import Layer, Workload

RULE_OF_THUMB = ((2, 8, 0.95, 0.99), (16, 64, 0.85, 0.95), (100, None, 0.70, 0.90))
"""Fewest and most devices, lowest and highest efficiency, as tutorials give them."""
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
        calibration, cluster, cores = self.calibration, self.cluster, self.workload.busy_cores
        alone = self.workload.alone if ranks == 1 else 1.0
        work = stretched(self.workload, cluster.stretch(ranks, cores) * alone)
        reduce_seconds = partial(cluster.all_reduce_seconds, ranks, calibration=calibration, busy_cores=cores)
        step = simulate(work, reduce_seconds, calibration.interference)
        # Ranks that share a core compute while others wait, so they vary like one.
        apart = max(1.0, ranks / cluster.crowd(ranks, cores))
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
    """Return the expected maximum of `ranks` normal variables, in standard deviations (Blom 1958)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


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


def effects(job: Job, ranks: int, compute_speedup: float | None = None) -> dict[str, float]:
    """Return the share of the time per sample that each change saves on `ranks` ranks; negative if it costs time.

    Args:
        job: the job to change.
        ranks: the number of ranks.
        compute_speedup: factor by which a lower precision speeds up computing; None if unknown.
    """
    work = job.workload

    def per_sample(changed: Workload, extra_s: float = 0.0) -> float:
        return (replace(job, workload=changed).step(ranks).length_s + extra_s) / changed.samples

    shortest, size = best_bucket_mib(job, ranks)
    times = {f"bucket_cap_mb={size:g}": shortest / work.samples}
    for factor in (2, 4):
        more = replace(work, micro_batches=factor * work.micro_batches, samples=factor * work.samples)
        times[f"accumulate {factor} batches"] = per_sample(more)
    if compute_speedup is not None:
        times["bf16 precision"] = per_sample(stretched(work, 1 / compute_speedup))
    times["bf16 gradients (Cast)"] = per_sample(_compressed(work, 1 / 2, CAST_TRAFFIC))
    times["8-bit gradients (Int8)"] = per_sample(_compressed(work, 1 / 4, INT8_TRAFFIC))
    # The updated parameters are gathered after the step: half of an all-reduce.
    gather_s = job.cluster.all_reduce_seconds(ranks, work.nbytes, job.calibration, work.busy_cores) / 2
    times["sharded optimizer"] = per_sample(replace(work, optimizer_s=work.optimizer_s / ranks), gather_s)
    now = per_sample(work)
    return {change: 1 - seconds / now for change, seconds in times.items()}


def best_bucket_mib(job: Job, ranks: int) -> tuple[float, float]:
    """Return the seconds of the shortest step, and the capacity in MiB that gives it."""
    return min((with_buckets(job, size).step(ranks).length_s, size) for size in BUCKETS_MIB)


def with_buckets(job: Job, mib: float) -> Job:
    """Return `job` with ``bucket_cap_mb=mib``."""
    return replace(job, workload=replace(job.workload, bucket_bytes=capacities(mib, None)))


def _compressed(work: Workload, factor: float, traffic: float) -> Workload:
    """Return `work` with gradients of `factor` times the bytes; compressing reads and writes `traffic` times theirs."""
    per_byte = traffic / work.memory / work.micro_batches  # only the last backward of a step compresses
    layers = [Layer(at.backward_s + per_byte * at.nbytes, round(factor * at.nbytes)) for at in work.layers]
    # Buckets are filled by the uncompressed gradients.
    sizes = tuple(max(1, int(factor * size)) for size in work.bucket_bytes)
    return replace(work, layers=layers, bucket_bytes=sizes)
