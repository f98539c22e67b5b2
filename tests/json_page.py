"""Compares JSON output with the page that documents its fields."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "json-output.json"


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each field without fields of its own."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for item in value:
            yield from leaves(item, f"{path}[]")
    else:
        yield path


def check(command: str, *documents: dict[str, Any]) -> None:
    """Raise unless the page describes exactly the fields of `documents`, which must contain every field together."""
    names = json.loads(PAGE.read_text("utf-8"))[command]["fields"]
    # A word in capitals stands for keys that depend on the run.
    patterns = {name: re.sub(r"\b[A-Z]+\b", ".+", re.escape(name)) for name in names}
    paths = {path for document in documents for path in leaves(document)}
    parents = {path for path in [*names, *paths] if any(name.startswith((f"{path}.", f"{path}[")) for name in names)}
    for path in sorted(paths - parents):
        assert any(re.fullmatch(pattern, path) for pattern in patterns.values()), (
            f"{command}: {path} is not on the page"
        )
    for name in sorted(names.keys() - parents):
        assert any(re.fullmatch(patterns[name], path) for path in paths), f"{command}: {name} is only on the page"
    assert all(next(iter(document.items())) == ("version", 1) for document in documents)
