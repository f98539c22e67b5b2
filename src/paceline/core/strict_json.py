"""Strict JSON: each value has only one representation, and ambiguous input is rejected."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

LIMIT = 64 * 2**20
"""Maximum size of a document in bytes, which bounds the memory for reading it."""
# Without a bound, "[],[],…" would take 25 times its size in memory.
BYTES_PER_MARK = 16
"""Minimum average size of a value, in bytes, in a document of :data:`LIMIT` bytes."""
_MARKS = (b",", b":", b"[", b"{")
"""One of these characters precedes each value except the first."""
_DIGITS = 400
"""Maximum digits of a number, because Python parses long numbers slowly; ours have at most 25."""


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
    return loads(
        raw.decode("ascii"),
        parse_int=lambda number: int(_checked(number)),
        parse_float=lambda number: float(_checked(number)),
    )


def loads(text: str, **options: Any) -> Any:
    """Return the value of the JSON `text`. Refuses NaN, repeated keys and deep nesting."""
    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=_refuse, **options)
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


def _checked(number: str) -> str:
    if len(number) > _DIGITS:
        raise ValueError(f"it has a number of {len(number)} digits")
    return number


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not valid JSON")
