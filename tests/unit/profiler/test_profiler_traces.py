"""The merged trace for Perfetto, overlap, and spans on a device clock."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from insides import (
    BACKWARD,
    FORWARD,
    LAG,
    LAUNCH,
    MEETING,
    OPTIMIZER,
    REDUCE,
    SENT,
    WAIT,
    DeviceTimes,
    Facts,
    OperatorTable,
    Recorder,
    Span,
    Step,
    bucket_times,
    detailed_steps,
    operators_in,
    overlap_of_kernels,
    read_trace,
    reduced_and_hidden,
    shared,
    trace_events,
    trace_of,
)
from paceline import DistributedDataParallel, World
from paceline.profiler import profile
from profile_records import cut, records
from ranks import run_ranks

Event = dict[str, Any]
SLACK_US = 20.0
"""Maximum difference of the clocks after their alignment."""


def deep(world: World, folder: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(192, 192), nn.ReLU())])
    model = DistributedDataParallel(net, bucket_cap_mb=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with profile(folder):
        for _ in range(13):
            optimizer.zero_grad()
            model(torch.randn(64, 192)).square().mean().backward()
            optimizer.step()


def lanes_of(events: list[Event]) -> dict[Any, list[Event]]:
    lanes: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append(event)
    return lanes


def crossing(events: list[Event]) -> list[tuple[Event, Event]]:
    """Return the pairs within a lane that overlap without nesting."""
    pairs = []
    for lane in lanes_of(events).values():
        around: list[Event] = []
        for event in sorted(lane, key=lambda event: (event["ts"], -event["dur"])):
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"] + 1e-3:
                around.pop()
            if around and event["ts"] + event["dur"] > around[-1]["ts"] + around[-1]["dur"] + 1e-3:
                pairs.append((around[-1], event))
            around.append(event)
    return pairs


def read(file: Path) -> Any:
    return json.loads(file.read_text("utf-8"))


@pytest.mark.slow
def test_traces_nest_agree_and_share_a_clock(tmp_path: Path) -> None:
    ranks = 2
    run_ranks(ranks, deep, tmp_path, backend="gloo")
    merged = read(tmp_path / "trace.json")["traceEvents"]
    assert not crossing(merged)
    processes = [event["pid"] for event in merged if event["name"] == "process_name"]
    assert sorted(processes) == list(range(ranks)), "one row for each rank"
    assert {event["pid"] for event in merged} == set(range(ranks))
    ids = [(event["pid"], event["id"]) for event in merged if event["ph"] == "s"]
    assert len({number for _, number in ids}) == len(ids), "torch's arrows stay on their rank"
    for rank in range(ranks):
        operators_lie_in_their_phase([event for event in merged if event["pid"] == rank])

    summary = read(tmp_path / "summary.json")
    shares = summary["overlap_by_rank"].values()
    assert summary["overlap"] == pytest.approx(sum(shares) / ranks)


def operators_lie_in_their_phase(events: list[Event]) -> None:
    phases: dict[str, list[tuple[float, float]]] = defaultdict(list)
    operators: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans = phases if event["cat"] == "paceline" else operators
            spans[event["name"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(operators["aten::addmm"]) == 3 * 5, "of the traced steps"
    for name, phase in (("aten::addmm", "forward"), ("aten::threshold_backward", "backward")):
        for begin, end in operators[name]:
            assert any(b - SLACK_US <= begin and end <= e + SLACK_US for b, e in phases[phase]), (name, begin, end)


def kernel(name: str, start: float, end: float, stream: int) -> Event:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": end - start, "args": {"stream": stream}}


def test_gpu_overlap_is_computed_from_its_kernels(tmp_path: Path) -> None:
    events = [
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0.0, 40.5, 20),
        kernel("ampere_sgemm_128x64_nn", 10.0, 20.0, 7),
        kernel("vectorized_elementwise_kernel", 15.0, 30.25, 9),
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 30.0, "dur": 9.0, "args": {"stream": 7}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 100.0, "tid": 1},
    ]
    assert overlap_of_kernels(events) == pytest.approx(20.25 / 40.5)
    assert overlap_of_kernels(events[1:]) is None
    made = records(2)
    made[0].steps[9] = Step(**vars(made[0].steps[9]) | {"kind": "traced"})
    trace_of(tmp_path, 0).parent.mkdir()
    trace_of(tmp_path, 0).write_text(json.dumps({"baseTimeNanoseconds": 5, "traceEvents": events}))
    facts = Facts(made, operators_in([read_trace(trace_of(tmp_path, record.rank)) for record in made], made))
    assert facts.overlap == {0: pytest.approx(0.5)}


def step(spans: list[Span]) -> Step:
    return Step(3, "detailed", 0.0, 1.0, {}, [], 1, 1, None, spans)


def test_reduction_work_of_a_rank_hides_nothing() -> None:
    """In shared memory a rank reduces its part on the core that computes, which is not overlap."""
    spans = [
        Span(FORWARD, 0.0, 0.2),
        Span(BACKWARD, 0.2, 0.7),
        Span(LAUNCH, 0.3, 0.4, 0),
        Span(SENT, 0.35, 0.35, 0),
        Span(REDUCE, 0.5, 0.6),
        Span(WAIT, 0.65, 0.7),
        Span(OPTIMIZER, 0.8, 0.9),
    ]
    steps = [step(spans), step([s for s in spans if s.label != LAUNCH] + [Span(LAUNCH, 0.1, 0.2, 0)])]
    [first, _] = reduced_and_hidden(steps, bucket_times(steps, [8]))
    assert first == pytest.approx((0.25, 0.1)), "from the start of sending, not the end of the launch"


def test_crossing_spans_nest_in_their_lane_and_buckets_are_asynchronous() -> None:
    """The wrapper's and the profiler's spans of an optimizer step begin in hooks, and end in the same order."""
    made = records(2, buckets=[100, 200, 300])
    for record in made:
        for current in record.steps:
            last = max(span.end for span in current.spans)
            current.spans.append(Span(OPTIMIZER, last - 0.003, last + 0.00001))
            current.spans[:] = [
                Span(span.label, span.start - 0.008, span.end - 0.008, span.bucket) if span.label == LAUNCH else span
                for span in current.spans
            ]
    assert len(detailed_steps(made)) == 5
    events = list(trace_events(Facts(made, OperatorTable(), [{}] * 2)))
    assert not crossing(events)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"} <= named
    buckets = [event for event in events if event["ph"] in "be"]
    assert [event["ph"] for event in buckets] == ["b", "e"] * (2 * 5 * 3)
    assert len({event["id"] for event in buckets}) == 2 * 5 * 3
    assert all(begin["ts"] <= end["ts"] for begin, end in zip(buckets[::2], buckets[1::2], strict=True))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([], [], 0),
        ([(0, 10)], [(2, 3), (5, 20), (5, 6)], 6),
        ([(5, 6), (0, 2), (1, 4)], [(3, 9)], 2),
        ([(0, 1), (1, 2)], [(0, 2)], 2),
        ([(0, 1)], [(1, 2)], 0),
    ],
)
def test_shared_time_is_the_intersection_of_both_sets(first: Any, second: Any, expected: float) -> None:
    assert shared(first, second) == shared(second, first) == expected


# -- spans on a simulated device that reaches events after the host records them ---------------------------------------


@dataclass
class DeviceEvent:
    """The device time in seconds when the device reached the event."""

    time: float

    def elapsed_time(self, other: DeviceEvent) -> float:
        return 1000 * (other.time - self.time)

    def synchronize(self) -> None:
        """Return immediately; the event has passed."""


class SimulatedTimes(DeviceTimes):
    """Times on a simulated device, whose clock the test advances by the queued work."""

    clock = 5.0

    def event(self) -> DeviceEvent:
        return DeviceEvent(self.clock)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> SimulatedTimes:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _device: None)
    return SimulatedTimes(torch.device("cpu"))


def run_step(times: SimulatedTimes, log: Recorder, number: int) -> list[Step]:
    """Run a step that takes no host time and 30 ms of device time, including a wait of 5 ms."""
    times.step_begins()
    with log.span(FORWARD):
        times.clock += 0.010
    with log.span(BACKWARD):
        times.clock += 0.015
        with log.span(WAIT, group="g"):
            times.clock += 0.005
    spans, log.spans = log.spans, []
    return times.step_ends(Step(number, "plain", spans[0].start, spans[-1].end, {}, [], spans=spans))


def test_steps_with_device_times_arrive_some_steps_later(times: SimulatedTimes) -> None:
    log = Recorder(on=True, make_event=times.event)
    came = [run_step(times, log, number) for number in range(20)]
    assert [len(steps) for steps in came] == [0] * LAG + [1] * (20 - LAG)
    steps = [step for steps in came for step in steps] + times.rest()
    assert [step.number for step in steps] == list(range(20))
    for step, following in pairwise(steps):
        assert step.length == pytest.approx(0.030)
        assert following.start == pytest.approx(step.end)
        seconds, meetings = cut(step.spans, step.start, step.end)
        expected = {"forward": 0.010, "backward": 0.015, MEETING: 0.005, "other": 0}
        assert {part: seconds.get(part, 0) for part in expected} == pytest.approx(expected, abs=1e-9)
        assert meetings[0].left - meetings[0].came == pytest.approx(0.005)


def test_span_without_events_uses_the_host_clock(times: SimulatedTimes) -> None:
    times.step_begins()
    mark = Span("gradient", 1.0, 1.0, 3)
    times.step_ends(Step(0, "plain", 0.0, 1.0, {}, [], spans=[mark]))
    assert times.rest()[0].spans == [mark]
    assert times.rest() == []
