"""The pages of the site: their files, titles and order."""

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
        "planning": "Planning",
        "profiler": "Profiler",
        "stragglers": "Stragglers",
        "collectives": "Collectives",
        "backend": "Process group",
    },
}
"""The pages of ``docs/`` with short titles, by heading of the sidebar."""

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
"""The last section of the sidebar. Some of its pages are generated."""

ELSEWHERE = {
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


def pages() -> dict[str, str]:
    """Return a dict from paths in the repository to pages of the site, without suffix."""
    files = [path for path in sorted((ROOT / "docs").glob("**/*.md")) if path.name != "README.md"]  # index of a folder
    docs = [path.relative_to(ROOT).as_posix() for path in files]
    pages_of_docs = {path: path.removeprefix("docs/").removesuffix(".md") for path in docs}
    ran = {path.relative_to(ROOT).as_posix(): f"notebooks/{path.stem}" for path in NOTEBOOKS}
    return ELSEWHERE | pages_of_docs | ran | FOLDERS
