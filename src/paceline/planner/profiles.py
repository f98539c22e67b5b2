"""What ``paceline profile`` measured of a job, and the same job on other numbers of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, linear_regression

from paceline.core.messages import counted
from paceline.core.strict_json import LARGEST, WrongValue, instance_of, loads, read_text, shown
from paceline.ddp.buckets import default_capacities
from paceline.errors import UsageError
from paceline.planner.calibration import PROFILED, PUBLISHED
from paceline.planner.hardware import CORE_MEMORY, Cluster, Kind, Link, device_or_unknown
from paceline.planner.predictions import Job, Layer, Workload, spread, stretched

SUMMARY = "summary.json"
PLAN = "plan"
"""Key of the object in :data:`SUMMARY` that :class:`Profiled` describes."""
HOST_LOAD = "host-load"
"""The kind of advice that a profile made beside other programs contains."""
SPREAD = 0.03
"""Least relative standard error of a step time, because runs of the same job differ even if each of them is steady."""
MOST_RANKS = MOST_LAYERS = 2**20
"""Limits of a profile."""


@dataclass(frozen=True)
class Profiled:
    """Figures of a profile. Seconds are of one rank: medians over steps and ranks, or means of what is not in every
    step."""

    ranks: int
    hosts: int
    device: str
    cores: float
    """Cores of a host that its ranks share."""
    busy_cores: float
    """Cores that a rank keeps busy, if it computes on them; otherwise 0."""
    samples: float
    """Samples per rank and step; micro-batches if the samples are unknown."""
    micro_batches: int
    forward_s: float
    """Seconds of one forward."""
    layers: list[tuple[float, int]]
    """Seconds of backward, and bytes of gradients, of each parameter in the order in which gradients arrive."""
    optimizer_s: float
    """Seconds per step of the optimizer."""
    other_s: float
    """Seconds per micro-batch that the loop waits for data and runs its own code."""
    communication_s: float
    """Seconds by which communication makes a step longer."""
    bubble_s: float
    """Seconds per step that a rank waits for others."""
    jitter: float
    """Standard deviation of the seconds that a step computes, relative to its mean."""
    bucket_bytes: list[int]
    """Bytes of each bucket, in the order of launch; empty if there are none."""
    all_reduces: list[tuple[int, float]]
    """Bytes and seconds of each bucket's all-reduce; empty if unknown."""
    reduces_in_backward: bool
    """Whether the cores that compute backward reduce the gradients: through shared memory."""
    critical_batch: float | None = None
    """Critical batch size in samples; None if it was not measured."""
    spread: float = 0.0
    """Relative standard error of the median step time; 0 if unknown. It is estimated from the medians of consecutive
    blocks of steps, so that slow drift of the machine counts."""

    @property
    def workload(self) -> Workload:
        """The step of one rank, without communication."""
        return Workload(
            self.forward_s,
            [Layer(*layer) for layer in self.layers],
            self.samples,
            self.optimizer_s,
            self.other_s,
            self.micro_batches,
            # Capacities equal to the buckets' sizes reproduce the buckets.
            tuple(filter(None, self.bucket_bytes)) or default_capacities(sum(size for _, size in self.layers)),
            self.jitter,
            busy_cores=self.busy_cores,
            memory=CORE_MEMORY if self.busy_cores else device_or_unknown(self.device).memory,
        )

    @property
    def length_s(self) -> float:
        """Seconds of a step."""
        return self.workload.compute_s + self.communication_s + self.bubble_s

    def link(self) -> Link | None:
        """Return the link that the all-reduces measured; None if they are unknown."""
        if self.ranks < 2 or not any(size for size, _ in self.all_reduces):
            return None
        ends = self.ranks if self.hosts == 1 else self.hosts
        if self.reduces_in_backward:
            nbytes = sum(size for size, _ in self.all_reduces)
            return Link("measured", nbytes / max(self.communication_s, 1e-9), 0.0, "memory")
        sizes, seconds = zip(*self.all_reduces, strict=True)
        # Equal buckets do not tell the cost per message from the cost per byte.
        message, byte = fit(self.all_reduces if len(set(sizes)) > 1 else [(sum(sizes), sum(seconds))])
        messages = 2 * (ends - 1)  # of a ring, each with a share of the bytes
        kind: Kind = "sockets" if self.busy_cores and self.hosts == 1 else "measured"
        return Link("measured", messages / ends / max(byte, 1e-15), message / messages, kind)


