"""The docs site: every page has its place, links hold there, and a build with warnings as errors passes."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import gallery
import pytest
from docs_site import generated, pages
from docs_site.links import Links
from docs_site.notebook import write_page

import paceline
from browser import run_in_page

ROOT = Path(__file__).parents[3]
SHOWN = [page for entries in pages.NAV.values() for page in entries] + list(pages.ABOUT)


def test_every_page_is_in_the_sidebar_or_named_as_left_out() -> None:
    there = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}  # the root is above the sidebar
    missing = there - set(SHOWN) - set(pages.LEFT_OUT)
    assert not missing, f"add {sorted(missing)} to NAV, or to LEFT_OUT with the reason, in scripts/docs_site/pages.py"


def test_the_sidebar_names_each_page_once_and_no_other() -> None:
    assert len(set(SHOWN)) == len(SHOWN)
    assert set(SHOWN) <= set(pages.pages().values())
    assert not set(SHOWN) & set(pages.LEFT_OUT)
    assert all((ROOT / "docs" / f"{page}.md").is_file() for page in pages.LEFT_OUT)


def test_links_between_files_become_links_between_pages(tmp_path: Path) -> None:
    for name in ("README.md", "docs/a.md", "docs/decisions/1.md", "src/x.py", "docs/pictures/ring.svg"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    decisions = {"docs/decisions/1.md": "decisions/1", "docs/decisions": "decisions/index"}
    links = Links(tmp_path, {"README.md": "index", "docs/a.md": "a", **decisions})
    text = (
        "[a](docs/a.md#b) [why](docs/decisions) [code](src/x.py) [gone](docs/gone.md) [out](https://example.org/a.md)"
    )
    assert links.rewrite(text, "README.md", "index") == (
        "[a](a.md#b) [why](decisions/index.md) [code](source/src/x.py.md) [gone](docs/gone.md) "
        "[out](https://example.org/a.md)"
    )
    assert links.sources == {"src/x.py"}
    assert links.rewrite("[up](../a.md), [`me`](1.md)", "docs/decisions/1.md", "decisions/1") == (
        "[up](../a.md), [`me`](1.md)"
    )
    assert links.rewrite("![r](pictures/ring.svg) [top](../README.md#x)", "docs/a.md", "a") == (
        "![r](pictures/ring.svg) [top](index.md#x)"
    )


@pytest.mark.parametrize("code", ["```\n[a](docs/a.md)\n```\n", "text\n\n    [a](docs/a.md)\n", "`[a](docs/a.md)`"])
def test_code_is_left_as_it_is(tmp_path: Path, code: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").touch()
    assert Links(tmp_path, {"docs/a.md": "a"}).rewrite(code, "README.md", "index") == code


def test_a_notebook_shows_what_it_printed_and_drew(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {
            "cell_type": "code",
            "source": "%%rank [0]\nprint(1)",
            "outputs": [
                {"output_type": "stream", "name": "stdout", "text": ["\x1b[31m1\x1b[0m\n"]},
                {"output_type": "display_data", "data": {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure>"}},
                {"output_type": "execute_result", "data": {"text/plain": "'two'"}},
                {"output_type": "error", "ename": "E", "evalue": "", "traceback": ["\x1b[1mTraceback", "E: wrong"]},
            ],
        },
    ]
    notebook = tmp_path / "1-first.ipynb"
    notebook.write_text(json.dumps({"cells": cells}))
    write_page(notebook, tmp_path, str.upper)
    page = (tmp_path / "1-first.md").read_text()
    assert page.startswith("# TITLE\nTEXT\n")
    shown = ["%%rank [0]\nprint(1)\n~", "\n\n1\n~", "](1-first-1-1.png)", "\n\n'two'\n~", "\n\nTraceback\nE: wrong\n~"]
    positions = [page.index(part) for part in shown]
    assert positions == sorted(positions)
    assert "\x1b" not in page
    assert "<Figure>" not in page
    assert (tmp_path / "1-first-1-1.png").read_bytes().startswith(b"\x89PNG")


def test_the_reference_describes_every_public_name_once() -> None:
    names = generated.documented(paceline)
    assert set(names) >= {"paceline", "paceline.data", "paceline.train", "paceline.checkpoint", "paceline.profiler"}
    assert names["paceline.data"]["DataLoader"] == "paceline.data.DataLoader"
    assert names["paceline.checkpoint"]["Checkpointer"] == "paceline.Checkpointer"  # shown by both
    for module in generated.public_modules(paceline):
        own = names[module.__name__]
        assert own, module
        text = generated.reference_page(module, own)
        assert all(re.search(rf"(:: |<){re.escape(full)}\b", text) for full in own.values())


def test_every_result_is_on_the_page_of_benchmarks() -> None:
    page = generated.benchmarks_page(ROOT / "benchmarks" / "results")
    files = list((ROOT / "benchmarks" / "results").glob("*.json"))
    assert files
    for file in files:
        assert re.search(rf"^\| {file.name[:10]} \| \[.+\]\(.*/{re.escape(file.name)}\)", page, re.MULTILINE), file


def test_the_prose_of_an_attribute_is_not_taken_for_its_type() -> None:
    # «Time spent training in this process: forward, …» became the type «Time spent training in this process».
    napoleon = pytest.importorskip("sphinx.ext.napoleon", reason="the extra 'docs' is not installed")
    conf = runpy.run_path(str(ROOT / "docs" / "site" / "conf.py"))
    for what in ("attribute", "data", "property"):
        said = ["Seconds in this process: forward and backward.", "", "Example: none."]
        without = napoleon.GoogleDocstring(list(said), napoleon.Config(), what=what, name="seconds").lines()
        assert ":type: Seconds in this process" in without  # what Napoleon does by itself
        conf["keep_prose_whole"](None, what, "seconds", None, None, said)
        lines = napoleon.GoogleDocstring(said, napoleon.Config(), what=what, name="seconds").lines()
        assert "Seconds in this process: forward and backward." in lines
        assert not [line for line in lines if line.startswith(":type:")]


PICTURE_BYTES, PICTURE_PIXELS = 200_000, 1400
"""Most bytes of a picture in the gallery, and most pixels of its width, which a column of text can show."""


def test_the_gallery_shows_each_picture_of_its_script_and_none_is_heavy() -> None:
    shown = re.findall(r"pictures/gallery/(\w+)\.png", (ROOT / "docs" / "gallery.md").read_text("utf-8"))
    assert shown == list(gallery.TAKEN)
    for name in shown:
        content = (gallery.PICTURES / f"{name}.png").read_bytes()
        assert len(content) <= PICTURE_BYTES
        assert int.from_bytes(content[16:20], "big") <= PICTURE_PIXELS  # the width in a PNG's head


@pytest.mark.slow
def test_the_gallery_takes_its_pictures_again(tmp_path: Path) -> None:
    if not any(map(shutil.which, gallery.BROWSERS)):
        pytest.skip("there is no Chromium here; on Debian: apt-get install chromium")
    command = [sys.executable, str(ROOT / "scripts" / "gallery.py"), "explain", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "explain.png").read_bytes()[16:24] == (1200).to_bytes(4, "big") + (740).to_bytes(4, "big")
    lines = tmp_path / "lines.png"
    gallery.terminal("rank \x1b[31m1\x1b[0m\nis slow\n", "paceline top", tmp_path, lines)
    assert int.from_bytes(lines.read_bytes()[20:24], "big") == 5 * gallery.LINE + 2 * gallery.MARGIN


def test_a_picture_that_the_gallery_does_not_have_is_one_line() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gallery.py"), "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("choose some of explain, profile, compare, bench, top")


MOST_DRAWN = 107
"""Characters of a drawing's line that a window of 1,400 pixels has room for (docs/site/paceline.css)."""


