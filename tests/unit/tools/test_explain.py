"""``paceline explain``: what is drawn is what the schedule does, and the page plays it."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_cli import run

from browser import run_in_page
from paceline.comm.algorithms import Schedule, build
from paceline.tools.explain.explain_command import KNOWN, SCHEDULES, scenes, tables
from paceline.tools.explain.page import page
from paceline.tools.explain.pictures import ring_exchange as exchange
from paceline.tools.explain.pictures import timeline
from paceline.tools.explain.pictures.scene import MOST_RANKS, Scene
from paceline.tools.explain.sheet import sheet

DRAWN = [name for names in SCHEDULES.values() for name in names]
PICTURES = Path(__file__).parents[3] / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"


def play(schedule: Schedule, spoil: tuple[int, int, int] | None = None) -> list[torch.Tensor]:
    """What ranks hold after each step, [rank, chunk], computed with numbers: rank r begins with 2^r in every chunk.

    With `spoil`, (step, rank, chunk), that entry is made worthless after that step.
    """
    now = (2 ** torch.arange(schedule.size)).unsqueeze(1).repeat(1, schedule.chunks)
    history = []
    for number, step in enumerate([(), *schedule.steps]):
        before = now.clone()
        for transfer in step:
            part = slice(transfer.chunks.start, transfer.chunks.stop)
            came = before[transfer.src, part]
            now[transfer.dst, part] = now[transfer.dst, part] + came if transfer.reduce else came
        if spoil is not None and spoil[0] == number:
            now[spoil[1:]] = 10**6
        history.append(now.clone())
    return history


def drawn_cells(scene: Scene, size: int, chunks: int, drawing: str) -> list[list[int]]:
    """The cells of a drawing as numbers like those of :func:`play`, [rank][chunk], by where they are."""
    seen = re.findall(r'<use href="#c\d+-([\d.]+)" x="([\d.]+)" y="([\d.]+)"', drawing)
    assert len(seen) == size * chunks
    by_place = sorted((float(x), float(y), sum(2 ** int(rank) for rank in ranks.split("."))) for ranks, x, y in seen)
    values = [value for _, _, value in by_place]
    return [values[rank * chunks : (rank + 1) * chunks] for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, MOST_RANKS])
@pytest.mark.parametrize("name", DRAWN)
def test_frames_show_what_ranks_hold_when_the_schedule_is_run_with_numbers(name: str, size: int) -> None:
    schedule = build(name, size)
    scene = exchange.scene(schedule)
    shown = [drawn_cells(scene, size, schedule.chunks, frame.drawing) for frame in scene.frames]
    assert shown == [state.tolist() for state in play(schedule)]


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("name", [*DRAWN, "tree_reduce", "ring_reduce_scatter"])
def test_what_is_drawn_pale_can_be_spoilt_and_nothing_else(name: str, size: int) -> None:
    schedule = build(name, size, root=0)
    result = [
        (rank, chunk)
        for rank in range(size)
        for chunk in range(schedule.chunks)
        if {"reduce": rank == 0, "reduce-scatter": rank == chunk}.get(schedule.result, True)
    ]
    want = [play(schedule)[-1][place] for place in result]
    for number, state in enumerate(exchange.used_later(schedule)):
        for rank, row in enumerate(state):
            for chunk, needed in enumerate(row):
                final = play(schedule, (number, rank, chunk))[-1]
                assert ([final[place] for place in result] != want) == needed, (number, rank, chunk)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ways_that_would_cross_get_lanes_of_their_own(size: int) -> None:
    for step in build("halving_doubling_all_reduce", size).steps:
        taken = [(chunk, lane, *sorted((one.src, one.dst))) for (one, chunk), lane in exchange.lanes(step).items()]
        assert len(taken) == sum(len(one.chunks) for one in step)
        for chunk, lane, left, right in taken:
            for other in taken:
                if (chunk, lane) == other[:2] and (left, right) != other[2:] and right - left > 1 < other[3] - other[2]:
                    assert right < other[2] or other[3] < left


def test_what_flies_goes_from_its_source_to_its_destination() -> None:
    schedule = build("ring_all_reduce", 4)
    scene = exchange.scene(schedule)
    place = {rank: exchange.Board(schedule).at(rank, 0)[0] for rank in range(4)}
    for frame, step in zip(scene.frames[1:], schedule.steps, strict=True):
        ways = re.findall(r'--dx: (-?[\d.]+)px"><use href="#[^"]+" x="([\d.]+)"', frame.moving)
        assert [(float(x), float(x) + float(dx)) for dx, x in ways] == [(place[t.src], place[t.dst]) for t in step]


def test_the_cost_below_a_picture_is_the_rings_law() -> None:
    for size in (2, 3, 5, 8):
        said = exchange.scene(build("ring_all_reduce", size)).summary
        steps, tensors = re.findall(r"([\d.]+) steps; every rank sends and receives ([\d.]+) times", said)[0]
        assert (int(steps), float(tensors)) == (2 * (size - 1), pytest.approx(2 * (size - 1) / size, rel=1e-3))


@pytest.mark.parametrize("ranks", [1, 4, MOST_RANKS])
@pytest.mark.parametrize("what", KNOWN)
def test_a_sheet_is_well_formed_and_shows_every_step(what: str, ranks: int) -> None:
    tree = ElementTree.fromstring(sheet(scenes(what, ranks)))
    assert tree.tag == f"{SVG}svg"
    said = [element.text for element in tree.iter(f"{SVG}text")]
    for scene in scenes(what, ranks):
        assert scene.title in said
        assert scene.still is not None or {frame.title for frame in scene.frames} <= set(said)


@pytest.mark.parametrize("ranks", [2, 5, MOST_RANKS])
def test_every_player_starts_with_a_hint_that_is_true(ranks: int) -> None:
    for what in KNOWN:
        made = page(scenes(what, ranks))
        assert made.count('<p class="watch">') == len(scenes(what, ranks))
    ring = build("ring_all_reduce", ranks)
    step, rank = re.findall(r"complete on rank (\d+) after step (\d+)", exchange.scene(ring).hint)[0][::-1]
    whole = 2**ranks - 1
    held = [state[:, 0].tolist() for state in play(ring)]
    assert held[int(step)][int(rank)] == whole
    assert whole not in held[int(step) - 1]


def test_one_rank_has_no_hint_of_messages() -> None:
    assert [scene.hint for scene in scenes("ring", 1)] == [""]
    assert '<p class="watch">' not in page(scenes("ring", 1))


@pytest.mark.parametrize("ranks", [9, MOST_RANKS])
@pytest.mark.parametrize("what", list(SCHEDULES))
def test_with_many_ranks_a_cell_still_says_in_a_number_what_it_holds(what: str, ranks: int) -> None:
    # Beyond 8 ranks cells had stripes and no number, although the text above spoke of numbers.
    for scene in scenes(what, ranks):
        assert scene.shared
        for name, drawing in scene.shared.items():
            terms = name.split("-")[1].split(".")
            said = [one.text for one in ElementTree.fromstring(drawing).iter("text")]
            assert said == [str(len(terms))]
        assert "how many" in scene.reading


LEGIBLE = """
report([...document.querySelectorAll(".stage")].map((stage) => {
  const picture = [...stage.querySelectorAll("svg")].find((one) => one.checkVisibility());
  const edges = picture.getBoundingClientRect(), scale = edges.width / picture.viewBox.baseVal.width;
  const words = [...picture.querySelectorAll(".frame.shown text")].map((one) => ({
    said: one.textContent, size: scale * parseFloat(getComputedStyle(one).fontSize), box: one.getBoundingClientRect(),
  }));
  const meets = (one, other) => one.left + 0.5 < other.right && other.left + 0.5 < one.right
    && one.top + 3 < other.bottom && other.top + 3 < one.bottom;  // the box of a line is higher than its letters
  return {
    smallest: Math.min(...words.map((one) => one.size)),
    overlapping: words.filter((one, index) => words.some((other, place) => place < index && meets(one.box, other.box)))
      .map((one) => one.said),
    cut: words.filter(({box}) => box.left < edges.left || box.right > edges.right).map((one) => one.said),
    whole: document.documentElement.scrollWidth <= innerWidth,
    scrolls: stage.scrollWidth > stage.clientWidth,
    opened: picture.querySelectorAll(".frame").length - 1 === Number(stage.parentElement.dataset.at),
  };
}));
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "width", "ranks"),
    [
        *((what, 400, ranks) for what in KNOWN for ranks in (4, MOST_RANKS)),
        ("ring", 1000, 8),
        ("reduce", 1000, 8),
        ("collectives", 1400, MOST_RANKS),
    ],
)
def test_a_page_fits_any_window_and_its_words_can_be_read(what: str, width: int, ranks: int, tmp_path: Path) -> None:
    # On a phone pictures were cut off, and before that they shrank: 16 ranks had words of two pixels.
    made = page(scenes(what, ranks))
    [seen] = run_in_page(made, LEGIBLE, tmp_path, f"--window-size={width},900", milliseconds=500)
    assert len(seen) == len(scenes(what, ranks))
    for one in seen:
        assert one.pop("smallest") >= 7.5
        assert one == {"overlapping": [], "cut": [], "whole": True, "scrolls": False, "opened": True}


