"""Fixtures that several test files share."""

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

# A shell that runs tests in the background, or nohup, has these ignored, and everything below would inherit that.
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)

# How long an example takes depends on how busy the machine is, which no test may.
settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")


def refuse_own(send: Callable[..., Any], tests: int) -> Callable[..., Any]:
    """Return `send`, a function that sends a signal, for all processes but `tests`, which runs the tests.

    A signal that came later than expected has ended a worker with hundreds of tests. What is to get a signal is a
    process of its own: ``pools.run(1, …)``, ``Running(…)``.
    """

    def sent(*arguments: Any) -> Any:
        # raise_signal(number), kill(pid, number), killpg(group, number)
        if os.getpid() == tests and arguments[-1] != 0 and (len(arguments) == 1 or arguments[0] in (0, -1, tests)):
            raise AssertionError(f"signal {arguments[-1]} for the process that runs the tests")
        return send(*arguments)

    return sent


def pytest_configure() -> None:
    for module, name in ((os, "kill"), (os, "killpg"), (signal, "raise_signal")):
        setattr(module, name, refuse_own(getattr(module, name), os.getpid()))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files whose tests are all left out; torch's own suite takes long to read."""
    left_out = re.findall(r"\bnot (\w+)", config.option.markexpr)
    if collection_path.suffix != ".py" or not left_out:
        return None
    marks = re.search(r"^pytestmark = (\[.*?^\]|.*?$)", collection_path.read_text(), re.MULTILINE | re.DOTALL)
    return True if marks and any(f"pytest.mark.{mark}" in marks[0] for mark in left_out) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect tests without garbage collections, and leave all modules and tests out of those that come later.

    Half a million objects live as long as the process: each collection that a test asks for took 0.3 s.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """Worlds of every size asked for, which stay up for a file's tests."""
    from ranks import Pools  # here: the process that only hands tests to others need not wait for torch

    with Pools() as pools:
        yield pools


@pytest.fixture(scope="module")
def gloo() -> Iterator[Pools]:
    """The same over Gloo; their channel gives plain sums, as that of GPUs does."""
    from ranks import Pools

    with Pools("gloo") as pools:
        yield pools


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """A world of one rank, and one of two."""
    from ranks import Ranks

    with Ranks(request.param) as ranks:
        yield ranks