def pages_found(index: dict[str, Any], word: str) -> set[str]:
    """Return the pages on which the site's search finds `word`: by its stem, in their text and titles."""
    from sphinx.search.en import SearchEnglish

    stem = SearchEnglish({}).stem(word)
    found = [index[part].get(stem, []) for part in ("terms", "titleterms")]
    return {index["docnames"][number] for part in found for number in (part if isinstance(part, list) else [part])}


def longest_drawn_line(html: list[Path]) -> int:
    """Return the number of characters in the longest line that is drawn: a table's rule, or arrows between columns."""
    drawn = re.compile(r'class="drawing highlight-[^>]*><div class="highlight"><pre>(.*?)</pre>', re.DOTALL)
    blocks = [block for page in html for block in drawn.findall(page.read_text("utf-8"))]
    lines = [unescape(re.sub(r"<[^>]+>", "", line)) for block in blocks for line in block.splitlines()]
    return max(len(line) for line in lines if "─" * 10 in line or "►" in line)


MEASURE = """
const pages = %s, faults = [];
const frame = document.createElement("iframe");
frame.style = "width: 1400px; height: 900px; border: 0";
document.body.append(frame);
(async () => {
  for (const page of pages) {
    await new Promise((done) => { frame.onload = done; frame.src = page; });
    const root = frame.contentDocument.documentElement;
    if (root.scrollWidth > frame.clientWidth) faults.push([page, "the page scrolls sideways"]);
    for (const block of root.querySelectorAll(".highlight pre")) {
      if (block.scrollWidth > block.clientWidth) faults.push([page, "scrolls", block.textContent]);
      if (page.includes("/notebooks/") || block.closest(".drawing")) continue;
      block.style.whiteSpace = "pre";
      if (block.scrollWidth > block.clientWidth) faults.push([page, "wraps", block.textContent]);
    }
    frame.style.width = "400px";
    for (const block of root.querySelectorAll(".highlight pre"))
      if (frame.contentWindow.getComputedStyle(block).whiteSpace != "pre") faults.push([page, "wraps at 400 pixels"]);
    frame.style.width = "1400px";
  }
  report([pages.length, faults]);
})();
"""
"""Measures all pages in a window of 1,400 pixels: what scrolls sideways, and code whose lines wrap.

Lines of notebooks wrap, because they are shown as they were run, and so does the prose that a program prints below a
table.
"""


