"""Spans on a device clock, using a simulated device that reaches events after the host records them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from paceline.core.spans import BACKWARD, FORWARD, WAIT, Recorder, Span
from paceline.profiler.measurements import LAG, DeviceTimes
from paceline.profiler.steps import MEETING, Step
from profile_records import cut


@dataclass
class Event:
    """The device time in seconds when the device reached the event."""

    time: float

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.time - self.time)

    def synchronize(self) -> None:
        """Return immediately; the event has passed."""


class SimulatedTimes(DeviceTimes):
    """Times on a simulated device, whose clock the test advances by the queued work."""

    clock = 5.0

    def event(self) -> Event:
        return Event(self.clock)


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