@pytest.mark.parametrize("what", KNOWN)
def test_a_page_opens_at_the_end_without_its_script_too(what: str) -> None:
    # It opened at the start: empty frames, which said nothing of what is explained.
    made = page(scenes(what, 4))
    shown = re.findall(r'<g class="frame shown" data-title="([^"]+)"', made)
    assert shown == [scene.frames[-1].title for scene in scenes(what, 4) for _ in ("large", "small")]


@pytest.mark.parametrize("what", KNOWN)
def test_a_page_refers_to_no_other_page_and_explains_every_colour(what: str) -> None:
    # "buckets and links as in bucket-overlap" sent readers to another page.
    for scene in scenes(what, 4):
        assert scene.about
        said = " ".join((scene.about, scene.summary, scene.reading, scene.hint))
        assert not [other for other in KNOWN if f"in {other}" in said]
        bars = set(re.findall(r'rx="2" class="(\w+)"', "".join(frame.drawing for frame in scene.frames)))
        explained = {kind for kind, _ in scene.legend}
        if scene.legend and what != "bucket-overlap":  # the colours of buckets have numbers
            assert bars == explained


@pytest.mark.parametrize("ranks", [1, 4, 8, MOST_RANKS])
@pytest.mark.parametrize("what", KNOWN)
def test_the_small_picture_tells_the_same(what: str, ranks: int) -> None:
    for scene in scenes(what, ranks):
        assert scene.small is not None
        assert [(one.title, one.caption) for one in scene.small.frames] == [
            (one.title, one.caption) for one in scene.frames
        ]


