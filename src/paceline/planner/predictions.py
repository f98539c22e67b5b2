"""Predicted step time, throughput and efficiency on N ranks, and what a change would save."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from statistics import NormalDist

from paceline.ddp.buckets import CAPACITY, FIRST_CAPACITY, Overlap, assign, default_capacities, overlap
from paceline.ddp.options import capacities
from paceline.planner.calibration import (
    CERTAIN,
    CROWD,
    MEASURED,
    PUBLISHED,
    Calibration,
    Interval,
    Intervals,
    interval_of,
    inverse,
    product,
)
from paceline.planner.hardware import Cluster, Device

EQUAL_LAYERS = 24
"""Layers of a model about which only the number of parameters is known."""
CLASSIFIER = 1 / 8
"""Share of the parameters in the last eighth of the layers, if all are equal."""
OPTIMIZER_BYTES = 28
"""Bytes per parameter that a fused AdamW reads (parameter, gradient, two moments) and writes, in float32."""
FORWARD, BACKWARD = 1 / 3, 2 / 3
"""Shares of a step's FLOPs."""
WORTH = 1.5
"""Doubling the ranks pays while it multiplies the useful throughput by at least this: half of what was added."""
CAST_TRAFFIC, INT8_TRAFFIC = 6, 50
"""Bytes that a compressor reads and writes per byte of float32 gradients, counted from its operations."""
BUCKETS_MIB = (0.25, 1, 2, 5, 10, 25, 50, 100, 400)
"""Capacities to try."""


@dataclass(frozen=True)
class Layer:
    """Parameters whose gradients arrive together."""

    backward_s: float
    nbytes: int
    """Bytes of its gradients."""


