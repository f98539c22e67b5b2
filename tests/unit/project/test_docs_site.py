"""Parts of the docs site. ``make docs``, which CI runs, builds it with warnings as errors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gallery
import pytest
from docs_site import generated
from docs_site.links import Links
from docs_site.notebook import write_page

import paceline

ROOT = Path(__file__).parents[3]


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
