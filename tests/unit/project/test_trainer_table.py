"""The table of docs/trainer.md: our tests in it exist, and so do the options of other trainers."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch

import paceline
from paceline import train

ROOT = Path(__file__).parents[3]
TABLE = (ROOT / "docs" / "trainer.md").read_text("utf-8").split("## Beside other trainers")[1]
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE.splitlines() if line.startswith("| ")][1:]


def names(column: int) -> set[str]:
    """Return the names in a column, without their arguments."""
    return {name.removesuffix("()") for row in ROWS for name in re.findall(r"`([^`]+)`", row[column])}


def lightning() -> set[str]:
    pl = pytest.importorskip("pytorch_lightning", reason="Lightning's Trainer is not installed")
    known = {*inspect.signature(pl.Trainer.__init__).parameters, *dir(pl.Trainer), *dir(pl.callbacks)}
    return {*known, *vars(pl.utilities.types.LRSchedulerConfig(None)), *dir(pl.Trainer(logger=False, barebones=True))}


def accelerate() -> set[str]:
    accelerator = pytest.importorskip("accelerate").Accelerator
    return {*dir(accelerator), *inspect.signature(accelerator.__init__).parameters}


def hugging_face() -> set[str]:
    """Read the names from the source; the import takes seconds."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        pytest.skip("transformers is not installed")
    known: set[str] = set()
    for file in ("training_args.py", "trainer.py", "trainer_callback.py"):
        for node in ast.walk(ast.parse(Path(found.origin).with_name(file).read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name in ("TrainingArguments", "Trainer", "TrainerControl"):
                known |= {ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)}
                known |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    return known


def ours() -> set[str]:
    options = {field.name for field in dataclasses.fields(train.TrainConfig)}
    of_runs = {f"run.{name}" for name in dir(train.Run)}
    of_checkpoints = inspect.signature(paceline.Checkpointer).parameters
    return {*options, *of_runs, *of_checkpoints, *dir(train.Trainer), *dir(train), *dir(torch.optim.lr_scheduler)}


@pytest.mark.parametrize(("column", "known"), [(1, ours), (2, lightning), (3, accelerate), (4, hugging_face)])
def test_what_a_trainer_is_said_to_have_it_has(column: int, known: object) -> None:
    assert names(column)
    assert names(column) <= known()  # type: ignore[operator]


def test_every_row_names_a_test_that_there_is() -> None:
    tests = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(ROWS) > 5
    for row in ROWS:
        [name] = re.findall(r"`(test_\w+)`", row[5])
        assert f"def {name}(" in tests, row[0]
