"""Models of the user's own code, by an import path such as ``package.module:build`` or ``file.py:Net``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial, reduce
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.tools.memory_estimate.built_model import BuiltModel, described

Result = TypeVar("Result")
IMPORTABLE = "name one that Python can import from here, as in package.module:build or model.py:build"
BUILT = "correct it, or name a module that is built already, such as that of a line model = Net() in the file"


def is_import_path(text: str) -> bool:
    """Return whether `text` is an import path, such as ``model.py:build``, rather than a model's name."""
    module, colon, attribute = text.rpartition(":")
    names = attribute.split(".") + ([] if module.endswith(".py") else module.split("."))
    return bool(colon) and all(map(str.isidentifier, names))


def build_python_model(path: str) -> BuiltModel:
    """Import the object at `path`, and call it on the meta device unless it is a module already.

    Prints of the user's code go to stderr, because ``--json`` writes to stdout.

    Raises:
        UsageError: if it cannot be imported, takes arguments, fails, or gives no module.
    """
    where, _, attribute = path.rpartition(":")
    with redirect_stdout(sys.stderr):
        import_it = _import_file if where.endswith(".py") else _import_by_name
        source = _run(path, "cannot be imported", IMPORTABLE, partial(import_it, where))
        try:
            found = reduce(getattr, attribute.split("."), source)
        except AttributeError:
            raise UsageError(f"{path}: {where} has no {attribute!r}; name a function, a class or a module") from None
        if isinstance(found, nn.Module):
            return BuiltModel(found)
        if not callable(found):
            raise UsageError(f"{path} is of type {type(found).__name__}; name a function that returns an nn.Module")
        _validate_no_arguments(path, found)
        with torch.device("meta"):
            built = _run(path, "failed on the meta device, where tensors have no values", BUILT, found)
    if not isinstance(built, nn.Module):
        value = "None" if built is None else f"a value of type {type(built).__name__}"
        raise UsageError(f"{path} returned {value}; name a function that returns an nn.Module")
    return BuiltModel(built)


def _import_by_name(name: str) -> Any:
    # As `python -m` does; a command has its own folder in that place.
    sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _import_file(file: str) -> Any:
    path = Path(file).absolute()
    if not path.is_file():
        raise UsageError(f"there is no file {file}; name a Python file, as in model.py:build")
    sys.path.insert(0, str(path.parent))
    name = f"estimated_{path.stem}"  # a name of its own: a file model.py must not replace a module model of others
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _validate_no_arguments(path: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a function written in C that does not tell its arguments
    try:
        signature.bind()
    except TypeError as error:
        raise UsageError(
            f"{path} takes arguments ({error}); name a function without any that builds the model, such as "
            f"def build(): return {path.rpartition(':')[2]}(…)"
        ) from None


def _run(path: str, fault: str, remedy: str, function: Callable[[], Result]) -> Result:
    """Call a user's code.

    Raises:
        UsageError: names the error and the user's line that raised it.
    """
    try:
        return function()
    # Ours, such as for a file that is not there, and complete.
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{path} {fault}: {described(error)}; {remedy}") from error
