"""Reads untrusted files: regular files of limited size, whose JSON is validated against a dataclass."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any, TextIO, get_args, get_origin, get_type_hints

from paceline.core.strict_json import shown

MOST_BYTES = 512 * 2**20
LARGEST = 1e20
"""Largest valid number. Sums and squares of valid numbers stay finite."""
_PLAIN: dict[Any, Any] = {str: str, int: int, bool: bool, float: int | float, type(None): type(None)}


class WrongValue(ValueError):
    """An invalid value. The message describes its location and the problem."""


def new_file(path: Path) -> TextIO:
    """Open an empty file for writing. An existing link is replaced, not followed."""
    path.unlink(missing_ok=True)
    return path.open("x", encoding="utf-8", errors="backslashreplace")  # a path in the text may not be UTF-8


def read_text(path: Path) -> str:
    """Return the text of a file, which must be regular and of limited size."""
    if path.exists() and not path.is_file():
        raise WrongValue("it is not a regular file")
    if (size := path.stat().st_size) > MOST_BYTES:
        raise WrongValue(f"it has {size} bytes, but the limit is {MOST_BYTES}")
    return path.read_text("utf-8")


def instance_of(kind: Any, values: dict[str, Any]) -> Any:
    """Return an instance of the dataclass `kind` with `values`, ignoring unknown keys."""
    hints = get_type_hints(kind)
    fields = dataclasses.fields(kind)
    known = {field.name for field in fields}
    needed = {field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING}
    if missing := sorted(needed - set(values)):
        raise WrongValue(f"{missing[0]} is missing")
    return kind(**{name: _checked(hints[name], value, name) for name, value in values.items() if name in known})


def _checked(kind: Any, value: Any, where: str) -> Any:
    """Return a `value` from JSON as type `kind`."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _checked(inside[0], value, where)
    if origin is dict and isinstance(value, dict):
        return {name: _checked(inside[1], item, f"{where}.{name}") for name, item in value.items()}
    if origin is list and isinstance(value, list):
        return [_checked(inside[0], item, f"{where}[{at}]") for at, item in enumerate(value)]
    if origin is tuple and isinstance(value, list) and len(value) == len(inside):
        return tuple(_checked(item, value[at], f"{where}[{at}]") for at, item in enumerate(inside))
    is_right = isinstance(value, _PLAIN.get(kind, ())) and (kind is bool or not isinstance(value, bool))
    if not is_right or (isinstance(value, int | float) and abs(value) > LARGEST):
        raise WrongValue(f"{where} is {shown(value)}, but must be {getattr(kind, '__name__', kind)}")
    return kind(value)
