"""JSON as checkpoints use it: one value has one rendering, and what is doubtful is refused, not guessed."""

from __future__ import annotations

import json
from typing import Any

LIMIT = 64 * 2**20  # bytes; a larger document is refused, so that reading takes bounded memory


def render(value: Any, indent: int | None = None, limit: int = LIMIT) -> bytes:
    """`value` as JSON: ASCII, keys in their own order, NaN and infinities refused.

    Raises:
        ValueError: if `value` has a float that JSON does not know, or the text has more than `limit` bytes.
    """
    separators = (",", ":") if indent is None else (",", ": ")
    raw = json.dumps(value, allow_nan=False, indent=indent, separators=separators).encode("ascii")
    if len(raw) > limit:
        raise ValueError(f"it takes {len(raw)} bytes of JSON, the limit is {limit}")
    return raw


def parse(raw: bytes, limit: int = LIMIT) -> Any:
    """The value of the JSON text `raw`.

    Raises:
        ValueError: if `raw` has more than `limit` bytes, is no JSON, nested too deeply, or has a key twice.
    """
    if len(raw) > limit:
        raise ValueError(f"it has {len(raw)} bytes, the limit is {limit}")
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
