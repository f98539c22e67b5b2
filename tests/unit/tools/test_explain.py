"""``paceline explain``: drawings match the schedules, torch's calls and hand calculations, and the page plays them."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from browser import run_in_page
from insides import (
    BANDWIDTH,
    BEFORE_2_13,
    KNOWN,
    LATENCY,
    MOST_RANKS,
    NAMES,
    Cell,
    Collective,
    Frame,
    Schedule,
    bubble,
    buckets,
    build,
    collectives,
    outcome,
    scenes,
    sheet,
    states,
)
from insides import scene_page as page

PICTURES = Path(__file__).parents[3] / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"
ANY_SCHEDULE = sorted(set(NAMES) - {"hierarchical_all_reduce"})


def play(schedule: Schedule, spoil: tuple[int, int, int] | None = None) -> list[torch.Tensor]:
    """Run a schedule on numbers and return each step's tensors, [rank, chunk]; rank r starts with 2^r in every chunk.

    `spoil`, given as (step, rank, chunk), invalidates that entry after that step.
    """
    now = (2 ** torch.arange(schedule.size)).unsqueeze(1).repeat(1, schedule.chunks)
    history = []
    for number, step in enumerate([(), *schedule.steps]):
        previous = now.clone()
        for transfer in step:
            part = slice(transfer.chunks.start, transfer.chunks.stop)
            came = previous[transfer.src, part]
            now[transfer.dst, part] = now[transfer.dst, part] + came if transfer.reduce else came
        if spoil is not None and spoil[0] == number:
            now[spoil[1:]] = 10**6
        history.append(now.clone())
    return history


def drawn_cells(frame: Frame, size: int, rows: int) -> list[list[int]]:
    """Return the cells of a drawing by position, [rank][row]: sums of 2^rank, or 0 if empty."""
    filled = re.findall(r'<use href="#c\d+b?-([\d.]+)-\w*" x="([\d.]+)" y="([\d.]+)"', frame.drawing.svg)
    empty = re.findall(r'<rect()(?: x="([\d.]+)") y="([\d.]+)" [^>]*class="ghost"', frame.drawing.svg)
    values = [(float(x), float(y), sum(2 ** int(rank) for rank in terms.split(".") if rank)) for terms, x, y in filled]
    by_place = sorted(values + [(float(x), float(y), 0) for _, x, y in empty])
    assert len(by_place) == size * rows
    return [[value for _, _, value in by_place[rank * rows : (rank + 1) * rows]] for rank in range(size)]


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("name", ANY_SCHEDULE)
def test_frames_match_the_schedule_run_on_numbers(name: str, size: int) -> None:
    schedule = build(name, size)
    shown = [drawn_cells(frame, size, schedule.chunks) for frame in collectives.scene(schedule).frames]
    needed = [torch.tensor(state) for state in collectives.used_later(schedule)]
    assert shown == [(state * mask).tolist() for state, mask in zip(play(schedule), needed, strict=True)]


@pytest.mark.parametrize("ranks", [1, MOST_RANKS])
@pytest.mark.parametrize("what", KNOWN)
def test_sheet_and_page_are_complete_and_offline(what: str, ranks: int) -> None:
    drawn = scenes(what, ranks)
    said = [element.text for element in ElementTree.fromstring(sheet(drawn)).iter(f"{SVG}text")]
    for scene in drawn:
        assert {scene.title, *(frame.title for frame in scene.shown or scene.frames if frame.title)} <= set(said)
        assert scene.about
    made = page(drawn)
    # Without its script, a page shows the end; the start is empty frames.
    shown = re.findall(r'<g class="frame shown" data-title="([^"]+)"', made)
    assert shown == [scene.frames[-1].title for scene in drawn]
    assert made.count('<p class="watch">') == len([scene for scene in drawn if scene.hint])
    assert set(re.findall(r"https?://[^\"' ]+", made)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|img|script src|iframe)|@import|url\((?!#tip)", made)


PLAYED = """
const section = document.querySelector("section");
const [first, back, play, next] = section.querySelectorAll("button"), slider = section.querySelector("input");
const frames = [...section.querySelectorAll("svg .frame")];
const press = (key) => document.body.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
const shown = () => frames.map((one, at) => one.checkVisibility({visibilityProperty: true}) ? at : "").join("");
const said = () => section.querySelector(".said strong").textContent;
const tell = (what) => report([what, Number(section.dataset.at), section.dataset.playing, shown()]);
const later = (ms) => new Promise((done) => setTimeout(done, ms));
(async () => {
  tell(said());
  press("Home"); tell(said());
  next.click(); report(section.querySelectorAll(".moving.shown .flight").length);
  await later(800); tell(said());
  press("ArrowRight"); press("ArrowRight"); tell("the second one does not wait for the first");
  press("End"); tell("end");
  press("ArrowLeft"); tell("back");
  press("Home"); press(" "); tell("playing");
  await later(2500); press(" "); tell("paused");
  await later(3000); tell("still paused");
  play.click();
  await later(15000); tell("played to the end");
  slider.value = 2; slider.dispatchEvent(new Event("input")); tell("slid");
})();
"""


def test_page_plays_pauses_and_steps_in_chromium(tmp_path: Path) -> None:
    assert run_in_page(page(scenes("ring", 4)), PLAYED, tmp_path, milliseconds=40_000) == [
        ["step 6 of 6: receivers copy", 6, "no", "6"],
        ["start", 0, "no", "0"],
        4,
        ["step 1 of 6: receivers add", 1, "no", "1"],
        ["the second one does not wait for the first", 2, "no", "2"],
        ["end", 6, "no", "6"],
        ["back", 5, "no", "5"],
        ["playing", 0, "yes", "0"],
        ["paused", 2, "no", "2"],
        ["still paused", 2, "no", "2"],
        ["played to the end", 6, "no", "6"],
        ["slid", 2, "no", "2"],
    ]


def printed(what: str, ranks: int, width: int = 80) -> str:
    """Return the printed tables of a subject."""
    console = Console(file=io.StringIO(), width=width)
    for table in (scene.table for scene in scenes(what, ranks) if scene.table):
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_table_names_the_ranks_in_each_sum() -> None:
    schedule = build("ring_all_reduce", 3)
    said = [re.findall(r"[·012]{3}|–", line) for line in printed("ring", 3).splitlines()]
    rows = [cells for cells in said if len(cells) == 3]
    needed = collectives.used_later(schedule)
    want = [
        ["".join(str(r) if value >> r & 1 else "·" for r in range(3)) if used else "–" for value, used in pairs]
        for state, mask in zip(play(schedule), needed, strict=True)
        for pairs in (zip(*row, strict=True) for row in zip(state.tolist(), mask, strict=True))
    ]
    assert rows == want


def test_overlap_pictures_match_the_arithmetic() -> None:
    late, early = buckets.example(4)
    assert late.full[-1] == pytest.approx(buckets.BACKWARD)
    # By hand: 25 MiB on 4 ranks are 6 messages of 6.25 MiB, which take 5.24 ms and 0.05 ms each.
    seconds = [end - begin for begin, end in zip(late.begin, late.end, strict=True)]
    assert seconds[-1] == pytest.approx(6 * (0.05e-3 + 6.25 * 2**20 / 1.25e9))
    assert late.exposed == pytest.approx(sum(seconds))
    assert early.exposed == pytest.approx(seconds[-1])
    [scene] = buckets.scenes(4)
    for way in (late, early):
        assert f"{1000 * way.end[-1]:.1f} ms in total<" in scene.shown[0].drawing.svg
    assert scene.summary == (
        "All-reduce after backward: 278.6 ms in total, 128.6 of it waiting. As buckets fill: 181.8 ms, 31.8 waiting."
    )


REFUSED: dict[str, tuple[list[str], str]] = {
    "unknown": (["foo"], "WHAT is 'foo'; choose one of collectives, ring, tree"),
    "nothing": ([], "WHAT"),
    "too many ranks": (["tree", "--ranks", "9"], "'--ranks': Input should be less than or equal to 8"),
    "suffix": (["ring", "--out", "ring.png"], "must end in .svg"),
    "no folder": (["ring", "--out", "/nowhere/ring.svg"], "cannot be written: No such file or directory"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_one_line(arguments: list[str], message: str, refusal: Any) -> None:
    assert message in refusal("explain", *arguments)


@pytest.mark.parametrize("what", KNOWN)
def test_pictures_in_the_docs_are_current(what: str) -> None:
    assert (PICTURES / f"{what}.svg").read_text("utf-8") == sheet(scenes(what, 4)), "run: make pictures"


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_command_writes_the_file(suffix: str, tmp_path: Path, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / f"ring.{suffix}"
    assert run("explain", "ring", "--ranks", "3", "--out", str(file)) == 0
    assert capsys.readouterr().out == f"wrote {file}\n"
    made: Any = {"svg": sheet, "html": page}[suffix](scenes("ring", 3))
    assert file.read_text("utf-8") == made


# -- collectives: the drawn states match the inputs and outputs of torch's calls ---------------------------------------


def numbers(cells: list[Cell], row_of: list[int]) -> torch.Tensor:
    """Return a rank's rows as numbers: 2^r + 1000 c for chunk c of rank r, 0 if empty."""
    return torch.tensor(
        [sum(2**rank + 1000 * row for rank in cell.terms) for cell, row in zip(cells, row_of, strict=True)]
    )