def test_a_page_asks_the_network_for_nothing() -> None:
    for what in KNOWN:
        made = page(scenes(what, 4))
        assert set(re.findall(r"https?://[^\"' ]+", made)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"<(link|img|script src|iframe)|@import|url\(", made)


PLAYED = """
const section = document.querySelector("section");
const [first, back, play, next] = section.querySelectorAll("button");
const title = section.querySelector(".said strong"), frames = [...section.querySelectorAll("svg .frame")];
const press = (key) =>
  document.body.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
const at = () => [Number(section.dataset.at), section.dataset.playing, title.textContent];
const shown = () => frames.filter((one) => one.checkVisibility({visibilityProperty: true})).length;
const later = (ms) => new Promise((done) => setTimeout(done, ms));
(async () => {
  report(["opened", ...at(), shown(), next.disabled]);
  play.click();
  report(["plays from the start", ...at().slice(0, 2)]);
  press("Home");
  report(["start", ...at(), shown(), first.disabled]);
  next.click();
  report(["flying", section.querySelectorAll(".large .moving.shown .flight").length]);
  await later(800);
  report(["next", ...at()]);
  press("ArrowRight"); press("ArrowRight");  // the second one does not wait for the first
  report(["keys", ...at()]);
  press("End");
  report(["end", ...at(), next.disabled]);
  press("ArrowLeft");
  report(["back", ...at()]);
  press("Home");
  press(" ");
  report(["playing", ...at().slice(0, 2), play.textContent]);
  await later(2500);
  press(" ");
  report(["paused", ...at().slice(0, 2), play.textContent]);
  const stopped = at()[0];
  await later(3000);
  report(["still", at()[0] === stopped]);
  play.click();
  await later(15000);
  report(["played to the end", ...at(), shown()]);
  const slider = section.querySelector("input");
  slider.value = 2;
  slider.dispatchEvent(new Event("input"));
  report(["slid", ...at()]);
})();
"""


