"""pytest's entry point for :mod:`paceline.testing`: ``@pytest.mark.ranks(2)``.

pytest loads this file in every environment with Paceline. Until a test has the marker, it only registers the marker and
its fixtures. It is outside of the package, so that other test suites do not import torch.
"""

from __future__ import annotations

from typing import Any

import pytest

MARKER = (
    "ranks(*counts, timeout=60, backend=None): run the test on this number of ranks, each in its own process; once for "
    "each count (Paceline)"
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test once for each of several numbers of ranks."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is not None and len(marker.args) > 1:
        metafunc.fixturenames.append("paceline_ranks")
        names = [f"ranks={count}" for count in marker.args]
        metafunc.parametrize("paceline_ranks", marker.args, indirect=True, ids=names)


@pytest.hookimpl(tryfirst=True)  # first, because pytest-xdist's hook reads the order
def pytest_collection_finish(session: pytest.Session) -> None:
    """Load the plug-in itself if a test has the marker, which a conftest.py may also have added."""
    config, items = session.config, session.items
    if config.option.collectonly or all(item.get_closest_marker("ranks") is None for item in items):
        return
    from paceline.testing import plugin

    if not config.pluginmanager.is_registered(plugin):
        config.pluginmanager.register(plugin, "paceline ranks")
    if plugin.has_gpus():  # tests with ranks run first, because later forks cannot use GPUs or autograd
        items.sort(key=lambda item: item.get_closest_marker("ranks") is None)


@pytest.fixture
def paceline_ranks(request: pytest.FixtureRequest) -> int:
    """Return the number of ranks of this run."""
    return int(request.param)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Any:
    """Return this rank's :class:`paceline.World`: its rank, the number of ranks, the device. Only on ranks."""
    return _on_a_rank(request, "world", "WORLD")


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> Any:
    """Return the :class:`paceline.testing.faults.Faults` of this rank. Only on ranks."""
    return _on_a_rank(request, "faults", "FAULTS")


def _on_a_rank(request: pytest.FixtureRequest, name: str, key: str) -> Any:
    if request.node.get_closest_marker("ranks") is None:
        pytest.fail(f"the fixture {name!r} is for tests with ranks; mark the test with @pytest.mark.ranks(2)", False)
    from paceline.testing import plugin_worker

    try:
        return request.config.stash[getattr(plugin_worker, key)]
    except KeyError:
        pytest.fail(
            f"the fixture {name!r} was requested before the ranks started; make it an argument of the fixtures that "
            "need it, which are then set up on the ranks",
            False,
        )


@pytest.fixture
def kill(faults: Any) -> Any:
    """Return a function that kills a rank: ``kill(1, at="backward")``. Every rank calls it."""
    return faults.kill
