"""The pages of the site: their files and order."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

NAV = {
    "Start": ["quickstart", "data-loading", "training-loop", "trainer", "drop-in", "examples", "recipes", "notebooks"],
    "Train": [
        "data-parallel",
        "uneven-inputs",
        "balance",
        "same-bits",
        "sync-batch-norm",
        "compression",
        "torch-compile",
        "checkpoints",
        "sharded-optimizer",
        "slow-networks",
    ],
    "Run": ["launching", "clusters", "failures", "gpu", "gpu-status", "testing"],
    "Look inside": ["planning", "profiler", "stragglers", "collectives", "backend", "json-output"],
}
"""The pages of ``docs/``, by heading of the sidebar."""

ABOUT = [
    "README <readme>",
    "promises",
    "security",
    "measurements",
    "benchmarks",
    "decisions/index",
    "contributing",
    "ddp",
    "comm",
    "changelog",
]
"""The last section of the sidebar. Some of its pages are generated. The heading of the README is the project's name."""

JSON_OUTPUT = "docs/json-output.json"
"""Descriptions of the fields in JSON output."""
ELSEWHERE = {
    JSON_OUTPUT: "json-output",
    "README.md": "readme",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "SECURITY.md": "security",
    "src/paceline/ddp/README.md": "ddp",
    "src/paceline/comm/README.md": "comm",
}
"""Pages outside ``docs/``."""

FOLDERS = {"docs/decisions": "decisions/index", "benchmarks/results": "benchmarks", "notebooks": "notebooks/index"}
"""Linked folders, and the page that lists the contents of each."""


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def quickstart() -> str:
    """Return the README's section on converting a script, as a page."""
    [section] = re.findall(r"^## Convert a script\n(.*?)^## ", (ROOT / "README.md").read_text("utf-8"), re.M | re.S)
    return f"# Quickstart\n{section}"


def pages() -> dict[str, str]:
    """Return a dict from paths in the repository to pages of the site, without suffix."""
    files = [path for path in sorted((ROOT / "docs").glob("**/*.md")) if path.name != "README.md"]  # index of a folder
    docs = [path.relative_to(ROOT).as_posix() for path in files]
    pages_of_docs = {path: path.removeprefix("docs/").removesuffix(".md") for path in docs}
    ran = {path.relative_to(ROOT).as_posix(): f"notebooks/{path.stem}" for path in NOTEBOOKS}
    return ELSEWHERE | pages_of_docs | ran | FOLDERS
