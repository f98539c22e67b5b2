"""``paceline explain workflow|bubble|reduce``: what is drawn of a training step is what its functions compute."""

from __future__ import annotations

import re

import pytest
import torch

from paceline.ddp.options.buckets import MIB
from paceline.nn import SyncBatchNorm
from paceline.nn.moments import pack
from paceline.tools.explain import chart
from paceline.tools.explain.explain_command import MOST_RANKS, scenes
from paceline.tools.explain.grid import Cell
from paceline.tools.explain.scene import Scene
from paceline.tools.explain.subjects import bubble, ways, workflow
from paceline.tools.explain.subjects.buckets import BACKWARD, FORWARD, OPTIMIZER, SIZES

RANKS = [2, MOST_RANKS]


def widths(scene: Scene, kind: str) -> float:
    """The widths of all bars of `kind` in the finished picture, together."""
    drawn = scene.shown[0].drawing.svg
    return sum(map(float, re.findall(rf'width="([\d.]+)" height="[\d.]+" rx="2" class="{kind}"', drawn)))


@pytest.mark.parametrize("ranks", RANKS)
def test_bandwidth_shortens_no_bubble_and_equal_work_ends_it(ranks: int) -> None:
    late, fast, equal = bubble.late_rank(ranks)
    # By hand: half of 75 + 150 ms more.
    assert late.bubbles == pytest.approx([0.0 if rank == bubble.LATE else 0.1125 for rank in range(ranks)])
    assert fast.bubbles == late.bubbles
    assert fast.communication < 0.6 * late.communication
    assert equal.bubbles == [0.0] * ranks
    assert equal.length < late.length


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_meet_once_wait_for_the_largest_sum_alone(ranks: int) -> None:
    each, once = bubble.accumulation(ranks)
    late = [sum(micro % ranks == rank for micro in range(bubble.MICRO_BATCHES)) for rank in range(ranks)]
    assert each.bubbles == pytest.approx([0.1125 * (bubble.MICRO_BATCHES - times) for times in late])
    assert once.bubbles == pytest.approx([0.1125 * (max(late) - times) for times in late], abs=1e-8)
    assert once.communication == pytest.approx(each.communication / bubble.MICRO_BATCHES, rel=0.3)


@pytest.mark.parametrize("ranks", RANKS)
def test_red_and_grey_bars_are_as_long_as_the_waiting(ranks: int) -> None:
    for scene, cases in zip(bubble.scenes(ranks), (bubble.late_rank(ranks), bubble.accumulation(ranks)), strict=True):
        unit = chart.WIDE / max(case.length for case in cases)
        assert widths(scene, "bubble") == pytest.approx(unit * sum(sum(case.bubbles) for case in cases), rel=1e-3)
        waits = ranks * sum(case.communication for case in cases)
        assert widths(scene, "wait") == pytest.approx(unit * waits, rel=1e-3)


@pytest.mark.parametrize("what", ["bucket-overlap", "workflow", "bubble"])
def test_every_moment_of_a_timeline_says_what_happens_and_every_color_is_explained(what: str) -> None:
    for scene in scenes(what, 4):
        assert all(frame.caption for frame in scene.frames)
        bars = set(re.findall(r'rx="2" class="(\w+)"', "".join(frame.drawing.svg for frame in scene.frames)))
        explained = {kind for kind, _ in scene.legend}
        assert bars == explained or (what == "bucket-overlap" and bars == explained | {f"k{one}" for one in range(5)})


def test_what_the_workflow_sends_is_what_the_layer_sends() -> None:
    layer = SyncBatchNorm(workflow.CHANNELS)
    assert pack(torch.randn(2, workflow.CHANNELS), workflow.CHANNELS).nbytes == workflow.MOMENTS_SENT
    assert sum(buffer.nbytes for buffer in layer.buffers()) == workflow.BUFFERS


@pytest.mark.parametrize("ranks", RANKS)
def test_the_workflow_is_in_order_and_waits_only_where_ranks_meet(ranks: int) -> None:
    step = workflow.training_step(ranks)
    first, *_, last = step.meetings
    assert [meeting.letter for meeting in step.meetings] == sorted(meeting.letter for meeting in step.meetings)
    begins = [meeting.begin for meeting in step.meetings]
    assert begins == sorted(begins)
    assert first.begin == max(step.came)
    assert [meeting.letter for meeting in step.meetings if not meeting.nbytes] == ["B", "C", "E"]
    assert last.begin == step.buckets.end[len(SIZES) - 1] <= last.end == step.end - OPTIMIZER
    alone = max(step.data) + FORWARD + BACKWARD + OPTIMIZER
    pauses = sum(meeting.end - meeting.begin for meeting in step.meetings if "SyncBatchNorm" in meeting.name)
    assert step.end == pytest.approx(alone + pauses + (last.end - step.backward))
    assert widths(workflow.scenes(ranks)[0], "bubble") == pytest.approx(
        chart.WIDE * sum(first.begin - came for came in step.came) / step.end, rel=1e-3
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_bytes_of_both_ways_are_those_by_hand(ranks: int) -> None:
    dp, ddp = ways.data_parallel(ranks), ways.distributed(ranks)
    weights, others = sum(SIZES), ranks - 1
    image, output = 16 * 3 * 224 * 224 * 4, 16 * 1000 * 4
    sent, received = dp.moved(dp.stages)
    assert (sent[0], received[0]) == (others * (image + weights + output), others * (output + weights))
    assert sent[1:] == [output + weights] * others
    assert received[1:] == [image + weights + output] * others
    for moved in ddp.moved(ddp.stages):
        assert moved == pytest.approx([2 * others / ranks * weights] * ranks)


@pytest.mark.parametrize("ranks", [1, 4, MOST_RANKS])
def test_frames_of_both_ways_show_who_holds_what_and_the_bytes_until_then(ranks: int) -> None:
    for way, scene in zip(
        (ways.data_parallel(ranks), ways.distributed(ranks)), scenes("data-parallel", ranks), strict=True
    ):
        for number, (stage, frame) in enumerate(zip(way.stages, scene.frames, strict=True)):
            drawn = re.findall(r'href="#c\d+-([\d.]*)-(w?)"', frame.drawing.svg)
            held = [
                (".".join(map(str, cell.terms)), cell.label) for cell in way.held(number).values() if cell != Cell()
            ]
            assert sorted(drawn) == sorted(held)
            assert frame.moving.count('class="flight"') == len(stage.moves)
            until = [f"{nbytes / MIB:,.1f}" for moved in way.moved(way.stages[: number + 1]) for nbytes in moved]
            assert re.findall(r">([\d,]+\.\d)<", frame.drawing.svg) == until


def test_after_the_step_every_rank_has_all_gradients_and_dataparallels_replicas_are_gone() -> None:
    dp, ddp = ways.data_parallel(4), ways.distributed(4)
    everything = Cell((0, 1, 2, 3))
    kept = {place: cell for place, cell in dp.held(99).items() if cell != Cell()}
    assert kept == {(ways.WEIGHTS, 0): ways.W, (ways.GRADIENTS, 0): everything}
    assert all(ddp.held(99)[row, rank] == everything for row in ways.BUCKETS for rank in range(4))
