"""Tests with Hypothesis's ``@given`` on ranks: each rank draws its own examples, and all ranks draw the same ones.

They do as long as the body passes. A rank whose body failed searches for a smaller example without the others.
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
    """Prepare a test for the block in which it is called, if it is one of Hypothesis's.

    Hypothesis refuses fixtures that are not reset between examples, and sets them up to find that out. The fixtures
    `ours` need no reset, and the user's fixtures for ranks must not be set up in the test process.
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
        setattr(function, SEED, secrets.randbits(128))  # drawn before the fork, so that all ranks have the same
    try:
        yield
    finally:
        setattr(function, SEED, before)
        forget(item)


def forget(item: Any) -> None:
    """Restore the definitions of the fixtures that only ranks set up."""
    known = getattr(item._request, "_fixture_defs", {})
    for name in [name for name, definition in known.items() if isinstance(definition, Elsewhere)]:
        del known[name]
