"""The scene of a training step: its four stages on every rank, and the points at which all ranks meet.

    1 data ──► 2 forward ──A──B──► 3 backward ──D──E──► F ──► 4 optimizer
                                         C: buckets, beside backward

The numbers and letters are those of the picture. The bytes of a meeting follow from the example's sizes, and its
length from its schedule. SyncBatchNorm's small messages are assumed not to wait for a bucket that is under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.comm.algorithms import build
from paceline.core.output.wording import counted
from paceline.ddp.options.buckets import Overlap, overlap
from paceline.tools.explain.pictures.gantt import (
    BUBBLE,
    COMMUNICATION,
    LATER,
    NETWORK,
    WAITING,
    Bar,
    Mark,
    Panel,
    charted,
)
from paceline.tools.explain.pictures.scene import Scene, ms
from paceline.tools.explain.pictures.timeline import BACKWARD, FORWARD, LINK, OPTIMIZER, SIZES, network

DATA = 0.010
"""Seconds until the first rank has its batch; the last rank's takes almost twice as long."""
STAGES = ("data", "forward", "backward", "optimizer")
CHANNELS = 256
"""Channels of the SyncBatchNorm layer in the middle of the model."""
MOMENTS_SENT = 4 * (2 * CHANNELS + 4)
"""Bytes from each rank in forward: means, squared deviations and four numbers about the input, in float32."""
SUMS_SENT = 4 * 2 * CHANNELS
"""Bytes in backward: two sums for each channel."""
BUFFERS = 8 * CHANNELS + 8
"""Bytes of the layer's buffers: running mean and variance, and the count of batches."""
EXPERTS_AT, NORM_AT = 2 / 3, 1 / 2
"""Parts of the model that come before these layers."""


@dataclass(frozen=True)
class Meeting:
    """A point at which ranks exchange something."""

    letter: str
    stage: int
    """Number of the stage that it is in, counted from 1."""
    name: str
    collective: str
    nbytes: int | None
    """Bytes of the tensors; None for the place of a layer that the example does not have."""
    begin: float
    """Moment at which the last rank has come, in seconds."""
    end: float


@dataclass(frozen=True)
class TrainingStep:
    """A step on every rank, in seconds from its begin."""

    data: tuple[float, ...]
    """Moments at which ranks have their batches."""
    came: tuple[float, ...]
    """Moments at which ranks come to the first meeting, A."""
    forward: float
    """End of forward."""
    backward: float
    buckets: Overlap
    """The all-reduces, and after them the broadcast of the buffers."""
    meetings: tuple[Meeting, ...]
    """In the order of their letters."""

    @property
    def end(self) -> float:
        """Return when the optimizer has stepped."""
        return self.meetings[-1].end + OPTIMIZER


def training_step(ranks: int) -> TrainingStep:
    """Run the example."""
    all_gather, ring = build("ring_all_gather", ranks), build("ring_all_reduce", ranks)
    data = tuple(DATA * (1 + rank / ranks) for rank in range(ranks))
    came = tuple(batch + NORM_AT * FORWARD for batch in data)
    norm = max(came)
    norm_end = norm + LINK.seconds(all_gather, ranks * MOMENTS_SENT)
    experts = norm_end + (EXPERTS_AT - NORM_AT) * FORWARD
    forward = norm_end + (1 - NORM_AT) * FORWARD
    norm_back = forward + (1 - NORM_AT) * BACKWARD
    pause = LINK.seconds(ring, SUMS_SENT)
    backward = forward + BACKWARD + pause
    buckets = overlap(
        (*_filling(forward, pause), 0.0),
        (*(LINK.seconds(ring, size) for size in SIZES), LINK.seconds(build("tree_broadcast", ranks), BUFFERS)),
    )
    experts_back = forward + (1 - EXPERTS_AT) * BACKWARD
    summed = buckets.end[len(SIZES) - 1]
    meetings = (
        Meeting("A", 2, "SyncBatchNorm, in forward", "all-gather", ranks * MOMENTS_SENT, norm, norm_end),
        Meeting("B", 2, "experts (MoE), in forward", "2 all-to-alls", None, experts, experts),
        Meeting("C", 3, "gradients, bucket by bucket", "all-reduces", sum(SIZES), buckets.full[0], summed),
        Meeting("D", 3, "experts (MoE), in backward", "2 all-to-alls", None, experts_back, experts_back),
        Meeting("E", 3, "SyncBatchNorm, in backward", "all-reduce", SUMS_SENT, norm_back, norm_back + pause),
        Meeting("F", 3, "buffers", "broadcast", BUFFERS, summed, buckets.end[-1]),
    )
    return TrainingStep(data, came, forward, backward, buckets, meetings)


def _filling(forward: float, pause: float) -> list[float]:
    """Return the seconds in which each bucket fills, from the begin of the step; SyncBatchNorm stops backward once."""
    shares = [BACKWARD * size / sum(SIZES) for size in SIZES]
    filled = 0.0
    for bucket, share in enumerate(shares):
        filled += share
        if filled > (1 - NORM_AT) * BACKWARD:
            shares[bucket] += pause
            break
    return [forward + shares[0], *shares[1:]]


