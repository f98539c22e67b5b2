"""What is public is listed, sorted and described."""

from __future__ import annotations

import inspect
import re
from types import ModuleType

import pytest

import paceline
import paceline.checkpoint
import paceline.compression
import paceline.data
import paceline.ddp
import paceline.nn
import paceline.optim
import paceline.testing
import paceline.train
from paceline import errors

MODULES = [
    paceline,
    paceline.checkpoint,
    paceline.compression,
    paceline.data,
    paceline.ddp,
    paceline.nn,
    paceline.testing,
    paceline.optim,
    paceline.train,
]
each_module = pytest.mark.parametrize("module", MODULES, ids=[module.__name__ for module in MODULES])


@each_module
def test_all_is_complete_and_sorted(module: ModuleType) -> None:
    public = {name for name, value in vars(module).items() if not (name.startswith("_") or inspect.ismodule(value))}
    listed = list(module.__all__)
    assert listed == sorted(listed)
    assert public == {name for name in listed if not inspect.ismodule(getattr(module, name))}


@each_module
def test_every_public_name_has_a_docstring(module: ModuleType) -> None:
    assert [name for name in module.__all__ if not (getattr(module, name).__doc__ or "").strip()] == []


def test_the_tree_of_errors_shows_every_class_and_no_other() -> None:
    # A class that nothing raised stood in the tree for long.
    own = [value for value in vars(errors).values() if getattr(value, "__module__", "") == errors.__name__]
    classes = [value.__name__ for value in own if inspect.isclass(value)]
    tree = re.findall(r"^    [│├└─ ]*([A-Z]\w+)  ?", errors.__doc__ or "", re.MULTILINE)
    assert sorted(tree) == sorted(classes)


def test_an_error_stands_under_its_base_in_the_tree() -> None:
    lines = [line for line in (errors.__doc__ or "").splitlines() if re.match(r"    [│├└─ ]*[A-Z]", line)]
    path: list[str] = []
    for line in lines:
        name = re.findall(r"[A-Z]\w+", line)[0]
        depth = (line.index(name) - 4) // 4
        path = [*path[:depth], name]
        if depth:
            assert path[depth - 1] in [base.__name__ for base in getattr(errors, name).__bases__], name