def test_the_page_plays_pauses_and_steps_in_chromium(tmp_path: Path) -> None:
    said = run_in_page(page(scenes("ring", 4)), PLAYED, tmp_path, milliseconds=40_000)
    steps = [f"step {number} of 6: receivers {'add' if number < 4 else 'copy'}" for number in range(1, 7)]
    assert said == [
        ["opened", 6, "no", steps[5], 1, True],
        ["plays from the start", 0, "yes"],
        ["start", 0, "no", "start", 1, True],
        ["flying", 4],
        ["next", 1, "no", steps[0]],
        ["keys", 2, "no", steps[1]],
        ["end", 6, "no", steps[5], True],
        ["back", 5, "no", steps[4]],
        ["playing", 0, "yes", "Pause"],
        ["paused", 2, "no", "Play"],
        ["still", True],
        ["played to the end", 6, "no", steps[5], 1],
        ["slid", 2, "no", steps[1]],
    ]


CONTRAST = """
const part = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((one) => one / 255)
  .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
const light = (colour) => part(colour).reduce((sum, one, index) => sum + one * [0.2126, 0.7152, 0.0722][index], 0);
const contrast = (one, other) =>
  (Math.max(light(one), light(other)) + 0.05) / (Math.min(light(one), light(other)) + 0.05);
const fill = (name) => getComputedStyle(document.querySelector("svg " + name)).fill;
const ground = getComputedStyle(document.body).backgroundColor;
report({
  ground: light(ground),
  text: contrast(getComputedStyle(document.body).color, ground),
  reading: contrast(getComputedStyle(document.querySelector(".reading")).color, ground),
  heading: contrast(fill(".heading"), ground),
  digits: Math.min(...[0, 1, 2, 3, 4, 5, 6, 7].map((rank) => contrast(fill(".digit"), fill(".k" + rank)))),
  wide: document.documentElement.scrollWidth <= innerWidth,
});
"""


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_can_be_read_in_both_themes(theme: str, tmp_path: Path) -> None:
    option = f"--blink-settings=preferredColorScheme={int(theme == 'light')}"
    [seen] = run_in_page(page(scenes("ring", 8)), CONTRAST, tmp_path, option, "--window-size=1000,800")
    assert seen.pop("wide")
    assert (seen.pop("ground") > 0.5) == (theme == "light")
    assert {name: ratio for name, ratio in seen.items() if ratio < 4.5} == {}  # WCAG AA