def stage_times(step: TrainingStep) -> list[tuple[str, float, float]]:
    """Return the name, begin and end of each stage, on the last rank; waiting for meetings is in them."""
    ends = (max(step.data), step.forward, step.end - OPTIMIZER, step.end)
    return list(zip(STAGES, (0.0, *ends), ends, strict=False))


def outcome(step: TrainingStep) -> str:
    """Say how long the step takes, and how often ranks meet."""
    if len(step.data) == 1:
        return f"One step takes {ms(step.end)}. One rank meets nobody."
    waits = step.meetings[-1].end - step.backward
    return (
        f"A step takes {ms(step.end)}. Its ranks meet at A, C, E and F: an earlier one waits up to "
        f"{ms(max(step.came) - min(step.came))} for the last at A, and all wait {ms(waits)} at the end of backward."
    )


def assumption() -> str:
    """Describe the example's numbers."""
    return (
        f"An example: forward {1000 * FORWARD:g} ms, backward {1000 * BACKWARD:g}, {network()}, one "
        f"SyncBatchNorm of {CHANNELS} channels. Ranks get their batches one after the other."
    )


ABOUT = (
    "One step of data-parallel training: each rank computes on a batch of its own, from the data to the optimizer, and "
    "all ranks meet where they need something of each other."
)
HINT = (
    "the letters: at A each rank needs the moments of all, so the red bubble is the time until the last one comes. "
    "From there on they go alike. C works beside backward. At B and D (dashed) a mixture of experts would meet, if "
    "there were one."
)


def scene(ranks: int) -> Scene:
    """Draw one frame for every stage that ends and every meeting that is over."""
    step = training_step(ranks)
    stages = ", ".join(f"{stage}: {name}" for stage, name in enumerate(STAGES, start=1))
    letters = "; ".join(f"{meeting.letter}: {meeting.name}" for meeting in step.meetings)
    reading = f"{stages}. {letters}." if ranks > 1 else f"{stages}."
    title = f"one training step, {counted(ranks, 'rank')}"
    hint = HINT if ranks > 1 else "One rank meets nobody."
    told = f"{outcome(step)} {assumption()}"
    legend = tuple((f"k{stage}", f"{stage + 1} {name}") for stage, name in enumerate(STAGES))
    plain = Scene(title, told, reading, hint=hint, about=ABOUT, legend=(*legend, *WAITING, *LATER))
    return charted(plain, [_panel(step)], _events(step))


def _panel(step: TrainingStep) -> Panel:
    ranks = len(step.data)
    rows = (*(f"rank {rank}" for rank in range(ranks)), *(["C: network"] if ranks > 1 else []))
    marks = tuple(Mark(one.end, one.letter, one.nbytes is None) for one in step.meetings if one.letter != "C")
    title = "stages 1 to 4, meetings A to F" if ranks > 1 else "stages 1 to 4"
    return Panel(title, rows, tuple(_bars(step)), (f"{ms(step.end)} in total",), marks if ranks > 1 else ())


def _bars(step: TrainingStep) -> Iterator[Bar]:
    ranks = len(step.data)
    first, norm = (one for one in step.meetings if one.letter in "AE")
    for rank, (batch, came) in enumerate(zip(step.data, step.came, strict=True)):
        yield Bar(rank, 0.0, batch, "k0", "1")
        yield Bar(rank, batch, came, "k1", "2")
        if first.begin > came:
            yield Bar(rank, came, first.begin, BUBBLE)
        yield Bar(rank, first.end, step.forward, "k1", "2")
        yield Bar(rank, step.forward, norm.begin, "k2", "3")
        yield Bar(rank, norm.end, step.backward, "k2", "3")
        if ranks > 1:
            yield Bar(rank, step.backward, step.meetings[-1].end, COMMUNICATION)
        yield Bar(rank, step.end - OPTIMIZER, step.end, "k3", "4")
    if ranks > 1:
        for bucket, (begin, end) in enumerate(zip(step.buckets.begin, step.buckets.end, strict=True)):
            yield Bar(ranks, begin, end, NETWORK, str(bucket) if bucket < len(SIZES) else "")


def _events(step: TrainingStep) -> dict[float, list[str]]:
    """Return the moments of the step."""
    several = len(step.data) > 1
    events = [(0.0, "the step begins"), (step.forward, "forward ends"), (step.backward, "backward ends")]
    events.append((step.end, "the optimizer has stepped"))
    # The first and the last are enough: the others come one after another between them.
    for rank in sorted({0, len(step.data) - 1}):
        events.append((step.data[rank], f"rank {rank} has its batch"))
    if several:
        events.append((step.came[0], "rank 0 has come to A, and waits"))
        events += [(full, f"bucket {bucket} is full") for bucket, full in enumerate(step.buckets.full[: len(SIZES)])]
        events += [(end, f"bucket {bucket} is reduced") for bucket, end in enumerate(step.buckets.end[: len(SIZES)])]
        events += [(meeting.end, _met(meeting)) for meeting in step.meetings if meeting.letter != "C"]
    found: dict[float, list[str]] = {}
    for moment, event in events:
        found.setdefault(moment, []).append(event)
    return found


def _met(meeting: Meeting) -> str:
    if meeting.nbytes is None:
        return f"{meeting.letter}: here {meeting.name} would meet, {meeting.collective}"
    return f"{meeting.letter}: {meeting.name}, {meeting.collective} of {meeting.nbytes:,} bytes, is over"
