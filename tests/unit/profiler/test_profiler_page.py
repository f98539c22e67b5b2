"""The profiler's page, and its summary in the terminal."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from browser import run_in_page
from paceline.core.telemetry.spans import Span
from paceline.planner.critical_batch import NoiseScale
from paceline.profiler.page import page
from paceline.profiler.page.charts import find_outliers
from paceline.profiler.report import step_parts
from paceline.profiler.report.formatting import notable_ranks
from paceline.profiler.report.report import Advice, BucketTimes, Operator, Report, Timeline
from paceline.tools.profile.terminal_summary import parts_table
from profiles import holes, made_up

EVIL = '</script><script>document.title="owned"</script><img src=x onerror="document.title=\'owned\'">&amp;'
LIMIT = 3_000_000


@pytest.fixture(scope="module")
def large() -> Report:
    """64 ranks, 1,000 steps, 12 buckets: more points than the page has."""
    return made_up(64, 1000, slow=13, buckets=12, hosts=8)


def empty() -> Report:
    """What is left of a run that ended before its first step."""
    nothing: Any = {part: [] for part in step_parts.ALL}
    return Report("train.py", "gloo", [], [], [], nothing, [], "No step was recorded.", [], [], {}, None)


def gappy() -> Report:
    """A rank without steps, another one without some of them, and no timeline."""
    whole = made_up(3, 30)
    parts = {part: holes(holes(rows, 2), 0, slice(3, 9)) for part, rows in whole.parts.items()}
    seconds = holes(holes(whole.step_seconds, 2), 0, slice(3, 9))
    ranks = [replace(one, peak_memory=None) for one in whole.ranks]
    timeline = Timeline(7, [[], [], []], [])
    return replace(
        whole,
        parts=parts,
        step_seconds=seconds,
        ranks=ranks,
        timeline=timeline,
        samples_per_step=None,
        overlap_by_rank={},
    )


def evil() -> Report:
    """Names that would become elements and scripts of the page if they were not escaped; buckets without an end."""
    whole = made_up()
    slices = [[Span(EVIL, 0.0, 0.1)] for _ in whole.ranks]
    return replace(
        whole,
        title=EVIL,
        backend=EVIL,
        headline=EVIL,
        ranks=[replace(one, host=EVIL, device=EVIL) for one in whole.ranks],
        advice=[Advice(EVIL, EVIL, EVIL, 0.5, predictions={EVIL: 0.5})],
        operators=[Operator(EVIL, 1, 0.01, 1.0)],
        memory={EVIL: 1000},
        device_figures={EVIL: 0.5},
        missing=[EVIL],
        timeline=Timeline(9, slices, [BucketTimes(0, 8, [0.02, 0.04], [None, None])]),
    )


class Elements(HTMLParser):
    """Counts elements and remembers ids and what they refer to."""

    VOID = frozenset({"meta", "br", "img", "input", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src"):
                self.links.append(value or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


SHAPES = {
    "two ranks": made_up,
    "one rank": lambda: made_up(1, slow=None, waited_for=[[0.0]]),
    "nothing": empty,
    "holes": gappy,
    "evil": evil,
    "gpu, noise scale": lambda: made_up(
        device_figures={"utilization": 0.152, "host": 0.611, "sm_efficiency": 0.111, "occupancy": 0.287},
        noise_scale=NoiseScale(64.0, 900.0),
    ),
}
each_shape = pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)


@each_shape
def test_every_report_becomes_a_whole_page_that_fetches_nothing(make: Any) -> None:
    made = page(make())
    elements = Elements(made)
    assert elements.open == []
    assert len(set(elements.ids)) == len(elements.ids)
    assert all(link.startswith("#") and link[1:] in elements.ids for link in elements.links)
    assert not {"link", "img", "iframe", "object", "base"} & set(elements.names)
    assert not re.search(r"@import|url\(", made)
    for address in re.findall(r"https?://[^\"' )]+", made):
        assert address.startswith("https://github.com/leeoniya/uPlot")  # in the comment that names it


def test_sixty_four_ranks_and_a_thousand_steps_stay_small(large: Report) -> None:
    made = page(large)
    assert len(made.encode()) < LIMIT
    assert notable_ranks(large, 5) == [0, 1, 2, 3, 13]
    record = json.loads(re.search(r'id="steps-data">(.*?)</script>', made)[1])  # type: ignore[index]
    assert {len(rows) for rows in record["metrics"].values()} == {64}
    assert len(record["steps"]) == len(record["metrics"]["step"][0]) == 500
    assert len(record["outliers"]) == len(range(500, 1000, 97))


def test_outliers_are_steps_far_above_the_ranks_median() -> None:
    rows: list[list[float | None]] = [[0.1, 0.2], [0.101, 0.2], [0.3, 0.2], [None, 0.6], [0.1, 0.2], [0.099, None]]
    found = [(one.index, one.rank, one.seconds) for one in find_outliers(rows)]
    assert found == [(2, 0, 0.3), (3, 1, 0.6)]
    assert find_outliers([]) == find_outliers([[None, None]]) == []
    noisy: list[list[float | None]] = [[0.1], [0.2], [0.08], [0.12], [0.25]]
    assert [one.ratio for one in find_outliers(noisy)] == [pytest.approx(0.25 / 0.12)], "twice the median in any noise"
    assert find_outliers([[0.1], [0.1], [0.105]]) == []  # the deviation is 0, but a twentieth is nothing to mark


SEEN = """
const problems = [];
console.error = (...said) => problems.push(said.join(" "));
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const lanes = document.querySelector(".lanes"), range = () => [Number(lanes.dataset.from), Number(lanes.dataset.to)];
const painted = (canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height), seen = new Set();
  for (let at = 0; at < data.length; at += 4) if (data[at + 3] === 255) seen.add(data.slice(at, at + 3).join());
  return seen.size;
};
const key = (name) => lanes.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));
const at = (part) => { const box = lanes.getBoundingClientRect(); return box.left + 84 + part * (box.width - 84); };
const mouse = (kind, part, more = {}) => lanes.dispatchEvent(new PointerEvent(kind, { clientX: at(part), clientY:
  lanes.getBoundingClientRect().top + 20, pointerId: 7, bubbles: true, button: 0, pointerType: "mouse", ...more }));
