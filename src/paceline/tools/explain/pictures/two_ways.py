"""One step in two ways: DataParallel, through device 0, and DistributedDataParallel, all with all.

The messages are computed: slices by :func:`paceline.nn.data_parallel.scatter`, weights and gradients by the schedules
of their collectives, and the moments at which buckets are averaged by the example of :mod:`.timeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.comm.algorithms import build
from paceline.comm.algorithms.schedule import Terms
from paceline.core.output.wording import counted
from paceline.ddp.options.buckets import MIB
from paceline.nn.data_parallel import scatter
from paceline.tools.explain.pictures.ring_exchange import traffic
from paceline.tools.explain.pictures.scene import ms
from paceline.tools.explain.pictures.timeline import SIZES, example

IMAGES, IMAGE, CLASSES = 16, (3, 224, 224), 1000
"""Images for each device, the shape of one, and the outputs for it, all in float32."""
BATCH, MODEL, OUTPUTS, OUTPUT_GRADIENTS, GRADIENTS = "batch", "weights", "outputs", "output grads", "gradients"
DP_ROWS = (BATCH, MODEL, OUTPUTS, OUTPUT_GRADIENTS, GRADIENTS)
BUCKET_ROWS = tuple(f"gradients {bucket}" for bucket in range(len(SIZES)))
DDP_ROWS = (BATCH, MODEL, OUTPUTS, *BUCKET_ROWS)

Held = dict[tuple[str, int], Terms]
"""Contents of a device in a row of the picture: whose part, or the sum of whose parts."""
Move = tuple[int, int, Terms]
"""Source, destination, and the tensor that travels between them."""


@dataclass(frozen=True)
class Stage:
    """A part of the step, with the contents of the devices after it."""

    title: str
    caption: str
    held: Held
    row: str = ""
    """The row to which tensors moved; empty if none did."""
    moves: tuple[Move, ...] = ()
    sent: tuple[float, ...] = ()
    """Bytes that each device sent."""
    received: tuple[float, ...] = ()


@dataclass(frozen=True)
class Way:
    """A step in one way."""

    title: str
    device: str
    """The word for a device: ``device`` or ``rank``."""
    rows: tuple[str, ...]
    stages: tuple[Stage, ...]
    """The first one is the state before the step."""

    @property
    def size(self) -> int:
        """Return the number of devices."""
        return len(self.stages[0].sent)

    def moved(self, until: int | None = None) -> tuple[list[float], list[float]]:
        """Return the bytes that each device has sent and received after stage `until`, by default after all."""
        stages = self.stages if until is None else self.stages[: until + 1]
        sent = [sum(bytes_of) for bytes_of in zip(*(stage.sent for stage in stages), strict=True)]
        return sent, [sum(bytes_of) for bytes_of in zip(*(stage.received for stage in stages), strict=True)]


class _Recorder:
    """Collects the stages of a way; `held` are the present contents of the devices."""

    def __init__(self, size: int, held: Held, start: str) -> None:
        self.size, self.held = size, held
        self.stages: list[Stage] = []
        self.add("start", start)

    def each(self, row: str) -> Held:
        """Return contents in which every device holds its own part of `row`."""
        return {(row, device): (device,) for device in range(self.size)}

    def add(
        self,
        title: str,
        caption: str,
        now: Held | None = None,
        row: str = "",
        moves: Sequence[Move] = (),
        moved: tuple[Sequence[float], Sequence[float]] | None = None,
    ) -> None:
        """Add a stage after which devices hold `now` as well, with the bytes that each device sends and receives."""
        self.held = {**self.held, **(now or {})}
        sent, received = moved or ([0.0] * self.size, [0.0] * self.size)
        self.stages.append(Stage(title, caption, self.held, row, tuple(moves), tuple(sent), tuple(received)))


def data_parallel(size: int) -> Way:
    """Run one step of DataParallel: one process, a thread for each device."""
    everyone, others = tuple(range(size)), range(1, size)
    out, home = [(0, other, (other,)) for other in others], [(other, 0, (other,)) for other in others]
    images, outputs = slices(size)
    weights, gradients = (
        _scaled(traffic(build(name, size)), sum(SIZES)) for name in ("linear_broadcast", "linear_reduce")
    )
    start: Held = {(BATCH, 0): everyone, (MODEL, 0): (0,)}
    run = _Recorder(size, start, "device 0 has the batch and the weights")
    run.add(
        "1 scatter", f"each other device gets its slice, {mib(max(images))}", run.each(BATCH), BATCH, out, _out(images)
    )
    copies: Held = {(MODEL, device): (0,) for device in everyone}
    told = f"each other device gets a copy of all weights, {mib(sum(SIZES))}, in every step"
    run.add("2 replicate", told, copies, MODEL, [(0, other, (0,)) for other in others], weights)
    run.add("3 forward", "a thread for each device", run.each(OUTPUTS))
    told = f"device 0 gets all outputs, {mib(max(outputs))} from each other device"
    run.add("4 gather", told, {(OUTPUTS, 0): everyone}, OUTPUTS, home, _home(outputs))
    told = f"device 0 computes the loss alone, and sends back {mib(max(outputs))} for each slice"
    run.add("5 loss", told, run.each(OUTPUT_GRADIENTS), OUTPUT_GRADIENTS, out, _out(outputs))
    run.add("6 backward", "a replica on each device", run.each(GRADIENTS))
    told = f"device 0 adds up the gradients of all replicas, {mib(sum(SIZES))} from each"
    run.add("7 reduce", told, {(GRADIENTS, 0): everyone}, GRADIENTS, home, gradients)
    # All that the replicas held goes with them; add() would keep it.
    run.held = {(GRADIENTS, 0): everyone, (MODEL, 0): (0,)}
    run.add("8 optimizer", "device 0 steps alone; the replicas are thrown away")
    return Way(f"DataParallel, {counted(size, 'device')}", "device", DP_ROWS, tuple(run.stages))


def distributed(size: int) -> Way:
    """Run one step of DistributedDataParallel: a process for each device."""
    everyone, of = tuple(range(size)), example(size)
    per_bucket = traffic(build("ring_all_reduce", size))
    neighbours = [(rank, (rank + 1) % size, (rank,)) for rank in everyone] if size > 1 else []
    weights: Held = {(MODEL, rank): (0,) for rank in everyone}
    run = _Recorder(size, weights, "every rank has the weights, since it was wrapped")
    run.add("1 data", "every rank reads its own slice", run.each(BATCH))
    run.add("2 forward", "every rank keeps its outputs, and computes its own loss", run.each(OUTPUTS))
    for bucket, (nbytes, end) in enumerate(zip(SIZES, of.when_full.end, strict=True)):
        row = BUCKET_ROWS[bucket]
        # Buckets that filled up meanwhile, in which each rank has its own gradients still.
        full = [other for other, time in enumerate(of.when_full.full) if bucket < other and time <= end]
        now: Held = {(row, rank): everyone for rank in everyone}
        for other in full:
            now.update(run.each(BUCKET_ROWS[other]))
        sends = _scaled(per_bucket, nbytes)
        told = f"{mib(nbytes)}, of which each rank sends {mib(max(sends[0]))}"
        going = "backward goes on" if end < of.when_full.full[-1] else "backward has ended"
        title = f"3 backward: bucket {bucket}"
        run.add(title, f"averaged after {ms(end)}: {told}; {going}", now, row, neighbours, sends)
    run.add("4 optimizer", "every rank steps, with the same gradients")
    return Way(f"DistributedDataParallel, {counted(size, 'rank')}", "rank", DDP_ROWS, tuple(run.stages))


def both(size: int) -> tuple[Way, Way]:
    """Run one step in each way."""
    return data_parallel(size), distributed(size)


def slices(size: int) -> tuple[list[int], list[int]]:
    """Return the bytes of each device's slice of the batch, and of its outputs."""
    # On the meta device, because only the shapes of the slices matter.
    batch = torch.empty(IMAGES * size, *IMAGE, device="meta")
    parts = scatter(batch, [batch.device] * size)
    return [part.nbytes for part in parts], [4 * CLASSES * len(part) for part in parts]


