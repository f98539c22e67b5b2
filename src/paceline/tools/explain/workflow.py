"""A training step: its four stages on every rank, and the points where all ranks synchronize.

    1 data ──► 2 forward ──A──B──C──► 3 backward ──E──F──► G ──► 4 optimizer
                                            D: buckets, beside backward

The bytes of an exchange follow from the example's sizes, and its duration from its schedule. SyncBatchNorm's small
messages are assumed not to wait for a bucket that is being reduced.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from rich.table import Table

from paceline.comm.schedules import build
from paceline.core.messages import counted
from paceline.core.tables import new_table
from paceline.ddp.buckets import Overlap, overlap
from paceline.tools.explain.buckets import BACKWARD, BUCKETS, FORWARD, LINK, OPTIMIZER, SHARES, SIZES
from paceline.tools.explain.drawing import BUBBLE, COMMUNICATION, NETWORK, WAITING, Bar, Chart, Panel
from paceline.tools.explain.scene import Scene, figure, ms

DATA = 0.010
"""Seconds until the first rank has its batch; the last rank gets its batch after almost twice as long."""
STAGES = ("data", "forward", "backward", "optimizer")
CHANNELS = 256
"""Channels of the SyncBatchNorm layer in the middle of the model."""
MOMENTS_SENT = 4 * (2 * CHANNELS + 4)
"""Bytes that each rank sends in forward: means, squared deviations and four numbers about the input, in float32."""
SUMS_SENT = 4 * 2 * CHANNELS
"""Bytes reduced in backward: two sums for each channel."""
BUFFERS = 8 * CHANNELS + 8
"""Bytes of the layer's buffers: running mean and variance, and the number of batches."""
EXPERTS_AT, NORM_AT = 2 / 3, 1 / 2
"""Share of the model that comes before each of these layers."""
ABOUT = "One step of data-parallel training: each rank computes on its own batch. Letters mark where all synchronize."
HINT = (
    "the letters: the red bubble lasts until the last rank reaches A, where each rank needs the moments of all. "
    "D overlaps with backward. Dashed: layers that this model does not have. Ranks would synchronize at B and E for a "
    "mixture of experts, and at C for a softmax whose classes are divided over the ranks."
)
ASSUMPTION = (
    f"An example: forward {1000 * FORWARD:g} ms, backward {1000 * BACKWARD:g}, {BUCKETS}, one SyncBatchNorm of "
    f"{CHANNELS} channels. Ranks get their batches one after another."
)


class Meeting(NamedTuple):
    """An exchange between all ranks."""

    letter: str
    stage: str
    name: str
    collective: str
    nbytes: int
    """Bytes of the tensors; 0 for a layer that the example does not have."""
    begin: float
    """When the last rank arrives, in seconds."""
    end: float


class TrainingStep(NamedTuple):
    """A step on every rank, in seconds from its start."""

    data: list[float]
    """When each rank gets its batch."""
    came: list[float]
    """When each rank reaches A, the first exchange."""
    forward: float
    """End of forward."""
    backward: float
    buckets: Overlap
    """The all-reduces, followed by the broadcast of the buffers."""
    meetings: list[Meeting]
    """In the order of their letters."""
    end: float


def training_step(ranks: int) -> TrainingStep:
    """Compute the example's timeline."""
    all_gather, ring = build("ring_all_gather", ranks), build("ring_all_reduce", ranks)
    data = [DATA * (1 + rank / ranks) for rank in range(ranks)]
    came = [batch + NORM_AT * FORWARD for batch in data]
    norm = max(came)
    norm_end = norm + LINK.seconds(all_gather, ranks * MOMENTS_SENT)
    experts = norm_end + (EXPERTS_AT - NORM_AT) * FORWARD
    forward = norm_end + (1 - NORM_AT) * FORWARD
    norm_back, experts_back = (forward + (1 - at) * BACKWARD for at in (NORM_AT, EXPERTS_AT))
    pause = LINK.seconds(ring, SUMS_SENT)
    # SyncBatchNorm's exchange in backward delays the bucket that is being filled.
    shares = list(SHARES)
    paused = next(bucket for bucket, end in enumerate(accumulate(SHARES)) if end > (1 - NORM_AT) * BACKWARD)
    shares[paused] += pause
    buckets = overlap(
        (forward + shares[0], *shares[1:], 0.0),
        (*(LINK.seconds(ring, size) for size in SIZES), LINK.seconds(build("tree_broadcast", ranks), BUFFERS)),
    )
    summed, moments = buckets.end[len(SIZES) - 1], ranks * MOMENTS_SENT
    rest, norm_back_end = "backward", norm_back + pause
    meetings = [
        Meeting("A", "forward", "SyncBatchNorm, in forward", "all-gather", moments, norm, norm_end),
        Meeting("B", "forward", "experts (MoE), in forward", "2 all-to-alls", 0, experts, experts),
        Meeting("C", "forward", "softmax over divided classes", "2 all-reduces", 0, forward, forward),
        Meeting("D", rest, "gradients, bucket by bucket", "all-reduces", sum(SIZES), buckets.full[0], summed),
        Meeting("E", rest, "experts (MoE), in backward", "2 all-to-alls", 0, experts_back, experts_back),
        Meeting("F", rest, "SyncBatchNorm, in backward", "all-reduce", SUMS_SENT, norm_back, norm_back_end),
        Meeting("G", rest, "buffers", "broadcast", BUFFERS, summed, buckets.end[-1]),
    ]
    end = buckets.end[-1] + OPTIMIZER
    return TrainingStep(data, came, forward, forward + BACKWARD + pause, buckets, meetings, end)