def letters(collective: Collective, cells: list[Cell]) -> list[int]:
    """Return the chunk in each row: the row index, or the letter in an all-to-all."""
    is_exchange = collective.schedule.result == "all-to-all"
    return [ord(cell.label[0]) - 65 if is_exchange else row for row, cell in enumerate(cells)]


def called(collective: Collective, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return this rank's result of the call shown below the picture, on the picture's data."""
    part = tensor[rank : rank + 1].clone()
    given = {"tensor": tensor, "part": part, "input": tensor, "output": torch.zeros_like(tensor)}
    name, _, arguments = collective.call.partition("(")
    name = name if hasattr(dist, name) else BEFORE_2_13[name]
    eval(f"dist.{name}({arguments}", {"dist": dist}, given)
    if collective.schedule.result == "reduce-scatter":
        return torch.zeros_like(tensor).index_put_((torch.tensor([rank]),), given["part"])
    return given["output"] if collective.schedule.result == "all-to-all" else tensor


@pytest.mark.ranks(4)
def test_picture_matches_the_torch_call() -> None:
    rank = dist.get_rank()
    for collective in collectives.collectives(4):
        start, *_, end = (state[rank] for state in states(collective.schedule))
        given = numbers(start, letters(collective, start))
        result = called(collective, given, rank)
        if collective.schedule.result != "reduce" or rank == 0:  # torch leaves the others' tensors undefined
            assert torch.equal(result, numbers(end, letters(collective, end))), collective.schedule.name


@pytest.mark.parametrize("size", [2, MOST_RANKS])
def test_bytes_and_times_match_the_cost_model(size: int) -> None:
    mib, most, share = 25.0, size.bit_length() - 1, (size - 1) / size
    laws = {
        "broadcast": (most, most, most, 1),
        "reduce": (most, most, 1, most),
        "all-reduce": (2 * (size - 1), 2 * share, 2 * share, 2 * share),
        "reduce-scatter": (size - 1, share, share, share),
        "all-gather": (size - 1, share, share, share),
        "all-to-all": (size - 1, share, share, share),
    }
    assert [collective.schedule.result for collective in collectives.collectives(size)] == list(laws)
    for collective in collectives.collectives(size):
        messages, tensors, sent, received = laws[collective.schedule.result]
        seconds = messages * LATENCY + tensors * mib * 2**20 / BANDWIDTH
        said = outcome(collective)
        assert f": {1000 * seconds:.1f} ms in {messages} step" in said
        assert f" up to {mib * sent:.4g} " in said
        assert f" up to {mib * received:.4g} MiB" in said


# -- bubble: bubbles of late ranks, compared with values computed by hand ----------------------------------------------


RANKS = [2, MOST_RANKS]


@pytest.mark.parametrize("ranks", RANKS)
def test_bubbles_are_independent_of_bandwidth_and_vanish_for_equal_work(ranks: int) -> None:
    late, fast, equal = bubble.late_rank(ranks)
    # By hand: half of the 75 + 150 ms of extra work.
    assert late.bubbles == pytest.approx([0.0 if rank == bubble.LATE else 0.1125 for rank in range(ranks)])
    assert fast.bubbles == late.bubbles
    assert fast.communication < 0.6 * late.communication
    assert equal.bubbles == [0.0] * ranks
    assert equal.length < late.length


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_synchronize_once_wait_for_the_largest_sum(ranks: int) -> None:
    each, once = bubble.accumulation(ranks)
    late = [sum(micro % ranks == rank for micro in range(bubble.MICRO_BATCHES)) for rank in range(ranks)]
    assert each.bubbles == pytest.approx([0.1125 * (bubble.MICRO_BATCHES - times) for times in late])
    assert once.bubbles == pytest.approx([0.1125 * (max(late) - times) for times in late], abs=1e-8)
    assert once.communication == pytest.approx(each.communication / bubble.MICRO_BATCHES, rel=0.3)
