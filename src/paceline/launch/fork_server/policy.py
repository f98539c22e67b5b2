"""Decides whether to fork ranks from a process that has imported torch, and which other modules that process imports.

The decision depends only on the script's source code, so it is the same for every start.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from paceline.core.torch_internals.distributed.elastic import OPTIMIZERS_NEED
from paceline.errors import UsageError

SETTING = "PACELINE_PRELOAD"
"""Environment variable; with ``0``, every rank starts as a new interpreter."""

LIBRARY = (
    "paceline",
    "paceline.train",
    "paceline.nn",
    "paceline.compression",
    "paceline.core.processes.rank_lookup",
    "paceline.comm.c10d.process_group",
)
"""Modules to import for programs that use Paceline, because Paceline itself imports most modules lazily."""

_READ_AT_IMPORT = r"(?:OMP|GOMP|KMP|MKL|OPENBLAS|DNNL|ONEDNN|ATEN|PYTORCH|TORCH)(?!_NCCL|ELASTIC_|I_)(?=\w*_\w)\w+"
SET_BEFORE_IMPORT = re.compile(
    rf"""(?<!\.get\()(?<!getenv\()["']({_READ_AT_IMPORT})["']|[(,](?:\s*#.*\n){{0,9}}\s*({_READ_AT_IMPORT})\s*=(?!=)"""
)
"""Environment variables that torch or one of its libraries reads when it is imported, in quotes or as keywords."""

IMPORTED = re.compile(r"^[ \t]*(?:from|import)[ \t]+(\w*)", re.MULTILINE)
"""The top-level module of an import statement; empty if the import is relative."""


@dataclass(frozen=True)
class Preloading:
    """Modules to import before ranks are forked; empty if every rank starts as a new interpreter.

    ``note`` is a message to the user about why ranks are not forked.
    """

    modules: tuple[str, ...] = ()
    note: str | None = None


def decide(command: Sequence[str]) -> Preloading:
    """Return the modules to import before the ranks of `command` are forked."""
    setting = os.environ.get(SETTING, "1")
    if setting not in ("0", "1"):
        raise UsageError(f"{SETTING}={setting!r} is neither 0 nor 1; with 0 every rank imports torch itself")
    # Programs other than Python and other interpreter options need a new process.
    if setting == "0" or not can_fork() or list(command[:2]) != [sys.executable, "-u"]:
        return Preloading()
    name, text = source(command[2:])
    if text is None:
        return Preloading()
    if variable := SET_BEFORE_IMPORT.search(text):
        return Preloading(
            note=f"note: every rank imports torch itself, because {name} may set {variable[1] or variable[2]}, which "
            "torch reads during its import; set the variable outside of the script for a faster start"
        )
    return Preloading(modules_for(text))


def can_fork() -> bool:
    """Return whether this system supports the fork server."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return sys.platform == "linux"


def source(arguments: Sequence[str]) -> tuple[str, str | None]:
    """Return the name and source of the program run by ``python ARGUMENTS``; no source if there are other options."""
    if arguments[:1] in (["-m"], ["-c"]) and len(arguments) > 1:
        name = arguments[1]
        return name, _read(_module_file(name)) if arguments[0] == "-m" else name
    if not arguments or arguments[0].startswith("-"):
        return "", None
    return arguments[0], _read(Path(arguments[0]))


def _module_file(name: str) -> Path | None:
    """Return the file of a module without importing its packages."""
    top, *rest = name.split(".")
    spec = PathFinder.find_spec(top, [os.getcwd(), *sys.path])
    if spec is None or spec.origin is None:
        return None
    if not rest:
        return Path(spec.origin).with_name("__main__.py") if spec.submodule_search_locations else Path(spec.origin)
    path = Path(spec.origin).parent.joinpath(*rest)
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def _read(file: Path | None) -> str:
    """Return the source code of a program; if it cannot be read, return code that counts as creating an optimizer."""
    try:
        return file.read_text(errors="replace") if file is not None and file.is_file() else "import torch.optim"
    except OSError:
        return "import torch.optim"


def modules_for(text: str) -> tuple[str, ...]:
    """Return the modules to import for the program; empty if it imports only the standard library."""
    if "paceline" in text:
        return ("torch", OPTIMIZERS_NEED, *LIBRARY)
    others = set(IMPORTED.findall(text)) - sys.stdlib_module_names  # such as the project's own, which are not read
    if "torch" not in text and not others:
        return ()
    return ("torch", OPTIMIZERS_NEED) if "optim" in text or others - {"torch"} else ("torch",)