def mib(nbytes: float) -> str:
    """Return such as ``25.0 MiB``."""
    return f"{nbytes / MIB:,.1f} MiB"


def assumption() -> str:
    """Describe the example's numbers."""
    shape = " × ".join(map(str, IMAGE))
    return (
        f"An example: {mib(sum(SIZES))} of weights, {IMAGES} images of {shape} for each device, {CLASSES} outputs for "
        "an image, in float32. Buffers are left out."
    )


def outcome(way: Way) -> str:
    """Describe the traffic of a step."""
    if way.size == 1:
        return f"One {way.device} has nothing to send."
    sent, received = way.moved()
    if way.device == "rank":
        return (
            f"In every step each rank sends and receives {mib(sent[0])}: less than twice the gradients, however many "
            "ranks there are, and beside backward."
        )
    return (
        f"In every step device 0 sends {mib(sent[0])} and receives {mib(received[0])}: more with every device, while "
        f"each other one sends {mib(sent[1])} and receives {mib(received[1])}."
    )


def hint(way: Way) -> str:
    """Return the hint for the viewer."""
    if way.size == 1:
        return outcome(way)
    if way.device == "rank":
        return "the gradients: a bucket is averaged while backward fills the next, and all ranks send the same."
    return "device 0: all weights leave it and all gradients come to it, in every step, while the others wait."


def _scaled(tensors: tuple[Sequence[float], Sequence[float]], nbytes: int) -> tuple[list[float], list[float]]:
    sent, received = tensors
    return [nbytes * part for part in sent], [nbytes * part for part in received]


def _out(nbytes: Sequence[int]) -> tuple[list[float], list[float]]:
    """Return the traffic where device 0 sends each other device its part."""
    others = [0.0, *map(float, nbytes[1:])]
    return [sum(others), *[0.0] * (len(nbytes) - 1)], others


def _home(nbytes: Sequence[int]) -> tuple[list[float], list[float]]:
    """Return the traffic where each other device sends its part to device 0."""
    received, sent = _out(nbytes)
    return sent, received