def printed(what: str, ranks: int, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in tables(what, ranks):
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_says_whose_parts_are_in_each_sum() -> None:
    lines = [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in printed("ring", 3).splitlines() if "│" in line]
    for state, rows in zip(play(build("ring_all_reduce", 3)), zip(*[iter(lines)] * 3, strict=True), strict=True):
        want = [
            ["".join(str(r) if value >> r & 1 else "·" for r in range(3)) for value in row] for row in state.tolist()
        ]
        assert [row[2:5] for row in rows] == want


@pytest.mark.parametrize("what", KNOWN)
@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_tables_fit_a_terminal(what: str, ranks: int) -> None:
    said = printed(what, ranks)
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize(("what", "ranks"), [*((what, "4") for what in KNOWN), ("ring", str(MOST_RANKS))])
def test_tables_lose_nothing_through_a_pipe(
    what: str, ranks: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert run(monkeypatch, "explain", what, "--ranks", ranks) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    body = [line for line in out.splitlines() if line.startswith("│")]
    wide = [line for line in printed(what, int(ranks), width=1000).splitlines() if line.startswith("│")]
    assert body == wide


@pytest.mark.parametrize("what", KNOWN)
@pytest.mark.parametrize("columns", ["20", "60"])
def test_tables_wrap_and_cut_nothing_on_a_narrow_terminal(
    what: str, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run(monkeypatch, "explain", what, "--ranks", "4") == 0
    assert "…" not in capsys.readouterr().out


def test_overlap_pictures_say_what_the_arithmetic_says() -> None:
    of = timeline.example(4)
    assert of.at_the_end.full[-1] == pytest.approx(timeline.BACKWARD)
    # By hand: 25 MiB on 4 ranks are 6 messages of 6.25 MiB, 5.24 ms and 0.05 ms each.
    assert of.reduce[-1] == pytest.approx(6 * (0.05e-3 + 6.25 * 2**20 / 1.25e9))
    assert of.at_the_end.exposed == pytest.approx(sum(of.reduce))
    assert of.when_full.exposed == pytest.approx(of.reduce[-1])
    scene = timeline.scene(4)
    for way in (of.at_the_end, of.when_full):
        assert f"{1000 * way.end[-1]:.1f} ms in total<" in str(scene.still)
        assert f"{1000 * way.exposed:.1f} of it waiting<" in str(scene.still)
    ends = [frame for frame in scene.frames if "is reduced (as buckets fill)" in frame.caption]
    assert len(ends) == len(timeline.SIZES)


@pytest.mark.parametrize("ranks", [2, 4, 8, MOST_RANKS])
def test_the_sentence_above_the_overlap_is_computed_from_what_is_drawn(ranks: int) -> None:
    of = timeline.example(ranks)
    numbers = [f"{1000 * one:.1f}" for way in (of.at_the_end, of.when_full) for one in (way.end[-1], way.exposed)]
    said = timeline.scene(ranks).summary
    assert said == (
        "All-reduce after backward: {} ms in total, {} of it waiting. As buckets fill: {} ms, {} waiting.".format(
            *numbers
        )
    )
    if ranks == 4:
        assert numbers == ["278.6", "128.6", "181.8", "31.8"]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, MOST_RANKS])
def test_every_bucket_has_its_number_in_every_frame_and_no_cursor_goes_through_words(ranks: int) -> None:
    # The number of the narrow first bucket was left out, and the cursor crossed headings and results.
    for frame in timeline.scene(ranks).frames:
        tree = ElementTree.fromstring(f"<svg>{frame.drawing}</svg>")
        words = [(words_box(one), one.text) for one in tree.iter("text")]
        digits = [one.text for one in tree.iter("text") if one.get("class") in ("digit", "number")]
        rows = 4 if ranks > 1 else 2
        assert sorted(digits) == sorted(rows * [str(bucket) for bucket in range(len(timeline.SIZES))])
        [cursor] = [one for one in tree.iter("path") if one.get("class") == "now"]
        pieces = re.findall(r"M([\d.]+),([\d.]+) V([\d.]+)", str(cursor.get("d")))
        assert pieces
        for x, top, bottom in ((float(one) for one in piece) for piece in pieces):
            for (left, high, right, low), said in words:
                assert not (left < x < right and top < low and high < bottom), (frame.title, said)


def words_box(element: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a line of text, somewhat generous for its width in any common font."""
    size = {"digit": 10.0}.get(str(element.get("class")), 12.0)
    width = 0.62 * size * len(element.text or "")
    left = (
        float(str(element.get("x")))
        - {"start": 0.0, "middle": 0.5, "end": 1.0}[str(element.get("text-anchor"))] * width
    )
    baseline = float(str(element.get("y")))
    return left, baseline - 0.8 * size, left + width, baseline + 0.2 * size


REFUSED: dict[str, tuple[list[str], str]] = {
    "unknown": (["foo"], "nothing to explain about 'foo'; choose one of collectives, ring, tree"),
    "nothing": ([], "WHAT"),
    "no ranks": (["ring", "--ranks", "0"], "--ranks=0 is not in 1..16"),
    "too many ranks": (["tree", "--ranks", "17"], "--ranks=17 is not in 1..16"),
    "no number": (["ring", "--ranks", "four"], "--ranks='four' is not a whole number"),
    "suffix": (["ring", "--out", "ring.png"], "has to end in .svg"),
    "no suffix": (["ring", "--out", "ring"], "has to end in .svg"),
    "no folder": (["ring", "--out", "/nowhere/ring.svg"], "cannot be written: No such file or directory"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "explain", *arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.parametrize("what", KNOWN)
def test_the_pictures_in_the_docs_are_those_drawn_today(what: str) -> None:
    assert (PICTURES / f"{what}.svg").read_text("utf-8") == sheet(scenes(what, 4)), "run: make pictures"


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_the_command_writes_the_file(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"ring.{suffix}"
    assert run(monkeypatch, "explain", "ring", "--ranks", "3", "--out", str(file)) == 0
    assert capsys.readouterr().out == f"wrote {file}\n"
    made: Any = {"svg": sheet, "html": page}[suffix](scenes("ring", 3))
    assert file.read_text("utf-8") == made
