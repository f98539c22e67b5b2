"""The part of the plug-in in the test process: reads the marker, runs the ranks, and reports their outcomes."""

from __future__ import annotations

import importlib
import pickle
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from _pytest._code.code import ExceptionChainRepr, ExceptionRepr, ReprEntryNative, ReprFileLocation, ReprTraceback

from paceline.core.torch_elastic import OPTIMIZERS_NEED
from paceline.errors import UsageError
from paceline.testing.plugin_worker import Listener, RanksMark, defer, harvest, run_body
from paceline.testing.pool import RankFailed
from paceline.testing.rank_processes import Ending, Outcome, RankRun, Verdict, judge, others

MARK: pytest.StashKey[RanksMark] = pytest.StashKey()
RESULT: pytest.StashKey[tuple[Verdict, Sequence[Ending], int]] = pytest.StashKey()


def has_gpus() -> bool:
    """Return whether this host has GPUs, without initializing CUDA."""
    return torch.cuda.device_count() > 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check the marker, and defer fixtures that need the process group."""
    if not _is_on_ranks(item):
        return
    marker: Any = item.get_closest_marker("ranks")
    try:
        _set_up(item, RanksMark.of(marker.args, marker.kwargs))
    except UsageError as error:
        raise pytest.fail.Exception(f"{item.name}: {error}", pytrace=False) from None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run the test's body on ranks."""
    if not _is_on_ranks(item):
        return (yield)
    runtest = item.runtest
    item.runtest = lambda: run(item, runtest)  # type: ignore[method-assign]
    try:
        return (yield)
    finally:
        del item.runtest  # the item then uses its class's method again


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    """Show the ranks' tracebacks."""
    report = yield
    if _is_on_ranks(item) and call.when == "call":
        improve_report(item, call, report)
    return report


def _is_on_ranks(item: pytest.Item) -> bool:
    return item.get_closest_marker("ranks") is not None and isinstance(item, pytest.Function)


def _set_up(item: Any, mark: RanksMark) -> None:
    """Prepare a test with ranks, before its fixtures are set up."""
    if mark.backend == "nccl" and torch.cuda.device_count() < max(mark.counts):
        reason = f"NCCL needs {max(mark.counts)} GPUs, and this host has {torch.cuda.device_count()}"
        # Report the location of the test.
        raise pytest.skip.Exception(reason, _use_item_location=True)
    count = getattr(getattr(item, "callspec", None), "params", {}).get("paceline_ranks")
    if len(mark.counts) > 1 and not hasattr(item, "callspec"):
        raise UsageError(
            f"a method of a unittest.TestCase cannot run with several numbers of ranks {mark.counts}; give one number"
        )
    if (count is None) == (len(mark.counts) > 1) or (count is not None and count not in mark.counts):
        raise UsageError(
            "the ranks marker on a single parameter takes one number; remove the one with several numbers from the test"
        )
    if getattr(item.obj, "is_hypothesis_test", False):
        raise UsageError(
            "Hypothesis cannot draw examples on ranks; remove the marker, and call "
            "paceline.testing.Pools().run(2, function, example) in the test"
        )
    if not item.config.pluginmanager.has_plugin(Listener.NAME):
        item.config.pluginmanager.register(Listener(), Listener.NAME)
    importlib.import_module(OPTIMIZERS_NEED)  # once here, because it would take each rank of each test seconds
    item.stash[MARK] = mark
    defer(item)


def run(item: Any, runtest: Callable[[], None]) -> None:
    """Run a test's body on ranks, and raise its outcome."""
    __tracebackhide__ = True
    mark = item.stash[MARK]
    size = item.callspec.params["paceline_ranks"] if len(mark.counts) > 1 else mark.counts[0]
    if "tmp_path_factory" in item.fixturenames:
        item.config._tmp_path_factory.getbasetemp()  # otherwise every rank would create its own base folder
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        # Tests or other plugins may close or replace a stream.
        with suppress(ValueError, OSError, AttributeError):
            stream.flush()  # type: ignore[union-attr]  # a fork would write the buffer again
    runner = RankRun(size, mark.timeout)
    try:
        endings = runner(lambda connected: run_body(item, runtest, mark, connected), harvest)
    except UsageError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    _pass_on(item, {ending.rank: ending.outcome for ending in endings if ending.outcome is not None})
    verdict = judge(endings, mark.timeout, runner.deadlock)
    if verdict.kind == "passed":
        return
    item.stash[RESULT] = verdict, endings, size
    raise _exception_of(verdict)


def _pass_on(item: Any, outcomes: Mapping[int, Outcome]) -> None:
    """Report the output of every rank, and the ranks' properties and warnings, each only once."""
    all_warnings: dict[tuple[str, bytes, str, int], None] = {}
    for rank, outcome in outcomes.items():
        for name, text in outcome.sections:
            item.add_report_section("call", f"{name} of rank {rank}", text)
        item.user_properties += [entry for entry in outcome.properties if entry not in item.user_properties]
        all_warnings |= dict.fromkeys(outcome.warnings)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for text, category, file, line in all_warnings:
            warnings.warn_explicit(text, pickle.loads(category), file, line)


def _exception_of(verdict: Verdict) -> BaseException:
    """Return an exception for the verdict, if possible the exception of the first rank that failed."""
    if verdict.kind == "skipped":
        return pytest.skip.Exception(verdict.message, _use_item_location=True)
    if verdict.kind == "xfailed":
        from _pytest.outcomes import XFailed

        return XFailed(verdict.message)
    outcome = verdict.first.outcome if verdict.first is not None else None
    if verdict.kind == "exit":
        return pytest.exit.Exception(verdict.message, outcome.returncode if outcome is not None else None)
    if outcome is not None and outcome.error is not None:
        error = pickle.loads(outcome.error)
        # Other exceptions, such as KeyboardInterrupt, would end the session.
        if isinstance(error, Exception | pytest.fail.Exception):
            return error
    return RankFailed(verdict.message)


def improve_report(item: Any, call: pytest.CallInfo[Any], report: pytest.TestReport) -> None:
    """Put the ranks' tracebacks into the report of a failed test."""
    result = item.stash.get(RESULT, None)
    if result is None:
        return
    del item.stash[RESULT]
    verdict, endings, size = result
    if item.config.getoption("usepdb", False):
        call.excinfo = None  # the debugger has already run on the rank
    # An expected failure is reported as skipped, but also has a traceback.
    if report.outcome != "failed" and not hasattr(report, "wasxfail"):
        return
    report.longrepr = _representation(item, verdict, endings, size)


def _representation(item: Any, verdict: Verdict, endings: Sequence[Ending], size: int) -> Any:
    first = verdict.first
    shown = first.outcome.report if first is not None and first.outcome is not None else None
    if isinstance(shown, ExceptionRepr) and shown.reprcrash is not None:
        shown.reprcrash.message = verdict.message
        title = f"rank {first.rank} of {size} raised this" if first is not None else ""
    else:
        path, line, _ = item.location
        text = f"{shown or verdict.message}\n"
        trace = ReprTraceback([ReprEntryNative([text])], None, "native")
        place = ReprFileLocation(str(path), (line or 0) + 1, verdict.message)
        shown, title = ExceptionChainRepr([(trace, place, None)]), "the ranks"
    rest = [f"{heading}\n{text}".rstrip() for heading, text in others(endings, first)]
    if rest:
        shown.addsection(title + "; the others" if first is not None else title, "\n".join(rest), "-")
    return shown
