"""Decides whether ranks are forked from a process that has imported torch, and what else that process imports.

The decision reads the script, which costs microseconds, and is the same for every start of the ranks.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from paceline.core.torch_internals.distributed.elastic import OPTIMIZERS_NEED
from paceline.errors import UsageError

SETTING = "PACELINE_PRELOAD"
"""Environment variable: with ``0`` every rank is a new interpreter."""

OTHER_WAYS = re.compile(r"\b(?:importlib|__import__|runpy|exec)\b")
TRAINING = re.compile(r"optim|compile|[Tt]rain|paceline")
"""Words of scripts that are likely to make an optimizer, which needs more than ``import torch``."""
LIKE_TORCH = {"torch", "torchvision", "torchaudio", "numpy"}

LIBRARY = (
    "paceline",
    "paceline.train",
    "paceline.nn",
    "paceline.compression",
    "paceline.core.processes.rank_lookup",
    "paceline.comm.c10d.process_group",
)
"""Modules for programs that use Paceline, which imports most of its modules lazily."""

BINDING = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}

READ_AT_IMPORT = re.compile(r"(?:OMP|GOMP|KMP|MKL|OPENBLAS|DNNL|ONEDNN|ATEN|PYTORCH|TORCH)(?!_NCCL)\w*_\w+")
"""Environment variables that torch, or a library of it, reads when it is imported."""
SETTERS = {"setdefault", "putenv", "update"}
"""Calls by which scripts set environment variables."""


@dataclass(frozen=True)
class Preloading:
    """The modules that are imported before ranks are forked; none if every rank is a new interpreter.

    ``note`` tells the user why there are none, where that may be a surprise.
    """

    modules: tuple[str, ...] = ()
    note: str | None = None


def decide(command: Sequence[str]) -> Preloading:
    """Return the modules to import before the ranks of `command` are forked."""
    setting = os.environ.get(SETTING, "1")
    if setting not in ("0", "1"):
        raise UsageError(f"{SETTING}={setting!r} is neither 0 nor 1; with 0 every rank imports torch itself")
    # Another program, and options before the script other than ours, are left to a new process.
    if setting == "0" or not can_fork() or list(command[:2]) != [sys.executable, "-u"]:
        return Preloading()
    name, text = source(command[2:])
    if text is None:
        return Preloading()
    if variable := set_before_import(text):
        return Preloading(
            note=f"note: {name} sets {variable}, which is read while torch is imported; so every rank imports torch "
            "itself. Set it outside for a faster start"
        )
    return Preloading(modules_for(text))


def binds_threads(environment: Mapping[str, str]) -> bool:
    """Return whether OpenMP binds threads to cores, and so chooses them when it is loaded."""
    return not BINDING.isdisjoint(environment)


def can_fork() -> bool:
    """Return whether this system supports the fork server."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return sys.platform == "linux"


def source(arguments: Sequence[str]) -> tuple[str, str | None]:
    """Return the name and the text of the program that ``python ARGUMENTS`` runs; None if an option precedes it."""
    if arguments[:1] in (["-m"], ["-c"]) and len(arguments) > 1:
        name = arguments[1]
        return name, _read(_module_file(name)) if arguments[0] == "-m" else name
    if not arguments or arguments[0].startswith("-"):
        return "", None
    return arguments[0], _read(Path(arguments[0]))


def _module_file(name: str) -> Path | None:
    """Return the file of a module, found without importing its packages."""
    top, *rest = name.split(".")
    spec = PathFinder.find_spec(top, [os.getcwd(), *sys.path])
    if spec is None or spec.origin is None:
        return None
    if not rest:
        return Path(spec.origin).with_name("__main__.py") if spec.submodule_search_locations else Path(spec.origin)
    place = Path(spec.origin).parent.joinpath(*rest)
    return place / "__main__.py" if place.is_dir() else place.with_suffix(".py")


def _read(file: Path | None) -> str:
    """Return the text of a program; that of one that cannot be read may import everything."""
    try:
        return file.read_text(errors="replace") if file is not None and file.is_file() else "import torch.optim"
    except OSError:
        return "import torch.optim"


def set_before_import(text: str) -> str | None:
    """Return an environment variable that the program `text` sets, and torch reads when it is imported."""
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.Assign):
            targets = [target for each in node.targets for target in ast.walk(each)]
            places: list[ast.AST] = [target.slice for target in targets if isinstance(target, ast.Subscript)]
        elif isinstance(node, ast.AugAssign):
            places = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SETTERS:
            places = [*node.args, *node.keywords]
        else:
            continue
        for part in (part for place in places for part in ast.walk(place)):
            name = part.arg if isinstance(part, ast.keyword) else part.value if isinstance(part, ast.Constant) else None
            if isinstance(name, str) and READ_AT_IMPORT.fullmatch(name):
                return name
    return None


def modules_for(text: str) -> tuple[str, ...]:
    """Return the modules to import for the program `text`; none if it imports nothing but the standard library."""
    others = imported(text) - sys.stdlib_module_names
    if not others and not OTHER_WAYS.search(text):
        return ()
    modules = ["torch"]
    if TRAINING.search(text) or others - LIKE_TORCH:  # the user's own modules are not inspected
        modules.append(OPTIMIZERS_NEED)
    if "paceline" in text:
        modules += LIBRARY
    return tuple(modules)


def imported(text: str) -> set[str]:
    """Return the top-level modules that the program `text` imports anywhere; ``.`` for its own package."""
    found = set()
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level or node.module is None else node.module.partition(".")[0])
    return found


def _parsed(text: str) -> ast.Module:
    """Return the program `text` as a tree; an empty one if it is not valid Python, which each rank will report."""
    try:
        return ast.parse(text)
    # ValueError: null bytes. The last two: ast.parse() raises them for programs that are nested too deeply.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def setting(descriptor: int, modules: Sequence[str]) -> Mapping[str, str]:
    """Return the environment that makes a rank's command a fork server, see ``hook/sitecustomize.py``."""
    return {"PACELINE_FORK_SERVER": " ".join([str(descriptor), *modules])}
