"""JSON from files that anybody may have written: bounded in size and numbers, and checked against dataclasses."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, Union, get_args, get_origin, get_type_hints

from paceline.core.strict_json import shown, unique

LARGEST = 1e20
"""Largest number that is accepted: sums and squares of such numbers are still finite."""
MOST_BYTES = 512 * 2**20
"""Most bytes of a file."""


class WrongValue(ValueError):
    """A value that cannot be right; the message names its place and the fault."""


def new_file(path: Path) -> TextIO:
    """Open an empty file for writing; a link in its place is replaced, not followed."""
    path.unlink(missing_ok=True)
    return path.open("x", encoding="utf-8")


def read_text(path: Path) -> str:
    """Return the text of a regular file of bounded size."""
    if path.exists() and not path.is_file():
        raise WrongValue("it is not a regular file")
    if (size := path.stat().st_size) > MOST_BYTES:
        raise WrongValue(f"it has {size} bytes, the limit is {MOST_BYTES}")
    return path.read_text("utf-8")


def parse(text: str) -> Any:
    """Return the value of a JSON text."""
    try:
        return json.loads(
            text,
            object_pairs_hook=unique,
            parse_constant=_refuse,
            parse_float=lambda digits: _bounded(float(digits), digits),
            parse_int=lambda digits: _bounded(int(digits[:40]), digits),
        )
    except RecursionError:
        raise WrongValue("it is nested too deeply") from None


def _refuse(constant: str) -> Any:
    raise WrongValue(f"{constant} is no JSON")


def _bounded(number: Any, digits: str) -> Any:
    if abs(number) > LARGEST:
        raise WrongValue(f"the number {shown(digits)} is too large")
    return number


def value_of(kind: Any, found: Any, where: str = "") -> Any:
    """Return `found`, a value of JSON, as the type `kind`; `where` is its place in the document."""
    origin, inside = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _instance(kind, found, where)
    if origin in (Union, types.UnionType):  # they differ before Python 3.14
        [other] = [member for member in inside if member is not type(None)]
        return None if found is None else value_of(other, found, where)
    if origin in (Sequence, list, tuple):
        _expect(isinstance(found, list), found, where, "a list")
        kinds = inside if origin is tuple else inside * len(found)
        _expect(len(kinds) == len(found), found, where, f"a list of {len(kinds)}")
        values = [value_of(one, found[at], f"{where}[{at}]") for at, one in enumerate(kinds)]
        return tuple(values) if origin is tuple else values
    if origin in (Mapping, dict):
        _expect(isinstance(found, dict), found, where, "an object")
        return {name: value_of(inside[1], value, f"{where}.{name}") for name, value in found.items()}
    accepted, description = _PLAIN[kind]
    _expect(isinstance(found, accepted) and (kind is bool or not isinstance(found, bool)), found, where, description)
    _expect(kind is str or abs(found) <= LARGEST, found, where, "a finite number")
    return kind(found)  # a whole number is a float, too


_PLAIN: dict[Any, tuple[Any, str]] = {
    str: (str, "a text"),
    int: (int, "a whole number"),
    bool: (bool, "true or false"),
    float: (int | float, "a finite number"),
}


def _instance(kind: Any, found: Any, where: str) -> Any:
    """Return `found` as an instance of a dataclass; keys that it does not have are left out."""
    _expect(isinstance(found, dict), found, where, "an object")
    hints, values = get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        place = f"{where}.{field.name}".lstrip(".")
        if field.name in found:
            values[field.name] = value_of(hints[field.name], found[field.name], place)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise WrongValue(f"{place!r} is missing")
    return kind(**values)


def _expect(is_right: bool, found: Any, where: str, description: str) -> None:
    if not is_right:
        raise WrongValue(f"{where or 'it'} is {shown(found)}, and has to be {description}")
