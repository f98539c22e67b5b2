"""The part of a test with ranks in the test process: reads the marker, runs the ranks, and reports their endings."""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from _pytest._code.code import ExceptionChainRepr, ExceptionRepr, ReprEntryNative, ReprFileLocation, ReprTraceback

from paceline.core.telemetry.users_code import is_users
from paceline.errors import UsageError
from paceline.testing.pool import RankFailed
from paceline.testing.pytest_plugin import coverage as coverage_of_ranks
from paceline.testing.pytest_plugin.deferred_fixtures import defer
from paceline.testing.pytest_plugin.hypothesis import prepared as prepared
from paceline.testing.pytest_plugin.marks import RanksMark
from paceline.testing.pytest_plugin.preloaded_modules import LoadedModules
from paceline.testing.pytest_plugin.worker import Listener, run_body
from paceline.testing.ranks.outcomes import Ending, Verdict, judge, others
from paceline.testing.ranks.processes import RankRun
from paceline.testing.ranks.recorded_collectives import Places, places_in

MARK: pytest.StashKey[RanksMark] = pytest.StashKey()
RESULT: pytest.StashKey[tuple[Verdict, Sequence[Ending], int]] = pytest.StashKey()
PLACES: pytest.StashKey[tuple[object, Places]] = pytest.StashKey()
MODULES: pytest.StashKey[LoadedModules] = pytest.StashKey()


def mark_of(node: Any, config: pytest.Config) -> RanksMark | None:
    """Return the marker of a test; None if it has none."""
    marker = node.get_closest_marker("ranks")
    return RanksMark.of(marker.args, marker.kwargs, config.getoption("max_ranks")) if marker is not None else None


def has_gpus() -> bool:
    """Return whether this host has GPUs, without using them."""
    return torch.cuda.device_count() > 0


def set_up(item: Any, mark: RanksMark, needed: frozenset[str]) -> None:
    """Prepare a test with ranks, before its fixtures."""
    if mark.backend == "nccl" and torch.cuda.device_count() < max(mark.counts):
        reason = f"NCCL needs {max(mark.counts)} GPUs, and this host has {torch.cuda.device_count()}"
        # With the test's own place, not that of this line.
        raise pytest.skip.Exception(reason, _use_item_location=True)
    if len(mark.counts) > 1 and not hasattr(item, "callspec"):
        pytest.fail(
            f"{item.name}: a method of a unittest.TestCase cannot run on {mark.counts} ranks one after the other; "
            "give one number",
            pytrace=False,
        )
    count = getattr(getattr(item, "callspec", None), "params", {}).get("paceline_ranks")
    if (count is None) == (len(mark.counts) > 1) or (count is not None and count not in mark.counts):
        pytest.fail(
            f"{item.name}: the ranks marker on a single parameter takes one number, and a marker with several cannot "
            "stand above it",
            pytrace=False,
        )
    if not item.config.pluginmanager.has_plugin(Listener.NAME):
        item.config.pluginmanager.register(Listener(), Listener.NAME)
    item.config.stash.setdefault(MODULES, LoadedModules()).preload_for(item.path)
    item.stash[MARK] = mark
    defer(item, needed)


def run(item: Any, runtest: Callable[[], None]) -> None:
    """Run a test's body on its ranks; raise its outcome."""
    __tracebackhide__ = True
    mark = item.stash[MARK]
    size = item.callspec.params["paceline_ranks"] if len(mark.counts) > 1 else mark.counts[0]
    if "tmp_path_factory" in item.fixturenames:
        item.config._tmp_path_factory.getbasetemp()  # made once, here, or every rank would make one of its own
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        # A test or another plugin may have closed it, or put None or a bare object in its place.
        with suppress(ValueError, OSError, AttributeError):
            stream.flush()  # type: ignore[union-attr]  # a fork inherits the buffer, and would write it once more
    runner, places = RankRun(size, mark.timeout), _places(item)
    refusal, endings = "", []
    try:
        endings = runner(lambda connected: run_body(item, runtest, mark, places, connected), coverage_of_ranks.harvest)
    except UsageError as error:
        refusal = str(error)
    if refusal:  # outside, so that it is the whole report
        pytest.fail(refusal, pytrace=False)
    item.config.stash[MODULES].note(endings)
    _pass_on_output(item, endings)
    _pass_on_properties(item, endings)
    _pass_on_warnings(endings)
    verdict = judge(endings, mark.timeout, runner.deadlock)
    if verdict.kind == "passed":
        return
    item.stash[RESULT] = verdict, endings, size
    raise _exception_of(verdict)


def _places(item: Any) -> Places:
    """Return the places of torch's functions, searched again only when modules have been loaded since."""
    loaded = len(sys.modules), next(reversed(sys.modules)), id(item.module)
    found = item.config.stash.get(PLACES, None)
    if found is None or found[0] != loaded:
        found = item.config.stash[PLACES] = loaded, places_in(_users_namespaces(item))
    places: Places = found[1]
    return places


def _users_namespaces(item: Any) -> list[dict[str, Any]]:
    """Return the namespaces of the user's own modules, because any of them may have imported functions of torch."""
    modules = {id(module): module for module in [*sys.modules.values(), item.module]}
    return [vars(module) for module in modules.values() if is_users(getattr(module, "__dict__", {}).get("__file__"))]


def _pass_on_output(item: Any, endings: Sequence[Ending]) -> None:
    for ending in endings:
        for name, text in ending.outcome.sections if ending.outcome is not None else ():
            item.add_report_section("call", f"{name} of rank {ending.rank}", text)


def _pass_on_properties(item: Any, endings: Sequence[Ending]) -> None:
    """Record each property once, as if it had been recorded here."""
    for ending in endings:
        for entry in ending.outcome.properties if ending.outcome is not None else ():
            if entry not in item.user_properties:
                item.user_properties.append(entry)


def _pass_on_warnings(endings: Sequence[Ending]) -> None:
    """Give each warning once, as if it had come up here."""
    # Ranks run the same code, so most warnings come from all of them.
    seen = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for ending in endings:
            for warning in ending.outcome.warnings if ending.outcome is not None else ():
                if warning not in seen:
                    seen.add(warning)
                    text, category, file, line = warning
                    warnings.warn_explicit(text, pickle.loads(category), file, line)


def _exception_of(verdict: Verdict) -> BaseException:
    """Return the exception of the rank that came first; one of the same type, where that can be."""
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
        # Others, such as KeyboardInterrupt, would end this process's session.
        if isinstance(error, Exception | pytest.fail.Exception):
            return error
    return RankFailed(verdict.message)


def improve_report(item: Any, call: pytest.CallInfo[Any], report: pytest.TestReport) -> None:
    """Put the ranks' own tracebacks into the report of a test that failed on them."""
    found = item.stash.get(RESULT, None)
    if found is None or call.when != "call":
        return
    del item.stash[RESULT]
    verdict, endings, size = found
    if item.config.getoption("usepdb", False):
        call.excinfo = None  # the debugger was there already, on the rank
    # A failure that was expected is reported as skipped, and has a traceback all the same.
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
