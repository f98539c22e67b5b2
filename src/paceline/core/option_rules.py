"""Checks of option values. Errors name the option as an argument (``clip_norm``) or as a flag (``--clip-norm``).

Each function returns the checked value, converted to its final type.
"""

from __future__ import annotations

import math
import os
from numbers import Real
from operator import index
from typing import Any, SupportsIndex

from paceline.errors import UsageError


def flag_of(name: str) -> str:
    """Return the flag for a field: ``--batch-size`` for ``batch_size``."""
    return f"--{name.replace('_', '-')}"


def whole_number(name: str, value: Any, minimum: int = 1) -> int:
    """Check a whole number that is at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):  # NumPy's integers count as whole numbers
        raise UsageError(f"{name} must be a whole number, not {value!r}")
    if index(value) < minimum:
        raise UsageError(f"{name} must be at least {minimum}, not {value}")
    return index(value)


def positive(name: str, value: Any) -> float:
    """Check a finite number greater than 0."""
    if not 0 < _number(name, value) < math.inf:
        raise UsageError(f"{name} must be a finite number greater than 0, not {value}")
    return float(value)


def share(name: str, value: Any) -> float:
    """Check that a number is between 0 and 1."""
    if not 0 <= _number(name, value) <= 1:
        raise UsageError(f"{name} must be from 0 to 1, not {value}")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """Check True or False."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False, not {value!r}")
    return value


def choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Check that `value` is one of `choices`."""
    if value not in choices:
        raise UsageError(f"{name} must be {', '.join(choices[:-1])} or {choices[-1]}, not {value!r}")
    return str(value)


def text(name: str, value: Any) -> str:
    """Check a non-empty string."""
    if not isinstance(value, str):
        raise UsageError(f"{name} must be a string, not {value!r}")
    if not value:
        raise UsageError(f"{name} must not be empty; pass a value, or leave it out")
    return value


def path(name: str, value: Any) -> str:
    """Check a non-empty path."""
    if not isinstance(value, str | os.PathLike) or not isinstance(place := os.fspath(value), str):
        raise UsageError(f"{name} must be a path, not {value!r}")
    return text(name, place)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"{name} must be a number, not {value!r}")
    return float(value)
