"""Public names are listed and sorted."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import typing
from pathlib import Path
from types import ModuleType

import pytest

import paceline
from processes import TIMEOUT_S

PACKAGES = ("checkpoint", "compression", "data", "ddp", "nn", "optim", "testing", "train")
MODULES = [paceline, *(importlib.import_module(f"paceline.{name}") for name in PACKAGES)]
TYPING = (typing.TYPE_CHECKING, typing.Any)
"""Names that a module uses internally."""
each_module = pytest.mark.parametrize("module", MODULES, ids=[module.__name__ for module in MODULES])


@each_module
def test_all_is_complete_and_sorted(module: ModuleType) -> None:
    values = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    public = {name for name, value in values.items() if not inspect.ismodule(value) and value not in TYPING}
    listed = list(module.__all__)
    assert listed == sorted(listed)
    assert public == {name for name in listed if not inspect.ismodule(getattr(module, name))}


LAZY = """
import sys
import torch
before = set(sys.modules)
import paceline
import torch.distributed as dist
loaded = sorted(name for name in set(sys.modules) - before if name.startswith("paceline."))
assert "paceline" in dist.Backend.backend_list
assert len(loaded) < 10, loaded
# A plain script makes the group by its backend's name.
dist.init_process_group("paceline", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
assert (dist.get_backend(), type(dist.group.WORLD).__name__) == ("paceline", "PacelineProcessGroup")
dist.destroy_process_group()
for name in ("typo", "_private", "ddp_"):
    assert not hasattr(paceline, name), name
import paceline.ddp
# What few wrappers need is loaded when one does.
rare = ("paceline.ddp.virtual_ranks", "paceline.ddp.join.", "paceline.ddp.comm_hook", "paceline.data")
assert not [name for name in sys.modules if name.startswith(rare)]
from paceline import DistributedDataParallel, train
assert paceline.DistributedDataParallel is DistributedDataParallel is paceline.ddp.DistributedDataParallel
assert paceline.train is train is sys.modules["paceline.train"]
assert set(paceline.__all__) <= set(dir(paceline))
sys.excepthook = sys.__excepthook__  # and not that of torch, of the group that was made above
world = paceline.init()
DistributedDataParallel(torch.nn.Flatten())
"""


def test_names_are_imported_lazily_and_a_mistake_ends_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LAZY], timeout=TIMEOUT_S, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("error: the module has no parameter that requires a gradient")


def test_type_checkers_and_the_interpreter_find_a_name_in_the_same_module() -> None:
    tree = ast.parse(Path(paceline.__file__).read_text())
    [typed] = [each for each in tree.body if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING"]
    homes = {
        name.name: (node.module or "").removeprefix("paceline.")
        for node in typed.body
        if isinstance(node, ast.ImportFrom) and node.module != "paceline"
        for name in node.names
    }
    for name, home in homes.items():
        assert getattr(paceline, name) is getattr(importlib.import_module(f"paceline.{home}"), name)
    others = {name: getattr(paceline, name) for name in set(paceline.__all__) - set(homes)}
    own = ("paceline", "paceline.errors")
    assert [name for name, value in others.items() if not inspect.ismodule(value) and value.__module__ not in own] == []


def test_tests_import_internals_through_insides_alone() -> None:
    others = ("comm", "comm.algorithms", "errors", "integrations.ray", "profiler")
    public = {f"paceline.{name}" for name in (*PACKAGES, *others)}
    imported = [
        f"{path.name}: {node.module}"
        for path in Path(__file__).parents[2].rglob("*.py")
        if path.name != "training.py"  # a script of its own
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("paceline.") and node.module not in public
    ]
    assert imported == []