def outcome(step: TrainingStep) -> str:
    """Describe how long the step takes, and where ranks wait."""
    if len(step.data) == 1:
        return f"The step takes {ms(step.end)}. A single rank never waits."
    waits = step.meetings[-1].end - step.backward
    return (
        f"The step takes {ms(step.end)}. Its ranks synchronize at A, D, F and G: at A, the first rank waits "
        f"{ms(max(step.came) - min(step.came))} for the last, and all wait {ms(waits)} at the end of backward."
    )


def scenes(ranks: int) -> list[Scene]:
    """Draw a frame at the end of every stage and of every exchange."""
    step = training_step(ranks)
    names, marks = [f"rank {rank}" for rank in range(ranks)], list[tuple[float, str, str]]()
    reading = ", ".join(f"{stage}: {name}" for stage, name in enumerate(STAGES, start=1)) + "."
    if ranks > 1:
        names.append("D: network")
        letters = ((item, "way" if item.nbytes else "elsewhere") for item in step.meetings if item.letter != "D")
        marks = [(item.end, item.letter, kind) for item, kind in letters]
        reading += f" {'; '.join(f'{item.letter}: {item.name}' for item in step.meetings)}."
    panel = Panel("stages and exchanges", names, list(_bars(step)), [f"{ms(step.end)} in total"], marks)
    chart = Chart([panel], "time since the step began (ms)")
    title, summary = f"one training step, {counted(ranks, 'rank')}", f"{outcome(step)} {ASSUMPTION}"
    legend = [*((f"k{stage}", f"{stage + 1} {name}") for stage, name in enumerate(STAGES)), *WAITING]
    frames, hint = chart.frames(_events(step)), HINT if ranks > 1 else "A single rank never waits."
    return [Scene(title, ABOUT, summary, reading, hint, frames, chart.still(), _table(step, title), legend=legend)]


def _bars(step: TrainingStep) -> Iterator[Bar]:
    ranks = len(step.data)
    first, norm = (meeting for meeting in step.meetings if meeting.letter in "AF")
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


def _events(step: TrainingStep) -> Iterator[tuple[float, str]]:
    ranks = len(step.data)
    yield from ((0.0, "the step begins"), (step.end, "the optimizer has stepped"))
    yield from ((step.forward, "forward ends"), (step.backward, "backward ends"))
    # Only the first and the last rank; the other ranks get their batches in between.
    for rank in sorted({0, ranks - 1}):
        yield step.data[rank], f"rank {rank} has its batch"
    if ranks == 1:
        return
    yield step.came[0], "rank 0 reaches A and waits"
    for bucket in range(len(SIZES)):
        yield step.buckets.full[bucket], f"bucket {bucket} is full"
        yield step.buckets.end[bucket], f"bucket {bucket} is reduced"
    for item in step.meetings:
        if not item.nbytes:
            yield item.end, f"{item.letter}: {item.name}, {item.collective}, not in this model"
        elif item.letter != "D":
            yield item.end, f"{item.letter}: {item.name}, {item.collective} of {item.nbytes:,} bytes, is done"


def _table(step: TrainingStep, title: str) -> Table:
    """Show when the stages begin and end, and the data that ranks exchange at each synchronization."""
    caption = f"{outcome(step)} {ASSUMPTION} Times are in ms; those of stages are the last rank's."
    texts = ("", "what", "exchange")
    table = new_table(
        ["", "what", "from", "to", "exchange"], title=title, caption=caption, words=texts, wraps=texts[1:]
    )
    ends = (0.0, max(step.data), step.forward, step.end - OPTIMIZER, step.end)
    for number, stage in enumerate(STAGES):
        table.add_row(str(number + 1), stage, figure(ends[number]), figure(ends[number + 1]))
        for item in step.meetings if len(step.data) > 1 else ():
            if item.stage == stage:
                sent = f"{item.nbytes:,} bytes" if item.nbytes else "not in this model"
                table.add_row(
                    item.letter, item.name, figure(item.begin), figure(item.end), f"{item.collective}, {sent}"
                )
    return table
