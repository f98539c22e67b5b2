"""Which file of the repository is which page of the site, and in which order a reader finds them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

NAV = {
    "Start": {
        "training-loop": "Training loop",
        "trainer": "Trainer",
        "drop-in": "Migrate from torch DDP",
        "examples": "Examples",
        "recipes": "Recipes",
        "notebooks": "Notebooks",
    },
    "Train": {
        "data-parallel": "Data parallelism",
        "uneven-inputs": "Uneven inputs",
        "balance": "Balance work across ranks",
        "same-bits": "Same bits",
        "sync-batch-norm": "SyncBatchNorm",
        "compression": "Compression",
        "torch-compile": "torch.compile",
        "checkpoints": "Checkpoints",
        "sharded-optimizer": "Sharded optimizer",
    },
    "Run": {
        "launching": "Launching",
        "clusters": "Clusters",
        "failures": "Failures",
        "gpu": "GPUs",
        "gpu-status": "GPU status",
        "testing": "Testing",
    },
    "Look inside": {
        "profiler": "Profiler",
        "stragglers": "Stragglers",
        "collectives": "Collectives",
        "backend": "Process group",
    },
}
"""Headings of the sidebar, and the pages of ``docs/`` below each with their short titles."""

LEFT_OUT: dict[str, str] = {}
"""Pages of ``docs/`` that are not on the site, and why."""

ABOUT = {
    "readme": "README",
    "promises": "Guarantees and API stability",
    "security": "Security",
    "measurements": "Measurements",
    "benchmarks": "Benchmarks",
    "decisions/index": "Decisions",
    "contributing": "Contributing",
    "ddp": "The step in ten stages",
    "comm": "Shared memory",
    "changelog": "Changelog",
}
"""The last part of the sidebar; some of its pages are made when the site is."""

ELSEWHERE = {
    "README.md": "readme",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "SECURITY.md": "security",
    "src/paceline/ddp/README.md": "ddp",
    "src/paceline/comm/README.md": "comm",
}
"""Pages that stand outside ``docs/``."""

FOLDERS = {"docs/decisions": "decisions/index", "benchmarks/results": "benchmarks", "notebooks": "notebooks/index"}
"""Folders that pages link to, and the page that lists the contents of each."""


def pages(root: Path = ROOT) -> dict[str, str]:
    """Return the place on the site of each page, by its path in the repository; neither has a suffix on the site."""
    found = [path for path in sorted((root / "docs").glob("**/*.md")) if path.name != "README.md"]  # a folder's index
    docs = [path.relative_to(root).as_posix() for path in found]
    own = {path: path.removeprefix("docs/").removesuffix(".md") for path in docs}
    shown = {path: page for path, page in own.items() if page not in LEFT_OUT}
    ran = {path.relative_to(root).as_posix(): f"notebooks/{path.stem}" for path in notebooks(root)}
    return ELSEWHERE | shown | ran | {path: page for path, page in FOLDERS.items() if (root / path).is_dir()}


def notebooks(root: Path = ROOT) -> list[Path]:
    """Return the notebooks, in their order; none where the folder is not there."""
    return sorted((root / "notebooks").glob("*.ipynb"))
