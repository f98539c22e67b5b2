"""The documentation's snippets run as pasted, on two ranks, and the names in it exist.

The ``python`` blocks of a page are one program, run in turn by two ranks in one folder, without a process group at the
start, as ``paceline run`` would. What a fragment takes for granted (a model, say) stands before it in the page's own
source, in a comment that readers do not see::

    <!-- python
    net = torch.nn.Linear(8, 4)
    -->
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch.distributed as dist

from paceline.core.processes.world import World
from twins import Pools

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "paceline"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^(?:```python\n(?P<shown>.*?)^```|<!-- python\n(?P<hidden>.*?)^-->)$", re.DOTALL | re.MULTILINE)
MOST_HIDDEN = 10  # lines a page: a snippet that needs more is no help to who pastes it


def blocks(page: Path) -> list[re.Match[str]]:
    return list(BLOCK.finditer(page.read_text("utf-8")))


WITH_BLOCKS = [page for page in PAGES if blocks(page)]
each_page = pytest.mark.parametrize("page", WITH_BLOCKS, ids=[page.stem for page in WITH_BLOCKS])


def run_page(world: World, page: Path, folder: str, blocks_wanted: slice = slice(None)) -> dict[str, Any]:
    """Run the page's blocks on this rank; returns the numbers and strings that they leave behind."""
    os.chdir(folder)
    if dist.is_initialized():  # that of the page before
        dist.destroy_process_group()
    names: dict[str, Any] = {"__name__": "__main__"}
    text = page.read_text("utf-8")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")  # its inductor, when imported
        for block in blocks(page)[blocks_wanted]:
            kind = block.lastgroup or ""
            lines_before = text.count("\n", 0, block.start(kind))  # so that a traceback shows the page's own lines
            exec(compile("\n" * lines_before + block[kind], str(page), "exec"), names)
    return {name: value for name, value in names.items() if isinstance(value, int | float | str)}


@each_page
def test_snippets_run_as_pasted(page: Path, pools: Pools, tmp_path: Path) -> None:
    pools.run(2, run_page, page, str(tmp_path))


def test_the_whole_training_script_trains_and_resumes(pools: Pools, tmp_path: Path) -> None:
    page = ROOT / "docs" / "training-loop.md"
    [number] = [number for number, block in enumerate(blocks(page)) if "checkpointer.restore()" in block[0]]
    place = slice(number, number + 1)
    first, other = pools.run(2, run_page, page, str(tmp_path), place)
    assert first["accuracy"] == other["accuracy"] > 0.9
    assert first["resumed_at"] == 0
    saved = {path.name for path in (tmp_path / "runs" / "1").glob("step-*")}
    [again, _] = pools.run(2, run_page, page, str(tmp_path), place)
    assert again["resumed_at"] == 3
    assert {path.name for path in (tmp_path / "runs" / "1").glob("step-*")} == saved


def test_the_page_about_checkpoints_resumes(pools: Pools, tmp_path: Path) -> None:
    for _ in range(2):
        for names in pools.run(2, run_page, ROOT / "docs" / "checkpoints.md", str(tmp_path)):
            assert names["best_acc1"] == 30.0
    assert len(list((tmp_path / "runs" / "7").iterdir())) == 3


@each_page
def test_little_is_hidden_from_readers(page: Path) -> None:
    hidden = "".join(block["hidden"] or "" for block in blocks(page))
    assert hidden.count("\n") <= MOST_HIDDEN


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_no_snippet_goes_unnoticed(page: Path) -> None:
    text = page.read_text("utf-8")
    assert set(re.findall(r"^ *```(.*)$", text, re.MULTILINE)) <= {"python", ""}
    assert len(re.findall(r"^ *(?:```|<!-- )python", text, re.MULTILINE)) == len(blocks(page))


MOST_COLUMNS = 99  # what the site shows in one line in a window of 1,400 pixels (docs/site/paceline.css)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_lines_of_code_fit_the_site(page: Path) -> None:
    # Comments stood far to the right of commands, and wrapped into the next line. Put a long one above its command.
    text = page.read_text("utf-8")
    fenced = re.findall(r"^```.*?^```$", text, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^(```|<!-- ).*?^(```|-->)$", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"(?<=\n)\n((?: {4}.*\n|\n(?= {4}))+)", rest)
    code = [*fenced, *(re.sub("^ {4}", "", block, flags=re.MULTILINE) for block in indented)]
    drawn = [block for block in code if "──" in block]  # smaller on the site; and prose that is printed with a table
    lines = [line for block in code if block not in drawn for line in block.splitlines()]
    assert not [line for line in lines if len(line) > MOST_COLUMNS]


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_public_names_in_prose_exist(page: Path) -> None:
    for path in set(re.findall(r"`paceline\.([A-Za-z_.]+\w)\(?", page.read_text("utf-8"))):
        resolve_name(f"paceline.{path}")


LOOPS = "Checkpointer predict clip_grad_norm_ unwrap accumulate evaluate mean_over_ranks"
TRAINER = "JsonLines TensorBoard"


@pytest.mark.parametrize("name", [*LOOPS.split(), *TRAINER.split()])
def test_each_helper_of_a_plain_loop_is_shown_in_use(name: str) -> None:
    # They were there for long, and a newcomer who read the README wrote each of them anew.
    shown = [block["shown"] or "" for page in WITH_BLOCKS for block in blocks(page)]
    assert any(re.search(rf"\b{name}\b\s*[(=]", code) for code in shown)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    # Files were moved, and a page went on linking to where they had been.
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text("utf-8")):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


