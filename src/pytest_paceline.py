"""pytest's entry to :mod:`paceline.testing`: ``@pytest.mark.ranks(2)``.

pytest loads this file wherever Paceline is installed. It stands outside of the package, and imports nothing of it
before a test has the marker, so that other test suites do not wait for torch.
"""

from __future__ import annotations

from collections.abc import Generator
from types import ModuleType
from typing import Any

import pytest

MARKER = (
    "ranks(*counts, timeout=60, backend=None, hosts=1, slow_rank=None): run the test on so many real ranks, each a "
    "process of its own; once for each count (Paceline)"
)
OURS = frozenset({"world", "faults"})
"""Fixtures that exist on ranks alone."""


def _testing() -> ModuleType:
    from paceline.testing.pytest_plugin import controller

    return controller


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of this plug-in."""
    parser.getgroup("paceline").addoption(
        "--max-ranks", type=int, default=64, metavar="N", help="largest number of ranks that a test may ask for (64)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test once for each of several numbers of ranks."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is not None and len(marker.args) > 1:
        metafunc.fixturenames.append("paceline_ranks")
        names = [f"ranks={count}" for count in marker.args]
        metafunc.parametrize("paceline_ranks", marker.args, indirect=True, ids=names)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Load what tests with ranks need, if there are any, outside of the time that a test has.

    Where there are GPUs they run first: a process that has used CUDA can fork no ranks any more.
    """
    if config.option.collectonly:
        return
    if any(item.get_closest_marker("ranks") is not None for item in items) and _testing().has_gpus():
        items.sort(key=lambda item: item.get_closest_marker("ranks") is None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check the marker, and leave fixtures that need the world to the ranks."""
    if item.get_closest_marker("ranks") is None or not isinstance(item, pytest.Function):
        return
    testing, refusal, mark = _testing(), "", None
    try:
        mark = testing.mark_of(item, item.config)
    except ValueError as error:  # a UsageError
        refusal = str(error)
    if refusal:  # outside, so that it is the whole report
        pytest.fail(f"{item.name}: {refusal}", pytrace=False)
    testing.set_up(item, mark, _needed(item))


def _needed(item: Any) -> frozenset[str]:
    """Return our fixtures, without those that the user has replaced by fixtures of the same name."""
    return frozenset(name for name in OURS if _is_ours(item, name))


def _is_ours(item: Any, name: str) -> bool:
    definitions = item._fixtureinfo.name2fixturedefs.get(name)
    return bool(definitions) and definitions[-1].func.__module__ == __name__


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run the test's body on ranks instead of here."""
    if item.get_closest_marker("ranks") is None or not isinstance(item, pytest.Function):
        return (yield)
    testing, runtest = _testing(), item.runtest
    item.runtest = lambda: testing.run(item, runtest)  # type: ignore[method-assign]
    try:
        with testing.prepared(item, _needed(item) | ({"kill"} if _is_ours(item, "kill") else set())):
            return (yield)
    finally:
        del item.runtest  # the class has it


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    """Show the ranks' tracebacks."""
    report = yield
    if item.get_closest_marker("ranks") is not None and isinstance(item, pytest.Function) and call.when == "call":
        _testing().improve_report(item, call, report)
    return report


@pytest.fixture
def paceline_ranks(request: pytest.FixtureRequest) -> int:
    """Give the number of ranks of this run."""
    return int(request.param)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Any:
    """Give this rank's :class:`paceline.World`: its rank, the number of ranks, the device. Only on ranks."""
    return _on_a_rank(request, "world", "WORLD")


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> Any:
    """Give the :class:`paceline.testing.faults.Faults` of this rank, to order some. Only on ranks."""
    return _on_a_rank(request, "faults", "FAULTS")


def _on_a_rank(request: pytest.FixtureRequest, name: str, key: str) -> Any:
    from paceline.testing.pytest_plugin import worker

    if request.node.get_closest_marker("ranks") is None:
        pytest.fail(f"the fixture {name!r} is for tests with ranks; mark the test with @pytest.mark.ranks(2)", False)
    try:
        return request.config.stash[getattr(worker, key)]
    except KeyError:
        pytest.fail(
            f"the fixture {name!r} was asked for before the ranks were there; let fixtures take it as an argument, "
            "and then they are set up on the ranks",
            False,
        )


@pytest.fixture
def kill(faults: Any) -> Any:
    """Give the function that orders a rank's end: ``kill(1, at="backward")``. Every rank calls it."""
    return faults.kill
