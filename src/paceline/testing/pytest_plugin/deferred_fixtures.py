"""Fixtures that need the process group: they are set up and torn down on the ranks, not in the test process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

RUNNER = re.compile(r"event_loop|_function_scoped_runner")
"""Names of pytest-asyncio fixtures that contain an event loop, whose file descriptors ranks cannot share."""


class _Deferred:
    """Placeholder for a fixture that the test process does not set up."""

    def __repr__(self) -> str:
        return "<set up on the ranks>"


DEFERRED = _Deferred()


def defer(item: Any) -> None:
    """Keep the test process from setting up fixtures that exist only on ranks, and fixtures that depend on them."""
    if getattr(item, "funcargs", None) is None:
        return
    definitions: dict[str, Any] = item._fixtureinfo.name2fixturedefs
    # The user may have overridden our fixtures.
    needed: set[str] = {name for name in ("world", "faults") if name in definitions and _is_ours(definitions[name][-1])}
    for name in item.fixturenames:
        if _needs(name, needed, definitions, set()):
            item.funcargs[name] = DEFERRED


def _is_ours(definition: Any) -> bool:
    return bool(definition.func.__module__ == "pytest_paceline")


def _needs(name: str, needed: set[str], definitions: dict[str, Any], visited: set[str]) -> bool:
    """Return whether the fixture is one of `needed` or depends on one of them."""
    if name in needed or RUNNER.fullmatch(name):
        return True
    if name in visited or name not in definitions:
        return False
    visited.add(name)
    return any(
        _needs(argument, needed, definitions, visited)
        for definition in definitions[name]
        for argument in definition.argnames
    )


def run_new_finalizers(item: Any) -> Callable[[], None]:
    """Return a function that runs all tear-downs registered after this call, latest first."""
    stack: dict[Any, Any] = item.session._setupstate.stack
    counts = {node: len(finalizers) for node, (finalizers, _) in stack.items()}

    def run() -> None:
        errors = []
        for node, (finalizers, _) in reversed(list(stack.items())):
            for finalizer in reversed(finalizers[counts.get(node, 0) :]):
                try:
                    finalizer()
                # As in pytest, still run the remaining tear-downs.
                except BaseException as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    return run