def measure(site: Path, folder: Path) -> list[list[str]]:
    """Return the faults of the site's pages in Chromium."""
    pages = sorted(path.as_uri() for path in site.rglob("*.html"))
    blank = "<!DOCTYPE html><html><head></head><body></body></html>"
    script = MEASURE % json.dumps(pages)
    options = ("--allow-file-access-from-files", "--window-size=1500,1000")
    [(number, faults)] = run_in_page(blank, script, folder, *options, milliseconds=300_000)
    assert number == len(pages) > 100
    return list(faults)


def types_shown(page: Path) -> list[str]:
    """Return what stands after «Type:» on a page of the API reference."""
    field = r'<dt class="field-\w+">Type<span class="colon">:</span></dt>\s*<dd[^>]*>(.*?)</dd>'
    found = re.findall(field, page.read_text("utf-8"), re.DOTALL)
    return [unescape(re.sub(r"<[^>]+>", "", shown)).strip() for shown in found]


def installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) for module in modules)


@pytest.mark.skipif(not installed("sphinx", "myst_parser", "furo"), reason="the extra 'docs' is not installed")
@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    # It is a program of its own, as `make docs` runs it; what it builds is read from the disk alone.
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(ROOT / "scripts" / "docs_site"), "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"the site is {tmp_path / 'site' / 'index.html'}"
    html = list((tmp_path / "site").glob("**/*.html"))
    assert {"guide.html", "drop-in.html", "paceline.data.html", "benchmarks.html"} <= {page.name for page in html}
    index = json.loads((tmp_path / "site" / "searchindex.js").read_text("utf-8")[len("Search.setIndex(") : -1])
    assert {"drop-in", "reference/paceline"} <= pages_found(index, "no_sync")
    assert {"checkpoints", "training-loop"} <= pages_found(index, "resume")
    assert {"stragglers", "profiler"} <= pages_found(index, "straggler")
    assert longest_drawn_line(html) <= MOST_DRAWN
    assert measure(tmp_path / "site", tmp_path) == []
    for page in html:
        for shown in types_shown(page):
            ast.parse(shown, mode="eval")  # prose is no expression
        loaded = re.findall(r"<(?:script|img|link)\b[^>]*\b(?:src|href)=\"(https?:[^\"]+)", page.read_text("utf-8"))
        assert not loaded, page
