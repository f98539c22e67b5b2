"""``paceline explain workflow|bubble|reduce``: what is drawn of a training step is what its functions compute."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from test_explain import CONTRAST, printed, words_box

from browser import run_in_page
from paceline.ddp.options.buckets import MIB
from paceline.nn import SyncBatchNorm
from paceline.nn.moments import pack
from paceline.profiler.analysis.step_breakdown import find_bubbles
from paceline.profiler.records.rank_file import RankRecord
from paceline.profiler.records.steps import Meeting, Step
from paceline.tools.explain.explain_command import scenes
from paceline.tools.explain.page import page
from paceline.tools.explain.pictures import bubble, gantt, two_ways, workflow
from paceline.tools.explain.pictures.scene import MOST_RANKS, Scene
from paceline.tools.explain.pictures.timeline import BACKWARD, FORWARD, OPTIMIZER, SIZES, example

TIMELINES = ("workflow", "bubble")
RANKS = [2, 3, 4, 8, MOST_RANKS]


def widths(scene: Scene, kind: str) -> float:
    """The widths of all bars of `kind` in the finished picture, together."""
    return sum(map(float, re.findall(rf'width="([\d.]+)" height="[\d.]+" rx="2" class="{kind}"', str(scene.still))))


@pytest.mark.parametrize("ranks", RANKS)
def test_bubbles_are_those_that_the_profiler_would_find(ranks: int) -> None:
    records = [
        RankRecord(rank, ranks, ranks, "", "", "cpu", 1, 1, 0, groups={"world": list(range(ranks))})
        for rank in range(ranks)
    ]
    for case in (*bubble.late_rank(ranks), *bubble.accumulation(ranks)):
        steps: list[Step | None] = []
        for rank in range(ranks):
            meetings = [Meeting("world", met.came[rank], met.end) for met in case.meetings]
            steps.append(Step(0, "plain", 0.0, case.length, {}, meetings))
        found = [sum(causes.values()) for causes in find_bubbles(steps, records)]
        assert found == pytest.approx(case.bubbles)


@pytest.mark.parametrize("ranks", RANKS)
def test_computing_and_both_kinds_of_waiting_make_up_the_step(ranks: int) -> None:
    full = FORWARD + BACKWARD
    for case in bubble.late_rank(ranks)[:2]:
        for rank, waits in enumerate(case.bubbles):
            work = full * (bubble.LATE_WORK if rank == bubble.LATE else 1)
            assert work + waits + case.communication + OPTIMIZER == pytest.approx(case.length)
    for case in bubble.accumulation(ranks):
        late = [sum(micro % ranks == rank for micro in range(bubble.MICRO_BATCHES)) for rank in range(ranks)]
        for rank, waits in enumerate(case.bubbles):
            work = full * (bubble.MICRO_BATCHES + (bubble.LATE_WORK - 1) * late[rank])
            assert work + waits + case.communication + OPTIMIZER == pytest.approx(case.length)


@pytest.mark.parametrize("ranks", RANKS)
def test_bandwidth_shortens_no_bubble_and_equal_work_ends_it(ranks: int) -> None:
    late, fast, equal = bubble.late_rank(ranks)
    # By hand: half of 75 + 150 ms more.
    assert late.bubbles == pytest.approx([0.0 if rank == bubble.LATE else 0.1125 for rank in range(ranks)])
    assert fast.bubbles == late.bubbles
    assert fast.communication < 0.6 * late.communication
    assert equal.bubbles == (0.0,) * ranks
    assert equal.length < late.length


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_meet_once_wait_for_the_largest_sum_alone(ranks: int) -> None:
    each, once = bubble.accumulation(ranks)
    late = [sum(micro % ranks == rank for micro in range(bubble.MICRO_BATCHES)) for rank in range(ranks)]
    assert each.bubbles == pytest.approx([0.1125 * (bubble.MICRO_BATCHES - times) for times in late])
    assert once.bubbles == pytest.approx([0.1125 * (max(late) - times) for times in late], abs=1e-8)
    assert once.communication == pytest.approx(each.communication / bubble.MICRO_BATCHES, rel=0.3)


@pytest.mark.parametrize("ranks", [2, 4, MOST_RANKS])
def test_red_and_grey_bars_are_as_long_as_the_waiting(ranks: int) -> None:
    for scene, cases in zip(bubble.scenes(ranks), (bubble.late_rank(ranks), bubble.accumulation(ranks)), strict=True):
        unit = gantt.WIDE / max(case.length for case in cases)
        assert widths(scene, "bubble") == pytest.approx(unit * sum(sum(case.bubbles) for case in cases), rel=1e-3)
        waits = ranks * sum(case.communication for case in cases)
        assert widths(scene, "wait") == pytest.approx(unit * waits, rel=1e-3)


@pytest.mark.parametrize("what", TIMELINES)
@pytest.mark.parametrize("ranks", [1, 2, 4, MOST_RANKS])
def test_the_cursor_goes_through_no_words_and_every_frame_says_what_happens(what: str, ranks: int) -> None:
    for scene in scenes(what, ranks):
        assert all(frame.caption for frame in scene.frames)
        for frame in scene.frames:
            tree = ElementTree.fromstring(f"<svg>{frame.drawing}</svg>")
            words = [(words_box(one), one.text) for one in tree.iter("text")]
            [cursor] = [one for one in tree.iter("path") if one.get("class") == "now"]
            pieces = re.findall(r"M([\d.]+),([\d.]+) V([\d.]+)", str(cursor.get("d")))
            assert pieces
            for x, top, bottom in ((float(part) for part in piece) for piece in pieces):
                for (left, high, right, low), said in words:
                    assert not (left < x < right and top < low and high < bottom), (frame.title, said)


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
    assert all((meeting.nbytes is None) == ("MoE" in meeting.name) for meeting in step.meetings)
    assert last.begin == step.buckets.end[len(SIZES) - 1] <= last.end == step.end - OPTIMIZER
    alone = max(step.data) + FORWARD + BACKWARD + OPTIMIZER
    pauses = sum(meeting.end - meeting.begin for meeting in step.meetings if "SyncBatchNorm" in meeting.name)
    assert step.end == pytest.approx(alone + pauses + (last.end - step.backward))
    assert widths(workflow.scene(ranks), "bubble") == pytest.approx(
        gantt.WIDE * sum(first.begin - came for came in step.came) / step.end, rel=1e-3
    )


def test_gradients_of_the_workflow_wait_as_in_bucket_overlap() -> None:
    step, of = workflow.training_step(4), example(4)
    pause = next(meeting.end - meeting.begin for meeting in step.meetings if meeting.letter == "E")
    summed = step.buckets.end[len(SIZES) - 1] - step.forward
    assert of.when_full.end[-1] <= summed <= of.when_full.end[-1] + pause + 1e-9


@pytest.mark.parametrize("ranks", RANKS)
def test_bytes_of_both_ways_are_those_by_hand(ranks: int) -> None:
    dp, ddp = two_ways.both(ranks)
    weights, others = sum(SIZES), ranks - 1
    image, output = 16 * 3 * 224 * 224 * 4, 16 * 1000 * 4
    sent, received = dp.moved()
    assert (sent[0], received[0]) == (others * (image + weights + output), others * (output + weights))
    assert sent[1:] == [output + weights] * others
    assert received[1:] == [image + weights + output] * others
    for moved in ddp.moved():
        assert moved == pytest.approx([2 * others / ranks * weights] * ranks)
    for way in (dp, ddp):
        for stage in way.stages:
            assert sum(stage.sent) == pytest.approx(sum(stage.received))
            assert (sum(stage.sent) > 0) == bool(stage.moves)


@pytest.mark.parametrize("ranks", [1, 2, 4, MOST_RANKS])
def test_frames_of_both_ways_show_who_holds_what_and_the_bytes_until_then(ranks: int) -> None:
    for way, scene in zip(two_ways.both(ranks), scenes("reduce", ranks), strict=True):
        for number, (stage, frame) in enumerate(zip(way.stages, scene.frames, strict=True)):
            tree = ElementTree.fromstring(f"<svg>{frame.drawing}</svg>")
            drawn = [str(one.get("href")).split("-")[1] for one in tree.iter("use")]
            held = [".".join(map(str, terms)) for (row, _), terms in stage.held.items() if row != two_ways.MODEL]
            assert sorted(drawn) == sorted(held)
            assert len(re.findall('class="flight"', frame.moving)) == len(stage.moves)
            said = [str(one.text) for one in tree.iter("text")]
            until = [f"{nbytes / MIB:,.1f}" for moved in way.moved(number) for nbytes in moved]
            assert [one for one in said if re.fullmatch(r"[\d,]+\.\d", one)] == until


def test_after_the_step_every_rank_has_all_gradients_and_dataparallels_replicas_are_gone() -> None:
    dp, ddp = two_ways.both(4)
    everyone = (0, 1, 2, 3)
    assert dp.stages[-1].held == {(two_ways.MODEL, 0): (0,), (two_ways.GRADIENTS, 0): everyone}
    assert all(ddp.stages[-1].held[row, rank] == everyone for row in two_ways.BUCKET_ROWS for rank in everyone)


def words_of(what: str) -> str:
    """What the tables print for 4 ranks, with every line break and gap a single space."""
    return " ".join(printed(what, 4, width=200).split())


def test_tables_say_what_the_pictures_say() -> None:
    late = bubble.late_rank(4)[0]
    said = words_of("bubble")
    assert bubble.late_outcome(4) in said
    assert f"{1000 * late.bubbles[0]:.1f}" in said
    said = words_of("workflow")
    assert workflow.outcome(workflow.training_step(4)) in said
    assert said.count("not in this model") == 2
    said = words_of("reduce")
    assert all(two_ways.outcome(way) in said for way in two_ways.both(4))


BARS = (
    CONTRAST.replace("[0, 1, 2, 3, 4, 5, 6, 7]", "[0, 1, 2]")
    + """
report({overlapping: [...document.querySelectorAll(".frame.shown .heading")].map((one) => one.getBoundingClientRect())
  .filter((one, index, all) => all.some((other, place) => place < index && other.right > one.left
    && one.right > other.left && other.bottom > one.top && one.bottom > other.top)).length});
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "theme"), [("workflow", "light"), ("bubble", "dark"), ("reduce", "dark")])
def test_pages_of_steps_can_be_read(what: str, theme: str, tmp_path: Path) -> None:
    option = f"--blink-settings=preferredColorScheme={int(theme == 'light')}"
    made = page(scenes(what, 4))
    seen, headings = run_in_page(made, BARS, tmp_path, option, "--window-size=1200,900", milliseconds=2_000)
    assert seen.pop("wide")
    assert (seen.pop("ground") > 0.5) == (theme == "light")
    assert {name: ratio for name, ratio in seen.items() if ratio < 4.5} == {}
    assert headings == {"overlapping": 0}
