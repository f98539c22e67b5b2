"""Tests with Hypothesis's ``@given`` on ranks: each rank draws by itself, and all draw the same.

They do as long as the body passes. Afterwards a rank whose body failed looks for a smaller example, alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.testing.pytest_plugin.deferred_fixtures import DEFERRED

SEED = "_hypothesis_internal_use_seed"
"""The attribute in which ``@hypothesis.seed`` keeps its number."""


@dataclass(frozen=True)
class Elsewhere:
    """Stands for the definition of a fixture that is set up on ranks, where Hypothesis asks for its scope."""

    scope: str
    _scope: Any


@contextmanager
def prepared(item: Any, ours: frozenset[str]) -> Iterator[None]:
    """Prepare a test for the block in which it is called; nothing if it is none of Hypothesis's.

    Hypothesis refuses fixtures that are not reset between examples, and sets them up to find that out. `ours` need no
    reset; those of the user that are set up on ranks are not set up here.
    """
    function = getattr(item.obj, "__func__", item.obj)
    if not getattr(function, "is_hypothesis_test", False):
        yield
        return
    known = getattr(item._request, "_fixture_defs", {})
    for name, value in (item.funcargs or {}).items():
        if value is DEFERRED and name not in known:
            definition = item._fixtureinfo.name2fixturedefs[name][-1]
            known[name] = Elsewhere("session" if name in ours else definition.scope, definition._scope)
    before, settings = getattr(function, SEED, None), getattr(function, "_hypothesis_internal_use_settings", None)
    if before is None and not getattr(settings, "derandomize", False):
        setattr(function, SEED, secrets.randbits(128))
    try:
        yield
    finally:
        setattr(function, SEED, before)
        forget(item)


def forget(item: Any) -> None:
    """Have the fixtures that only ranks set up be defined as before."""
    known = getattr(item._request, "_fixture_defs", {})
    for name in [name for name, definition in known.items() if isinstance(definition, Elsewhere)]:
        del known[name]
