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
from insides import DONE, Advice, Operator, OperatorTable, RankRecord, Report, Span, page, parts_table
from profile_records import records, verdict

EVIL = '</script><script>document.title="owned"</script><img src=x onerror="document.title=\'owned\'">&amp;'
LIMIT = 1_000_000


OPERATORS = OperatorTable([Operator("aten::addmm", 24, 0.0212, 0.41), Operator("aten::mm", 48, 0.0171, 0.33)])


def made(ranks: int = 2, steps: int = 43, slow: int | None = 1, buckets: int = 4) -> list[RankRecord]:
    """Return records with rank `slow` 30 ms late, and one step 100 ms longer on all ranks."""

    def timing(rank: int, step: int) -> dict[str, float]:
        late = 0.03 * (rank == slow)
        return {"data": 0.003, "forward": 0.021 + late, "backward": 0.038, "gap": 0.002 + 0.1 * (step % 97 == 20)}

    return records(ranks, steps, timing, buckets=[25 << 20] * buckets)


def gaps() -> Report:
    """Return a report with one rank without steps, one with gaps, no peaks, no rows, and no detailed step."""
    some, whole, none = made(3)
    few = [step for step in some.steps if step.number not in range(3, 9)]
    ranks = [replace(some, steps=few), whole, replace(none, steps=[])]
    return verdict([replace(rank, memory={}, steps=[replace(step, rows=0) for step in rank.steps]) for rank in ranks])


def evil() -> Report:
    """Return a report with names that would inject HTML if unescaped, and buckets without an end."""
    ranks = [replace(rank, title=EVIL, backend=EVIL, host=EVIL, device=EVIL, memory={EVIL: 1000}) for rank in made()]
    for rank in ranks:
        for step in rank.steps:
            step.spans = [span for span in step.spans if span.label != DONE] + [Span(EVIL, step.start, step.end)]
    report = verdict(ranks, OperatorTable([Operator(EVIL, 1, 0.01, 1.0)], device_figures={EVIL: 0.5}))
    return replace(
        report, headline=EVIL, advice=[Advice(EVIL, EVIL, EVIL, 0.5, predictions={EVIL: 0.5})], missing=[EVIL]
    )


class Elements(HTMLParser):
    """Counts elements, and remembers IDs and references to them."""

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
    "two ranks": lambda: verdict(made(), OPERATORS),
    "one rank": lambda: verdict(made(1)),
    "nothing": lambda: verdict(made(steps=2)),
    "gaps": gaps,
    "evil": evil,
    "gpu": lambda: verdict(made(), OperatorTable(device_figures={"utilization": 0.152, "host": 0.611})),
}
each_shape = pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)


@each_shape
def test_reports_become_complete_offline_pages(make: Any) -> None:
    text = page(make())
    elements = Elements(text)
    assert elements.open == []
    assert len(set(elements.ids)) == len(elements.ids)
    assert all(link.startswith("#") and link[1:] in elements.ids for link in elements.links)
    assert not {"link", "img", "iframe", "object", "base"} & set(elements.names)
    assert not re.search(r"@import|url\(", text)
    for address in re.findall(r"https?://[^\"' )]+", text):
        assert address.startswith("https://github.com/leeoniya/uPlot")  # mentioned in its comment


def test_typical_step_shows_the_loops_own_code() -> None:
    # The time between two steps was a gap without a name, although the headline blamed it.
    record = json.loads(re.search(r'id="timeline-data">(.*?)</script>', page(verdict(made())))[1])  # type: ignore[index]
    for slices in record["slices"]:
        assert [(start, end) for label, start, end, _ in slices if label == "own code"] == [(0, 2)]


def test_heading_of_a_long_headline_ends_at_the_first_clause() -> None:
    long = "Rank 1 slows the others down: its own code takes 10.2 ms longer, most in f() (a.py:11); 29% is waiting."
    text = page(replace(verdict(made()), headline=f"{long} In addition, cores are few."))
    assert f"<h1>{long.partition(';')[0]}.</h1>\n<p>29% is waiting. In addition, cores are few.</p>" in text


@each_shape
def test_tiles_fill_rows_of_four(make: Any) -> None:
    # At 1,100 pixels, the last of seven tiles was alone in a row.
    assert page(make()).count('<dd class="note">') == 8


def test_many_ranks_and_steps_give_a_small_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.profiler.page.MOST_POINTS", 16_000)
    large = verdict(made(32, 1003, slow=13, buckets=1))
    text = page(large)
    assert len(text.encode()) < LIMIT
    assert large.facts.accounts.notable_ranks(1) == [13]
    record = json.loads(re.search(r'id="steps-data">(.*?)</script>', text)[1])  # type: ignore[index]
    assert {len(rows) for rows in record["metrics"].values()} == {32}
    assert len(record["steps"]) == len(record["metrics"]["step"][0]) == 500


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
  const heat = document.querySelector(".heat"), box = heat.getBoundingClientRect(), cell = { bubbles: true };
  Object.assign(cell, { clientX: box.left + 44 + 1.5 * 72, clientY: box.top + 44 + 0.5 * 72 });
  heat.dispatchEvent(new PointerEvent("pointermove", cell));
  report(["heat", document.querySelector(".tip").textContent]);
  report(["problems", problems, performance.getEntriesByType("resource").length]);
})();
"""
)


@pytest.mark.slow
def test_timeline_zooms_with_buttons_keys_wheel_and_mouse(tmp_path: Path) -> None:
    said = run_in_page(page(verdict(made())), ZOOMS, tmp_path, "--window-size=1280,900")
    assert said == [
        ["whole", True, True],
        ["button", 0.25, 0.75],
        ["keys move", pytest.approx(0.35), pytest.approx(0.85)],
        ["wheel", True, True],
        ["a wheel alone scrolls the page", False, True],
        ["selected", True, True],
        ["double click", 0, True],
        ["read out", "rank 0: data wait, 3.0 ms, from 2.0 ms"],
        ["tip", "rank 0: backward, 68.8 ms (38.0 ms without what is inside it), from 26.0 ms"],
        ["heat", "rank 0 waits 30.0 ms per step for rank 1"],
        ["problems", [], 0],
    ]


@pytest.mark.slow
def test_heading_has_at_most_three_lines(tmp_path: Path) -> None:
    where = "most of it in Trainer.write_validation_metrics() (training/validation.py:1211)"
    long = f"Rank 113 slows the others down: its own code in the loop takes 310.2 ms longer per step, {where}; 9% wait."
    lines = 'const h = $("h1"); report(Math.round(h.clientHeight / parseFloat(getComputedStyle(h).lineHeight)));'
    text = page(replace(verdict(made()), headline=long))
    assert run_in_page(text, lines, tmp_path, "--window-size=1400,900") <= [3]


def printed(table: Any, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_table_has_the_time_and_share_of_each_part() -> None:
    said = printed(parts_table(verdict(made()).facts))
    assert re.search(r" rank 1 +mean *\n.*rank 0 +slow +of 2", said)
    assert re.search(r"length +101 ms +101 ms +101 ms", said)
    assert re.search(r"forward +21\.0 ms +21% +51\.0 ms +50% +36\.0 ms +36%", said)
    assert "checkpoint" not in said  # the run saved none
