"""The notebooks run completely with their solutions, and test cells of exercises give hints."""

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


MISTAKES: dict[str, list[list[tuple[dict[str, str], str]]]] = {
    "1-ddp-from-scratch": [
        [
            ({}, "changed nothing here"),
            ({"tensor += received": "tensor = tensor + received"}, "in place (tensor += received)"),
            ({"tensor += received": "tensor += received / world_size"}, "not 1111"),
            ({"dist.recv(received, other)": "dist.recv(tensor, other)", "tensor += received": "pass"}, "not 1111"),
            ({"range(1, world_size)": "[1]", "else:": "elif rank == 1:"}, "the sum is 11, not 1111"),
            ({"dist.send(tensor, other)": "pass", "dist.recv(tensor, 0)": "pass"}, "sends the sum"),
            ({"dist.send(tensor, other)": "dist.send(tensor / world_size, other)"}, "this is the mean"),
            (
                {"received =": "received = [dist.send(tensor, r) for r in (1, 2, 3)]; received ="},
                "not every rank can send first",
            ),
        ],
        [
            ({}, "changed nothing"),
            ({"parameter.grad /= world_size": "pass"}, "4 times the mean"),
            ({"parameter.grad /= world_size": "parameter.grad /= 2"}, "2 times the mean"),
            ({"parameter.grad)": "grad := parameter.grad.clone())", "parameter.grad /=": "grad /="}, "in place"),
            (
                {"all_reduce(parameter.grad)": "dist.all_reduce(parameter.grad, async_op=True)"},
                "wait before you divide",
            ),
        ],
    ],
    "2-buckets-and-overlap": [
        [
            ({}, "Overlap sent nothing"),
            ({"if self.bucket:": "if False:"}, "finish has to launch it"),
            ({">= self.cap_bytes": ">= 1e9"}, "Overlap sent nothing during backward"),
            ({">= self.cap_bytes": ">= 0"}, "16 full buckets instead of 2"),
            ({"self.bucket = []": "pass"}, "begin an empty bucket"),
            ({", async_op=True": ""}, "all_reduce makes backward wait"),
            ({", async_op=True": ", dist.ReduceOp.SUM, None, False"}, "all_reduce makes backward wait"),
            ({"self.bucket = []": "self.bucket.clear()"}, "Begin a new one"),
            ({"work.wait()": "pass"}, "wait for every all-reduce"),
            ({"flat /= world_size": "flat /= world_size**2"}, "divide once"),
            ({"self.running.append((self.bucket, flat, work))": "pass"}, "keep each bucket in self.running"),
            ({"flat /= world_size": "pass"}, "these are sums"),
            ({"parameter.grad.copy_(": "parameter.clone().copy_("}, "copy the means into"),
            ({"self.running = []": "pass"}, "must leave self.running empty"),
        ],
    ],
    "3-ring-all-reduce": [
        [
            ({}, "incoming has not changed"),
            ({"dist.recv(": "dist.irecv("}, "wait until the data has arrived"),
            ({"sending.wait()": "pass"}, "wait for isend"),
            ({"recv(incoming, preceding)": "recv(outgoing, preceding)"}, "outgoing has changed"),
            ({", following": ", preceding", "(incoming, preceding": "(incoming, following"}, "instead of rank"),
            ({"dist.isend": "dist.send", "sending.wait()": "pass"}, "not every rank can send first"),
        ],
        [
            ({}, "exchanged nothing"),
            ({".add_(received)": ".copy_(received)"}, "not the sum of all ranks"),
            ({"(n - 1):\n            exchange": "(0):\n            exchange"}, "one round is missing"),
            ({"(n - 1):\n            exchange": "(n):\n            exchange"}, "7 exchanges instead of 2 * 3"),
            ({"exchange(chunks[(rank - s + 1) % n],": "exchange(chunks[(rank - s) % n],"}, "not the sum of all ranks"),
            ({"empty_like(chunks[(rank - s - 1) % n])": "empty_like(chunks[(rank - s) % n])"}, "differ in size"),
            ({"tensor_split": "chunk"}, "too few chunks"),
            ({"exchange(chunks[(rank - s) % n], received)": "exchange(tensor, received)"}, "differ in size"),
            ({".add_(received)": ".add_(chunks[(rank - s) % n])"}, "to another than its own"),
            (
                {"n], chunks[(rank - s) % n])": "n], a := -chunks[(rank - s) % n]); chunks[(rank - s) % n].add_(a)"},
                "added twice",
            ),
        ],
    ],
}
"""For each exercise, edits that break its solution, and the hint its test cell must give. Without edits, the exercise
stays empty."""


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


@pytest.mark.parametrize("stem", MISTAKES)
def test_solution_replaces_only_an_empty_function(stem: str) -> None:
    """A function that calls no global name, such as one made of inner functions, was overwritten."""
    text = "\n".join(cell.source for cell in cells(FOLDER / f"{stem}.ipynb"))
    [source] = re.findall(r"def is_empty.*?empty.__code__.co_code$", text, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(source, names)
    exec('def empty(tensor):\n    """Docstring."""\n    # Your code.', names)
    exec('def changed(tensor):\n    """Docstring."""\n    tensor *= 4', names)
    assert names["is_empty"](names["empty"])
    assert not names["is_empty"](names["changed"])


@pytest.mark.parametrize("stem", MISTAKES)
def test_test_cell_names_the_mistake(stem: str, shared_kernel: Kernel) -> None:
    shared_kernel.run("%dist_shutdown")
    remaining = cells(FOLDER / f"{stem}.ipynb")
    for mistakes in MISTAKES[stem]:
        while "exercise" not in tags(remaining[0]):
            shared_kernel.run(remaining.pop(0).source)
        exercise, solution, test = (cell.source for cell in remaining[:3])
        for edits, hint in mistakes:
            shared_kernel.run(exercise)
            if edits:
                assert not shared_kernel.run(edited(solution, edits)).error
            error = shared_kernel.run(test).error
            hints = [line for line in error.splitlines() if line.startswith("AssertionError: ")]
            assert any(hint in line for line in hints), f"{edits}\n{error}"
        shared_kernel.run(exercise)
        for source in (solution, test, edited(solution, edits), test):  # the second solution changes nothing
            done = shared_kernel.run(source)
            assert not done.error, done.error
        del remaining[:3]
    assert not any("exercise" in tags(cell) for cell in remaining)


def edited(source: str, edits: dict[str, str]) -> str:
    for old, new in edits.items():
        assert old in source
        source = source.replace(old, new)
    return source


@pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
def test_notebook_is_stored_with_its_output(path: Path) -> None:
    # Readers of the repository see the pictures without running the notebook.
    for cell in cells(path):
        assert ("image/png" in str(cell.outputs)) == ("plt.show()" in cell.source), cell.source
        assert any(output.output_type == "error" for output in cell.outputs) == (MEANT in tags(cell)), cell.source
    text = path.read_text("utf-8")
    assert all((path.parent / link).exists() for link in re.findall(r"\]\((\.\./[^)#]+)", text))
    assert "/home/" not in text


@pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
def test_notebook_hides_answers_and_solutions(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text.count("**Question ") == text.count("<details><summary>Answer</summary>")
    for cell in cells(path):
        assert ("solution" in tags(cell)) == cell.metadata.get("jupyter", {}).get("source_hidden", False)