"""
ZOOMS = (
    SEEN
    + """
(async () => {
  await wait(200);
  const [, end] = range();
  report(["whole", range()[0] === 0, painted(lanes) > 5]);
  document.querySelector('[data-do="+"]').click();
  report(["button", range()[0] / end, range()[1] / end]);
  key("ArrowRight");
  report(["keys move", range()[0] / end, range()[1] / end]);
  key("Home");
  lanes.dispatchEvent(new WheelEvent("wheel", { deltaY: -300, ctrlKey: true, clientX: at(0), cancelable: true }));
  report(["wheel", range()[0] < end * 0.01, range()[1] < end * 0.6]);
  const scrolled = new WheelEvent("wheel", { deltaY: 300, cancelable: true });
  const before = range()[1];
  lanes.dispatchEvent(scrolled);
  report(["a wheel alone scrolls the page", scrolled.defaultPrevented, range()[1] === before]);
  key("0");
  mouse("pointerdown", 0.25);
  mouse("pointermove", 0.5);
  mouse("pointerup", 0.5);
  report(["selected", Math.abs(range()[0] / end - 0.25) < 0.03, Math.abs(range()[1] / end - 0.5) < 0.03]);
  lanes.dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
  report(["double click", range()[0], range()[1] === end]);
  key("n");
  key("n");
  report(["read out", document.querySelector(".spoken").textContent]);
  mouse("pointermove", 0.3);
  report(["tip", document.querySelector(".tip").textContent]);
  report(["problems", problems, performance.getEntriesByType("resource").length]);
})();
"""
)


@pytest.mark.slow
def test_the_timeline_zooms_by_button_keys_wheel_and_mouse(tmp_path: Path) -> None:
    said = run_in_page(page(made_up()), ZOOMS, tmp_path, "--window-size=1280,900")
    assert said == [
        ["whole", True, True],
        ["button", 0.25, 0.75],
        ["keys move", pytest.approx(0.35), pytest.approx(0.85)],
        ["wheel", True, True],
        ["a wheel alone scrolls the page", False, True],
        ["selected", True, True],
        ["double click", 0, True],
        ["read out", "rank 0: forward, 21.0 ms, from 3.0 ms"],
        ["tip", "rank 0: backward, 38.0 ms (36.8 ms without what is inside it), from 24.0 ms"],
        ["problems", [], 0],
    ]


def printed(table: Any, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_has_the_time_and_share_of_each_part() -> None:
    said = printed(parts_table(made_up()))
    assert re.search(r" rank 1 +mean *\n.*rank 0 +slow +of 2", said)
    assert re.search(r"length +110 ms +110 ms +110 ms", said)
    assert re.search(r"forward +21\.\d ms +19% +51\.\d ms +46% +36\.\d ms +33%", said)
    assert "checkpoint" not in said  # there was none


def test_pauses_of_the_garbage_collector_are_in_both_tables() -> None:
    report = replace(made_up(), collecting=[0.0123, 0.0])
    assert "of which garbage collection</th>" in page(report)
    assert "<td>12.3 ms</td></tr>" in page(report)
    assert "12.3 ms" in printed(parts_table(report))