def fit(times: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the nonnegative seconds per message and per byte that fit `times`, pairs of bytes and seconds, best."""
    nbytes, seconds = zip(*times, strict=True)
    if len(times) < 2:
        return 0.0, seconds[0] / nbytes[0] if nbytes[0] else 0.0
    slope, intercept = linear_regression(nbytes, seconds) if len(set(nbytes)) > 1 else (0.0, 0.0)
    # If larger buckets were not slower, the cost per message alone explains the times.
    if slope <= 0:
        return fmean(seconds), 0.0
    return (intercept, slope) if intercept > 0 else (0.0, sum(seconds) / sum(nbytes))


@dataclass(frozen=True)
class Stated:
    """One piece of advice from a profile."""

    kind: str
    text: str
    reason: str


@dataclass(frozen=True)
class Summary:
    """The parts of a profile's ``summary.json`` that a plan uses."""

    plan: Profiled
    version: int = 1
    headline: str = ""
    provisional: bool = False
    advice: list[Stated] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes on rank 0: ``parameters``, ``gradients``, ``optimizer`` and ``peak``; empty if unknown."""

    @property
    def unreliable(self) -> str:
        """Why the profile does not show the job alone, and the remedy; empty if it does."""
        reasons = ["it has too few steps for a verdict; profile more steps"] * self.provisional
        return "; ".join(reasons + [f"{at.reason}; {at.text}" for at in self.advice if at.kind == HOST_LOAD])


def from_summary(path: Path) -> Summary:
    """Return what the profile in `path`, a ``summary.json`` or its folder, measured. The file is not trusted."""
    path = path / SUMMARY if path.is_dir() else path
    try:
        summary = loads(read_text(path))
        if not isinstance(summary, dict) or not isinstance(summary.get(PLAN), dict):
            raise WrongValue(
                f"it has no object {PLAN!r}, which a profile with a measured step and without outer steps has"
            )
        found: Summary = instance_of(Summary, summary)
        if found.version != 1:
            raise WrongValue(f"it has version {found.version}, but this Paceline reads version 1")
        _check(found.plan)
        if min(found.memory.values(), default=0) < 0:
            raise WrongValue(f"memory is {shown(found.memory)}, but must not be negative")
        return found
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; give the folder of a profile") from error
    except ValueError as error:
        raise UsageError(f"{path} is not a profile's summary for planning: {error}; profile again") from error


def _check(plan: Profiled) -> None:
    ranges: dict[str, tuple[float, float]] = {
        "ranks": (1, MOST_RANKS),
        "hosts": (1, plan.ranks),
        "micro_batches": (1, LARGEST),
        "forward_s": (1e-9, LARGEST),
        "spread": (0, 0.75),
    }
    ranges |= dict.fromkeys(("cores", "samples", "critical_batch"), (1e-9, LARGEST))
    for name, value in vars(plan).items():
        low, high = ranges.get(name, (0, LARGEST))
        entries = value if isinstance(value, list) else [value]
        if len(entries) > MOST_LAYERS:
            raise WrongValue(f"{PLAN}.{name} has {len(entries)} entries, but the limit is {MOST_LAYERS}")
        for at, entry in enumerate(entries):
            for number in entry if isinstance(entry, tuple) else (entry,):
                if isinstance(number, int | float) and not low <= number <= high:
                    where = f"{PLAN}.{name}[{at}]" if isinstance(value, list) else f"{PLAN}.{name}"
                    raise WrongValue(f"{where} is {shown(number)}, but must be from {low:g} to {high:g}")
    if plan.workload.backward_s < 1e-9 or not plan.workload.nbytes:
        raise WrongValue(f"{PLAN}.layers has no time or no bytes")


def from_profiles(profiles: Sequence[Profiled], cluster: Cluster | None = None) -> Job:
    """Return the job that `profiles` measured on different numbers of ranks.

    The profile with the fewest ranks gives the time to compute. The one with the most ranks gives the speed of the
    link, the slowdown by ranks on the same cores, and the slowdown by communication: as much as makes its own
    prediction equal to its measured time.

    Args:
        profiles: one or more profiles.
        cluster: hosts and links of the prediction. By default, they equal the hosts and links of the largest profile.
    """
    first, last = (choose(profiles, key=lambda profile: profile.ranks) for choose in (min, max))
    if len({profile.ranks for profile in profiles}) < len(profiles):
        raise UsageError("two profiles have the same number of ranks; give one of each number")
    for profile in profiles:
        _check_same(first, profile)
    link = last.link()
    if cluster is None and link is None:
        raise UsageError(
            f"the profile has {counted(last.ranks, 'rank')} and no times of all-reduces; add a profile of 2 ranks of "
            "the same job, or describe the links"
        )
    # A rank that waits for a slow link keeps fewer cores busy, but as many as before while it computes.
    work, among = (stretched(at.workload, 1 / _on(at).stretch(at.ranks, first.busy_cores)) for at in (first, last))
    if first.ranks == 1 and among.compute_s < work.compute_s:
        work = replace(among, alone=work.compute_s / among.compute_s, busy_cores=first.busy_cores)
    work = replace(work, bucket_bytes=last.workload.bucket_bytes)
    # Published jobs computed on GPUs, whose communication takes memory bandwidth and cores from computing.
    calibration = replace(PUBLISHED, interference=0.0) if first.busy_cores else PUBLISHED
    here = _on(last)
    if link is not None:
        apart = last.ranks / here.crowd(last.ranks, first.busy_cores)
        work = replace(work, jitter=last.bubble_s / last.workload.compute_s / spread(max(2.0, apart)))
        explained = _explained(Job(work, here, calibration), first, last, link)
        here = explained.cluster
        if cluster is None or link.kind != "memory":  # other links are not served by the cores that compute
            calibration = explained.calibration
    if cluster is not None:
        here = replace(cluster, contention=here.contention)
    knee = last.critical_batch or first.critical_batch
    # Other links change the step of every number of ranks but one.
    kept = {at.ranks: (at.length_s, max(at.spread, SPREAD)) for at in profiles if cluster is None or at.ranks == 1}
    return Job(work, here, calibration, knee, PROFILED, profiled=kept)


def on_hosts_of(job: Job, local: int, between: Link | None = None) -> Job:
    """Return a job that was profiled on one host, with `local` ranks on each host."""
    cluster = replace(job.cluster, devices_per_host=local, between=between or job.cluster.between)
    return replace(job, cluster=cluster, profiled={size: at for size, at in job.profiled.items() if size <= local})


def _on(profile: Profiled) -> Cluster:
    """Return the cluster of `profile`, whose links are unknown."""
    unknown = Link("unknown", LARGEST, 0.0, "measured")
    local = MOST_RANKS if profile.hosts == 1 else math.ceil(profile.ranks / profile.hosts)
    return Cluster(local, unknown, unknown, cores=profile.cores)


def _explained(job: Job, first: Profiled, last: Profiled, link: Link) -> Job:
    """Return `job` with the link and the slowdowns that explain the measured time of a step in `last`."""
    work, ranks = job.workload, last.ranks

    def slowed(slowdown: float, interference: float) -> Job:
        """Return the job whose ranks slow each other down, on the cores of a host and by communication."""
        neighbors = job.cluster.neighbors(ranks, work.busy_cores)
        here = replace(job.cluster, contention=(slowdown - 1) / neighbors if neighbors else 0.0, between=link)
        if last.hosts == 1:  # times of several hosts include the links inside them
            here = replace(here, inside=link)
            # If the link needs the ranks' cores, they were already shared when its speed was measured.
            shared = here.serving(ranks, work.busy_cores)
            speed = replace(link, bytes_per_s=shared * link.bytes_per_s, latency_s=link.latency_s / shared)
            here = replace(here, inside=speed, between=speed)
        return Job(work, here, replace(PUBLISHED, interference=interference))

    slowdown = 1.0
    if first is not last:
        whole = last.workload.compute_s / work.compute_s
        # Communication beside backward slows it down, too.
        apart = whole if link.kind == "memory" else _apart(last.workload) / _apart(work)
        slowdown = max(1.0, min(whole, apart) / job.cluster.stretch(ranks, work.busy_cores))
    if link.kind == "memory":  # nothing is hidden, because the same cores compute and reduce
        return slowed(slowdown, 1.0)
    step = slowed(slowdown, 0.0).step(ranks)
    lost = last.workload.compute_s + last.communication_s - step.compute_s - step.exposed_s
    return slowed(slowdown, min(1.0, max(0.0, lost) / step.hidden_s) if step.hidden_s else 0.0)


def _apart(work: Workload) -> float:
    """Return the seconds that a step computes outside of backward."""
    return work.micro_batches * work.forward_s + work.optimizer_s


def _check_same(first: Profiled, last: Profiled) -> None:
    for what, one, other in (
        ("bytes of gradients", first.workload.nbytes, last.workload.nbytes),
        ("micro-batches per step", first.micro_batches, last.micro_batches),
        ("samples per rank", round(first.samples), round(last.samples)),
    ):
        # The last batch of an epoch is smaller, more so on more ranks.
        if not math.isclose(one, other, rel_tol=0.1 if what == "samples per rank" else 0):
            raise UsageError(
                f"the profiles are of different jobs: {one} {what} on {counted(first.ranks, 'rank')}, but {other} on "
                f"{last.ranks}; profile one job with the same batch per rank"
            )
