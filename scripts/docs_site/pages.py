"""Which file of the repository is which page of the site, and in which order a reader finds them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

NAV = {
    "Start": ["guide", "drop-in", "examples", "recipes"],
    "Train": ["data-parallel", "uneven-inputs", "sync-batch-norm", "compression", "torch-compile", "checkpoints"],
    "Run": ["launching", "failures", "top", "gpu", "nccl"],
    "Look inside": ["profiler", "stragglers", "collectives", "backend", "design"],
}
"""Headings of the sidebar, and the pages of ``docs/`` below each."""

LEFT_OUT: dict[str, str] = {}
"""Pages of ``docs/`` that are not on the site, and why."""

ABOUT = ["promises", "benchmarks", "decisions/index", "contributing", "changelog"]
"""The last part of the sidebar; some of its pages are made when the site is."""

ELSEWHERE = {
    "README.md": "index",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "src/paceline/ddp/README.md": "ddp",
}
"""Pages that stand outside ``docs/``."""

FOLDERS = {"docs/decisions": "decisions/index", "benchmarks/results": "benchmarks", "notebooks": "notebooks/index"}
"""Folders that pages link to, and the page that lists what is in each."""


def pages(root: Path = ROOT) -> dict[str, str]:
    """Return the place on the site of each page, by its path in the repository; neither has a suffix on the site."""
    docs = [path.relative_to(root).as_posix() for path in sorted((root / "docs").glob("**/*.md"))]
    own = {path: path.removeprefix("docs/").removesuffix(".md") for path in docs}
    return ELSEWHERE | {path: page for path, page in own.items() if page not in LEFT_OUT} | FOLDERS


def notebooks(root: Path = ROOT) -> list[Path]:
    """Return the notebooks, in their order; none where the folder is not there."""
    return sorted((root / "notebooks").glob("*.ipynb"))
