"""The documentation's snippets run as pasted, on two ranks, and the names in it exist.

The ``python`` blocks of a page are one program, run in turn by two ranks in one folder, without a process group at the
start, as ``paceline run`` would. The setup that a fragment needs, such as a model, is in a comment of the page's source
that readers do not see::

    <!-- python
    net = torch.nn.Linear(8, 4)
    -->
"""

from __future__ import annotations

import os
import re
import shlex
import warnings
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch.distributed as dist

from insides import run_command
from paceline import World
from processes import run_here
from twins import Pools

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "paceline"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^(?:```python\n(?P<shown>.*?)^```|<!-- python\n(?P<hidden>.*?)^-->)$", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[re.Match[str]]:
    return list(BLOCK.finditer(page.read_text("utf-8")))


TRAINING, CHECKPOINTS = ROOT / "docs" / "training-loop.md", ROOT / "docs" / "checkpoints.md"
OTHERS = [
    pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.stem == "trainer"))
    for page in PAGES
    if blocks(page) and page not in (TRAINING, CHECKPOINTS)
]


def run_page(world: World, page: Path, folder: str, blocks_wanted: slice = slice(None)) -> dict[str, Any]:
    """Run the page's blocks on this rank; return the numbers and strings that they define."""
    os.chdir(folder)
    if dist.is_initialized():  # left by the previous page
        dist.destroy_process_group()
    names: dict[str, Any] = {"__name__": "__main__"}
    text = page.read_text("utf-8")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")  # from importing inductor
        for block in blocks(page)[blocks_wanted]:
            kind = block.lastgroup or ""
            lines_before = text.count("\n", 0, block.start(kind))  # for line numbers in tracebacks
            exec(compile("\n" * lines_before + block[kind], str(page), "exec"), names)
    return {name: value for name, value in names.items() if isinstance(value, int | float | str)}


@pytest.mark.parametrize("page", OTHERS)
def test_snippets_run_as_pasted(page: Path, pools: Pools, tmp_path: Path) -> None:
    [names, _] = pools.run(2, run_page, page, str(tmp_path))
    if page.name == "README.md":
        [printed] = re.findall(r"^    epoch 4: loss ([\d.]+)$", page.read_text("utf-8"), re.MULTILINE)
        assert names["mean"] == pytest.approx(float(printed), abs=2e-3)  # kernels of other processors round differently


def test_the_training_page_has_a_script_that_trains_and_resumes(pools: Pools, tmp_path: Path) -> None:
    first, other = pools.run(2, run_page, TRAINING, str(tmp_path))
    assert first["accuracy"] == other["accuracy"] > 0.9
    assert first["resumed_at"] == 0
    saved = {path.name for path in (tmp_path / "runs" / "1").glob("step-*")}
    [number] = [number for number, block in enumerate(blocks(TRAINING)) if "checkpointer.restore()" in block[0]]
    [again, _] = pools.run(2, run_page, TRAINING, str(tmp_path), slice(number, number + 1))
    assert again["resumed_at"] == 3
    assert {path.name for path in (tmp_path / "runs" / "1").glob("step-*")} == saved


def test_the_checkpoint_page_resumes(pools: Pools, tmp_path: Path) -> None:
    for _ in range(2):
        for names in pools.run(2, run_page, CHECKPOINTS, str(tmp_path)):
            assert names["best_acc1"] == 30.0
    assert len(list((tmp_path / "runs" / "7").iterdir())) == 3


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_every_snippet_is_tested_and_public_names_in_prose_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    assert set(re.findall(r"^ *```(.*)$", text, re.MULTILINE)) <= {"python", ""}
    assert len(re.findall(r"^ *(?:```|<!-- )python", text, re.MULTILINE)) == len(blocks(page))
    for path in set(re.findall(r"`paceline\.([A-Za-z_.]+\w)\(?", text)):
        assert resolve_name(f"paceline.{path}") is not None, path


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub generates for the page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_are_not_broken(page: Path) -> None:
    # A page still linked to the old location of moved files.
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text("utf-8")):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


CONTRACT = re.compile(r'^containers = \["([\w.]+)"\]$.*?^layers = \[$(.*?)^\]$', re.DOTALL | re.MULTILINE)
LAYERS = {
    package: [set(row.split(" | ")) for row in re.findall(r'"(.+)"', layers)]
    for package, layers in CONTRACT.findall((ROOT / "pyproject.toml").read_text("utf-8"))
}
"""The layers of each package in import-linter's configuration."""


def rooms(folder: Path) -> set[str]:
    """Return the modules and packages directly in a folder."""
    return {path.stem for path in folder.glob("*.py") if path.stem != "__init__"} | {
        path.name for path in folder.iterdir() if (path / "__init__.py").exists()
    }


def drawn(text: str) -> list[set[str]] | None:
    """Return the rows of a diagram of modules, without the remarks beside them."""
    picture = re.search(r"do not import each other:\n\n((?:    .+\n?)+)", text)
    return picture and [set(re.split(r"  +", row.strip())[0].split(" · ")) for row in picture[1].splitlines()]


def test_the_diagram_in_contributing_matches_the_tree_and_import_linter() -> None:
    # The layers were edited in pyproject.toml for import-linter, and the page became outdated.
    rows = drawn((ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert rows == LAYERS["paceline"]
    assert set.union(*rows) == rooms(SOURCE)


# -- options and make targets exist ------------------------------------------------------------------------------------


LINE = re.compile(r"^    (?:[A-Z_]+=\S+ )*(paceline .*?)(?: {2,}.*)?$", re.MULTILINE)
COMMANDS = sorted({row for page in PAGES for row in LINE.findall(page.read_text("utf-8"))})


@pytest.mark.parametrize("command", COMMANDS)
def test_options_in_documented_commands_exist(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(command)
    if words[1] == "run":
        run_command.parse(words[2:])
        return
    place = 3 if words[1] == "train" else 2
    # Options are parsed before the help is printed.
    assert run_here(monkeypatch, *words[1:place], "--help", *words[place:]) == 0
    assert "--help" in capsys.readouterr().out


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        named = set(re.findall(r"(?:^    |`)make ([a-z][\w-]*)", page.read_text("utf-8"), re.MULTILINE))
        assert named <= targets, page