HARDWARE = re.compile(r"\b(?:GPUs?|CUDA|NCCL|H100|ARM|(?:several|two|real|more) (?:real )?hosts)\b")
SEEN = re.compile(
    r"\buntested\b|\b(?:not|never|nothing) (?:\w+ ){0,3}(?:tested|tried|run|ran|checked)\b"
    r"|\b(?:has|have|been) (?:not )?(?:been )?(?:run|tried|tested|checked)\b"
    r"|\b(?:tried|tested|checked|ran|taken) on (?:one|an?|two|several|real)\b",
    re.IGNORECASE,
)
STATUS = ROOT / "docs" / "gpu-status.md"


@pytest.mark.parametrize(
    "text",
    [
        "CUDA and NCCL are untested: see the top.",
        "checked on one H100 with PyTorch 2.11",
        "Nothing of this was checked on a GPU or on\nseveral hosts.",
        "One profile of a small model has been taken on a GPU, on one rank.",
        "Not tried: GPUs.",
        "It has not run on CUDA yet.",
        "- Several real hosts are untested.",
    ],
)
def test_a_statement_of_what_ran_on_gpus_is_recognized(text: str) -> None:
    assert statements_on_hardware(text)


def statements_on_hardware(text: str) -> list[str]:
    """Return the sentences that say what ran on GPUs or hosts, and do not link to the page that does."""
    sentences = re.split(r"(?<=[.!?]) (?=[A-Z])|(?<=[.!?])\n|\n(?=\s*\n|\s*(?:#\s*)?(?:[-*|]|\d+\.) )", text)
    prose = [re.sub(r"`[^`]*`", "", sentence).strip() for sentence in sentences]
    return [row for row in prose if HARDWARE.search(row) and SEEN.search(row) and "gpu-status" not in row]


def test_one_page_says_what_has_run_on_gpus_and_several_hosts() -> None:
    # The README's top, its table and two places of one page contradicted each other.
    folders = [(ROOT / "docs", "md"), (ROOT / "examples", "*"), (ROOT / "src", "py")]
    files = [path for folder, suffix in folders for path in folder.glob(f"**/*.{suffix}") if path.is_file()]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *files]
    found = {
        str(path.relative_to(ROOT)): statements
        for path in pages
        if path != STATUS and path.suffix != ".pyc" and (statements := statements_on_hardware(path.read_text("utf-8")))
    }
    assert not found, f"say it in docs/gpu-status.md, and link there: {found}"


CONTRACT = re.compile(r'^containers = \["([\w.]+)"\]$.*?^layers = \[$(.*?)^\]$', re.DOTALL | re.MULTILINE)
LAYERS = {
    package: [set(row.split(" | ")) for row in re.findall(r'"(.+)"', layers)]
    for package, layers in CONTRACT.findall((ROOT / "pyproject.toml").read_text("utf-8"))
}
"""The layers of each package that import-linter knows, by its name."""


def rooms(folder: Path) -> set[str]:
    """Return the modules and packages directly in a folder."""
    return {path.stem for path in folder.glob("*.py") if path.stem != "__init__"} | {
        path.name for path in folder.iterdir() if (path / "__init__.py").exists()
    }


def drawn(text: str) -> list[set[str]] | None:
    """Return the rows of a picture of rooms, without the remarks that stand beside them."""
    picture = re.search(r"do not import each other:\n\n((?:    .+\n?)+)", text)
    return picture and [set(re.split(r"  +", row.strip())[0].split(" · ")) for row in picture[1].splitlines()]


def test_the_picture_in_contributing_is_that_of_the_tree_and_of_import_linter() -> None:
    # They are edited in pyproject.toml, where import-linter reads them, and the page fell behind.
    rows = drawn((ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert rows == LAYERS["paceline"]
    assert set.union(*rows) == rooms(SOURCE)