@dataclass(frozen=True)
class Workload:
    """The step of one device that does not communicate."""

    forward_s: float
    """Seconds of one forward."""
    layers: Sequence[Layer]
    """The layer whose gradients arrive first comes first."""
    samples: float
    """Samples per device and optimizer step."""
    optimizer_s: float = 0.0
    """Seconds of an optimizer step."""
    other_s: float = 0.0
    """Seconds per micro-batch in the loop's own code and in waiting for data."""
    micro_batches: int = 1
    bucket_bytes: tuple[int, ...] = (FIRST_CAPACITY, CAPACITY)
    """Capacities of the first, second, … bucket; the last one applies to all further buckets."""
    jitter: float | None = None
    """Measured standard deviation of a rank's step time over the steps, relative to the mean; None if unknown."""
    alone: float = 1.0
    """Slowdown of a single rank. It allocates gradients in each step, while several ranks keep them in buckets."""
    is_host_bound: bool = False
    """Whether the hosts barely keep up with the devices, as often with images and half precision."""
    busy_cores: float = 0.0
    """Cores that a rank keeps busy; 0 if it computes on a device of its own."""
    memory: float = math.inf
    """Bytes per second that simple operations read and write."""

    @property
    def backward_s(self) -> float:
        """Seconds of one backward."""
        return sum(layer.backward_s for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Seconds of a step without communication."""
        return self.micro_batches * (self.forward_s + self.backward_s + self.other_s) + self.optimizer_s


def equal_layers(
    seconds: float, nbytes: float, samples: float, micro_batches: int = 1, classifier: float = CLASSIFIER
) -> Workload:
    """Return a step of equal layers.

    Args:
        seconds: of a micro-batch, forward and backward.
        nbytes: of all gradients.
        samples: of a micro-batch.
        micro_batches: per optimizer step.
        classifier: share of the bytes in the last layers, an eighth of the model, whose gradients arrive first.
    """
    last = EQUAL_LAYERS // 8
    shares = [classifier / last] * last + [(1 - classifier) / (EQUAL_LAYERS - last)] * (EQUAL_LAYERS - last)
    layers = [Layer(BACKWARD * seconds / EQUAL_LAYERS, round(share * nbytes)) for share in shares]
    return Workload(FORWARD * seconds, layers, samples * micro_batches, micro_batches=micro_batches)


def described(params: float, seconds: float, device: Device, batch: float) -> Workload:
    """Return a step that was not profiled.

    Args:
        params: number of parameters; their gradients have 4 bytes, as with autocast.
        seconds: of a step on one device.
        device: the kind of device.
        batch: samples of a device.
    """
    # Part of `seconds`, because published speeds include the optimizer.
    optimizer = min(OPTIMIZER_BYTES * params / device.memory, seconds / 2)
    work = equal_layers(seconds - optimizer, 4 * params, batch)
    capacities = default_capacities(work.nbytes)
    return replace(work, optimizer_s=optimizer, memory=device.memory, bucket_bytes=capacities)


@dataclass(frozen=True)
class StepTime:
    """The parts of a step, in seconds."""

    compute_s: float
    exposed_s: float
    """Communication that the step waits for after backward."""
    hidden_s: float = 0.0
    """Communication that overlaps with backward."""
    interference_s: float = 0.0
    """Slowdown of backward by communication that overlaps with it."""
    jitter_s: float = 0.0
    """Waiting for the slowest rank."""

    @property
    def length_s(self) -> float:
        """Seconds of the whole step."""
        return self.compute_s + self.exposed_s + self.interference_s + self.jitter_s


def backward_timeline(workload: Workload, reduce_seconds: Callable[[float], float]) -> Overlap:
    """Return when each bucket fills up and is reduced, given the seconds to reduce a number of bytes."""
    sizes = [layer.nbytes for layer in workload.layers]
    arrived = list(accumulate(layer.backward_s for layer in workload.layers))
    buckets = assign(sizes, [0] * len(sizes), range(len(sizes)), workload.bucket_bytes)
    full = [0.0, *(arrived[indices[-1]] for indices in buckets)]
    fill = [end - begin for begin, end in pairwise(full)]
    return overlap(fill, [reduce_seconds(sum(sizes[index] for index in indices)) for indices in buckets])


def simulate(workload: Workload, reduce_seconds: Callable[[float], float], interference: float = 0.0) -> StepTime:
    """Return the time of a step whose last backward reduces gradients, without jitter.

    Args:
        workload: the step of one device.
        reduce_seconds: the seconds to reduce a number of bytes.
        interference: slowdown of backward per second of communication that overlaps with it.
    """
    timeline = backward_timeline(workload, reduce_seconds)
    reducing = sum(end - begin for begin, end in zip(timeline.begin, timeline.end, strict=True))
    hidden = max(0.0, reducing - timeline.exposed)
    return StepTime(workload.compute_s, timeline.exposed, hidden, interference * hidden)


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
    slowest: float
    fastest: float
    """The 80 % interval of the throughput, relative to `samples_per_s`."""
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
    intervals: Intervals = MEASURED
    """Intervals of the efficiency."""
    speed: Interval = CERTAIN
    """The interval of the speed of one device, if it is assumed."""
    profiled: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Measured seconds of a step, and their relative standard error, by number of ranks."""

    def step(self, ranks: int) -> StepTime:
        """Return the time of a step on `ranks` ranks."""
        calibration, cluster, cores = self.calibration, self.cluster, self.workload.busy_cores
        alone = self.workload.alone if ranks == 1 else 1.0
        work = stretched(self.workload, cluster.stretch(ranks, cores) * alone)
        reduce_seconds = partial(cluster.all_reduce_seconds, ranks, calibration=calibration, busy_cores=cores)
        step = simulate(work, reduce_seconds, calibration.interference)
        if ranks in self.profiled:
            return replace(step, jitter_s=max(0.0, self.profiled[ranks][0] - step.length_s))
        # Ranks that share a core compute while others wait, so they vary like one.
        apart = max(1.0, ranks / cluster.crowd(ranks, cores))
        if work.jitter is not None:
            return replace(step, jitter_s=work.jitter * work.compute_s * spread(apart))
        contention = calibration.contention + calibration.host_bound * work.is_host_bound
        relative = contention * spread(min(apart, CROWD)) + calibration.hosts * spread(cluster.hosts(ranks))
        return replace(step, jitter_s=relative * work.compute_s + calibration.jitter_s * spread(apart))

    def predict(self, ranks: int, baseline: int = 1) -> Prediction:
        """Return the prediction for `ranks` ranks, with the efficiency relative to `baseline` ranks."""
        step = self.step(ranks)
        efficiency = self.step(baseline).length_s / step.length_s
        error = self._error(ranks, baseline)
        low, high = product(error, inverse(self._error(baseline, baseline))) if ranks != baseline else CERTAIN
        batch = ranks * self.workload.samples
        return Prediction(
            ranks,
            step,
            batch / step.length_s,
            efficiency,
            efficiency * low,
            efficiency * high,
            *product(error, self.speed),
            1.0 if self.critical_batch is None else 1 / (1 + batch / self.critical_batch),
        )

    def _error(self, ranks: int, baseline: int) -> Interval:
        """Return the interval of the throughput, apart from the speed of one device.

        It begins at the nearest profiled number of ranks; fewer ranks take the profiled step without parts of its
        communication. Without a profile, `baseline` is certain.
        """
        known = max((size for size in self.profiled if size <= ranks), default=min(self.profiled, default=baseline))
        error = NormalDist().inv_cdf(0.9) * self.profiled[known][1] if self.profiled else 0.0
        here = (1 - error, 1 + error)
        if ranks <= known:
            return here
        further = self.step(known).length_s / self.step(ranks).length_s
        return product(here, interval_of(self.intervals, ranks, further))


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


def stops_paying(job: Job, most: int, useful: Callable[[int], float]) -> int | None:
    """Return the number of ranks, a power of two, that is not worth doubling; None if that is beyond `most`.

    Args:
        job: the job.
        most: the largest number of ranks.
        useful: the share of the time that failures leave on a number of ranks.
    """

    def progress(ranks: int) -> float:
        made = job.predict(ranks)
        return made.samples_per_s * made.progress * useful(ranks)

    ranks = 1
    while 2 * ranks <= most:
        if progress(2 * ranks) < WORTH * progress(ranks):
            return ranks
        ranks *= 2
    return None


def effects(job: Job, ranks: int, in_half: tuple[str, Workload] | None = None) -> dict[str, float]:
    """Return the share of the time per sample that each change saves on `ranks` ranks; negative if it costs time.

    Args:
        job: the job to change.
        ranks: the number of ranks.
        in_half: the name of a lower precision, and the same step in it; None if unknown.
    """
    work, job = job.workload, replace(job, profiled={})

    def per_sample(changed: Workload, extra_s: float = 0.0) -> float:
        return (replace(job, workload=changed).step(ranks).length_s + extra_s) / changed.samples

    shortest, size = best_bucket_mib(job, ranks)
    times = {f"bucket_cap_mb={size:g}": shortest / work.samples}
    for factor in (2, 4):
        more = replace(work, micro_batches=factor * work.micro_batches, samples=factor * work.samples)
        times[f"accumulate {factor} batches"] = per_sample(more)
    if in_half is not None:
        times[f"{in_half[0]} precision"] = per_sample(in_half[1])
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
