"""Strict JSON, in which each value has only one representation, and dataclasses from files that are not trusted."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO, get_args, get_origin, get_type_hints

LIMIT = 64 * 2**20
"""Maximum size of a document in bytes, which bounds the memory for reading it."""
BYTES_PER_MARK = 16
"""Minimum average size of a value, in bytes, in a document of :data:`LIMIT` bytes. Without a bound, ``[],[],…`` would
take 25 times its size in memory."""
_MARKS = (b",", b":", b"[", b"{")
"""One of these characters precedes each value except the first."""
MOST_BYTES = 512 * 2**20
"""Maximum size of a file."""
LARGEST = 1e20
"""Largest valid number. Sums and squares of valid numbers stay finite."""
_PLAIN: dict[Any, Any] = {str: str, int: int, bool: bool, float: int | float, type(None): type(None)}


def render(value: Any, indent: int | None = None, limit: int = LIMIT) -> bytes:
    """Return `value` as JSON: ASCII, with keys in insertion order; NaN and infinities raise."""
    separators = (",", ":") if indent is None else (",", ": ")
    raw = json.dumps(value, allow_nan=False, indent=indent, separators=separators).encode("ascii")
    _check_size(raw, limit)
    return raw


def lenient(values: Mapping[str, Any], indent: int | None = None) -> str:
    """Return `values` as JSON for other programs, with null for NaN and infinities."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
    return json.dumps(finite, allow_nan=False, indent=indent)


def parse(raw: bytes, limit: int = LIMIT) -> Any:
    """Parse the JSON text `raw`, in time and memory at most proportional to `limit`."""
    _check_size(raw, limit)
    return loads(raw.decode("ascii"))


def loads(text: str) -> Any:
    """Return the value of the JSON `text`. Refuses NaN, repeated keys and deep nesting."""
    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a dict of `pairs`; raises if a key occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {shown(key)} occurs twice")
    return values


def shown(value: Any) -> str:
    """Return `value` for a message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _check_size(raw: bytes, limit: int) -> None:
    if len(raw) > limit:
        raise ValueError(f"it has {len(raw)} bytes of JSON, the limit is {limit}")
    values = sum(map(raw.count, _MARKS))
    if values > limit // BYTES_PER_MARK:
        raise ValueError(f"it has up to {values} values, the limit is {limit // BYTES_PER_MARK}")


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not valid JSON")


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
    return kind(**{name: _converted(hints[name], value, name) for name, value in values.items() if name in known})


def _converted(kind: Any, value: Any, where: str) -> Any:
    """Return a `value` from JSON as type `kind`."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _converted(inside[0], value, where)
    if origin is dict and isinstance(value, dict):
        return {name: _converted(inside[1], item, f"{where}.{name}") for name, item in value.items()}
    if origin is list and isinstance(value, list):
        return [_converted(inside[0], item, f"{where}[{at}]") for at, item in enumerate(value)]
    if origin is tuple and isinstance(value, list) and len(value) == len(inside):
        return tuple(_converted(item, value[at], f"{where}[{at}]") for at, item in enumerate(inside))
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return instance_of(kind, value)
    is_right = isinstance(value, _PLAIN.get(kind, ())) and (kind is bool or not isinstance(value, bool))
    if not is_right or (isinstance(value, int | float) and abs(value) > LARGEST):
        raise WrongValue(f"{where} is {shown(value)}, but must be {getattr(kind, '__name__', kind)}")
    return kind(value)
