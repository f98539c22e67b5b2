"""Fixtures shared by several test files."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The tests use CPU ranks and fork them from processes that run backward passes, which is impossible if torch sees a
# GPU. scripts/gpu_check.py checks GPUs.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from ranks import Pools, Ranks

# Background jobs of a shell, and nohup, ignore these signals; every child process would inherit that.
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)

# No deadline: the time of an example depends on the load of the machine.
settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")


def protect_test_process(send: Callable[..., Any], tests: int) -> Callable[..., Any]:
    """Wrap `send`, a function that sends a signal, so that it refuses to signal the test process `tests`.

    A signal that arrived late once killed a worker with hundreds of tests. Run code that needs a signal in a separate
    process: ``pools.run(1, …)``, ``Running(…)``.
    """

    def guarded(*arguments: Any) -> Any:
        # raise_signal(number), kill(pid, number), killpg(group, number)
        if os.getpid() == tests and arguments[-1] != 0 and (len(arguments) == 1 or arguments[0] in (0, -1, tests)):
            raise AssertionError(f"signal {arguments[-1]} sent to the test process")
        return send(*arguments)

    return guarded


def pytest_configure() -> None:
    for module, name in ((os, "kill"), (os, "killpg"), (signal, "raise_signal")):
        setattr(module, name, protect_test_process(getattr(module, name), os.getpid()))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files whose tests are all deselected; parsing torch's own suite is slow."""
    left_out = re.findall(r"\bnot (\w+)", config.option.markexpr)
    if collection_path.suffix != ".py" or not left_out:
        return None
    marks = re.search(r"^pytestmark = (\[.*?^\]|.*?$)", collection_path.read_text(), re.MULTILINE | re.DOTALL)
    return True if marks and any(f"pytest.mark.{mark}" in marks[0] for mark in left_out) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Disable garbage collection while collecting tests, then freeze all modules and tests.

    Half a million objects live as long as the process, so each ``gc.collect()`` of a test took 0.3 s.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """Worlds of any requested size, kept running for all tests of a file."""
    from ranks import Pools  # here: the process that only hands tests to others need not wait for torch

    with Pools() as pools:
        yield pools


@pytest.fixture(scope="module")
def gloo() -> Iterator[Pools]:
    """Worlds over Gloo, whose channel returns plain sums, like the channel of GPUs."""
    from ranks import Pools

    with Pools("gloo") as pools:
        yield pools


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """A world of one rank and a world of two."""
    from ranks import Ranks

    with Ranks(request.param) as ranks:
        yield ranks
