"""Modules shared by several packages. They import only each other and the errors."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

OWN_BACKEND = "paceline"
"""Name of the backend that ``import paceline`` registers, except in the process of the command line."""


def on_first_use(package: str, homes: dict[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for `package` that imports a public name from its module in `homes` on first use."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return get
