"""The notebooks run completely, show their pictures, and fail only in cells tagged for it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from notebook_kernels import Kernel, kernel

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[3] / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
MEANT = "raises-exception"
"""The tag of a cell that is expected to fail."""
SHORTER = {"steps=80": "steps=20", "device, steps=60": "device, steps=20", "number in range(3)": "number in range(1)"}
"""Fewer steps and repetitions than a reader would use."""


def cells(path: Path) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def tags(cell: Any) -> list[str]:
    found: list[str] = cell.metadata.get("tags", [])
    return found


@pytest.fixture(scope="module")
def shared_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel shared by all notebooks, so that torch is loaded once."""
    with kernel(tmp_path_factory.mktemp("notebooks")) as running:
        running.run("from paceline.tools.notebook import execution\nexecution.STUCK_S = 1.0")
        yield running


@pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
def test_notebook_runs_and_shows_its_pictures(path: Path, shared_kernel: Kernel, tmp_path: Path) -> None:
    shutil.copy(path, tmp_path)
    shared_kernel.run("%dist_shutdown")  # ranks of a notebook that failed
    assert not shared_kernel.run(f"%reset -f\n%cd {tmp_path}").error
    pictures = 0
    for cell in cells(path):
        source = cell.source
        for long, short in SHORTER.items():
            source = source.replace(long, short)
        done = shared_kernel.run(source)
        assert bool(done.error) == (MEANT in tags(cell)), f"{source}\n{done.error or done.text}"
        assert ": False" not in done.text, source  # comparisons in cells hold
        kept = [output for output in cell.outputs if output.output_type == "error"]
        if done.error and kept:
            assert done.error_name == kept[0].ename
        pictures += done.pictures
    assert pictures == sum("plt.show()" in cell.source for cell in cells(path)) > 0
    assert [file.name for file in tmp_path.iterdir() if file.name != "__pycache__"] == [
        path.name
    ]  # the notebook cleans up


@pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
def test_notebook_is_stored_with_its_output(path: Path) -> None:
    # Readers of the repository see the pictures without running the notebook.
    for cell in cells(path):
        assert ("image/png" in str(cell.outputs)) == ("plt.show()" in cell.source), cell.source
        assert any(output.output_type == "error" for output in cell.outputs) == (MEANT in tags(cell)), cell.source
    text = path.read_text("utf-8")
    assert all((path.parent / link).exists() for link in re.findall(r"\]\((\.\./[^)#]+)", text))
    assert "/home/" not in text
