"""Run the notebooks and save their outputs: ``make notebooks``.

Exercises run with their solutions. Cells that fail on purpose have the tag ``raises-exception``; any other error ends
the script with its traceback.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
TIMEOUT_S = 120


def run(path: Path) -> float:
    """Run the notebook at `path`, save it with its outputs, and return the seconds."""
    notebook: Any = nbformat.read(path, as_version=4)
    began = time.perf_counter()
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=TIMEOUT_S, record_timing=False, resources=resources).execute()
    seconds = time.perf_counter() - began
    notebook.metadata = {name: notebook.metadata[name] for name in ("kernelspec",)}
    nbformat.write(notebook, path)
    return seconds


def main(names: list[str]) -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or any(name in path.name for name in names):
            print(f"{path.name} … {run(path):.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
