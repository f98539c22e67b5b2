"""The part of the plug-in that runs on a rank: runs a test's body as pytest would run it in the test process."""

from __future__ import annotations

import functools
import os
import pickle
import time
import unittest
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from _pytest.outcomes import XFailed

import paceline.core.processes.world
from paceline.core.torch_internals.distributed.c10d import cell_of
from paceline.errors import CommunicationError
from paceline.testing.faults import Faults
from paceline.testing.pytest_plugin import captured_output
from paceline.testing.pytest_plugin import coverage as coverage_of_ranks
from paceline.testing.pytest_plugin.deferred_fixtures import DEFERRED, run_new_finalizers
from paceline.testing.pytest_plugin.marks import RanksMark
from paceline.testing.ranks.child import Connected, environment
from paceline.testing.ranks.outcomes import Outcome
from paceline.testing.ranks.processes import TOO_LATE
from paceline.testing.ranks.recorded_collectives import Recorder

LEAST_PATIENCE_S = 30.0
"""Minimum timeout of collectives in seconds, to leave ranks time to start."""
CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe")
"""Parts of error messages of collectives that failed because of another rank."""
UNFORKABLE = ("fork-based multiprocessing", "in forked subprocess", "CUDA error: initialization error")
"""Parts of torch's error messages in a process that was forked too late (:data:`.TOO_LATE`)."""


def run_body(item: Any, runtest: Callable[[], None], mark: RanksMark, connected: Connected) -> Outcome:
    """Run the test of `item` on this rank, and record its calls to torch's functions."""
    properties = len(item.user_properties)
    captured_output.separate(item.config)
    reports = _listen(item.config, connected)
    with coverage_of_ranks.measured(connected.folder, connected.rank), ExitStack() as stack:
        records: list[Any] | None = None
        if "recwarn" not in item.fixturenames:  # the fixture recwarn records warnings itself
            records = stack.enter_context(warnings.catch_warnings(record=True))
        recorder, error = _run(item, runtest, mark, connected)
        error = error or _unittest_error(item)
        if isinstance(error, RuntimeError) and any(text in str(error) for text in UNFORKABLE):
            error = pytest.fail.Exception(TOO_LATE, pytrace=False).with_traceback(error.__traceback__)
    outcome = _outcome_of(item, error, connected)
    for report in reports:  # reports of subtests
        if report.failed and outcome.kind == "passed":
            outcome = Outcome("failed", _first_line(report.longreprtext), _kept(report.longrepr))
    outcome.sections = captured_output.read(item.config) + _log(item.config)
    outcome.warnings = [_warning(record) for record in records or ()]
    outcome.properties = [(name, _kept(value)) for name, value in item.user_properties[properties:]]
    if recorder is not None:
        outcome.calls = recorder.result()
    return outcome


def _run(
    item: Any, runtest: Callable[[], None], mark: RanksMark, connected: Connected
) -> tuple[Recorder | None, BaseException | None]:
    """Join the process group, set up the deferred fixtures, run the body, and tear the fixtures down."""
    __tracebackhide__ = True
    faults = Faults(connected.rank, connected.size, lambda why: connected.send("doomed", why))
    recorder = None
    # The test process tears down the fixtures that it has set up.
    undo = run_new_finalizers(item)
    error: BaseException | None = None
    try:
        os.environ.update(environment(connected.rank, connected.size, connected.port))
        # If the test's timeout is long, use a shorter one, so that a hang ends with the collective's message.
        patience = timedelta(seconds=max(mark.timeout * 0.8, LEAST_PATIENCE_S))
        world = paceline.core.processes.world.init(mark.backend, patience)
        _let_the_test_initialize(connected.port)
        recorder = Recorder(connected.note)
        recorder.install()
        connected.send("begun")
        _set_up_deferred(item, world, faults)
        runtest()
        _warn_of_unhandled(item.config)
    # pytest's outcomes, such as skip() and fail(), are BaseExceptions.
    except BaseException as raised:
        error = raised
        # From now on the test process waits for the tear-downs and the report.
        connected.send("raised")
    try:
        undo()
    except BaseException as raised:
        error = error or raised
    return recorder, error


def _set_up_deferred(item: Any, world: Any, faults: Faults) -> None:
    """Set up the fixtures that need the process group."""
    item.config.stash[WORLD] = world
    item.config.stash[FAULTS] = faults
    arguments = getattr(item, "funcargs", None)
    if arguments is None:
        return
    waiting = [name for name, value in arguments.items() if value is DEFERRED]
    for name in waiting:
        del arguments[name]
    for name in waiting:
        arguments[name] = item._request.getfixturevalue(name)


WORLD: pytest.StashKey[Any] = pytest.StashKey()
FAULTS: pytest.StashKey[Any] = pytest.StashKey()


def _let_the_test_initialize(port: int) -> None:
    """Let a test create the default process group itself, after closing ours, which it has not used.

    If the test uses a store other than the one at `port`, one of the ranks must serve it.
    """
    cell = cell_of("init_process_group")
    assert cell is not None
    original, is_ours = cell.cell_contents, [True]

    @functools.wraps(original)
    def init_process_group(*arguments: Any, **options: Any) -> Any:
        if is_ours and dist.is_initialized():
            is_ours.clear()
            paceline.core.processes.world.current().close()
        method = options.get("init_method") or next(iter(arguments[1:]), None) or "env://"
        if not method.startswith("env://") or os.environ.get("MASTER_PORT") != str(port):
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        return original(*arguments, **options)

    cell.cell_contents = init_process_group


def _warn_of_unhandled(config: pytest.Config) -> None:
    """Warn about exceptions in threads and destructors, as pytest does after a test's body."""
    for name, function in (
        ("threadexception", "collect_thread_exception"),
        ("unraisableexception", "collect_unraisable"),
    ):
        collect = getattr(config.pluginmanager.getplugin(name), function, None)
        if collect is not None:  # since pytest 8.4
            collect(config)


class Listener:
    """On a rank, collects the reports of subtests, and notifies the test process when a debugger is in use.

    Registered only once, in the test process, because registering takes milliseconds.
    """

    NAME = "paceline rank"

    def __init__(self) -> None:
        self.connected: Connected | None = None
        """Connection of this rank; None in the test process."""
        self.reports: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the report."""
        if self.connected is not None:
            self.reports.append(report)

    def pytest_enter_pdb(self) -> None:
        """Take the terminal, and suspend the timeout."""
        if self.connected is not None:
            _take_terminal()
            self.connected.send("debugging", True)

    def pytest_leave_pdb(self) -> None:
        """Resume the timeout."""
        if self.connected is not None:
            self.connected.send("debugging", False)


def _listen(config: pytest.Config, connected: Connected) -> list[pytest.TestReport]:
    """Return a list that will collect all further reports of this rank."""
    plugin: Any = config.pluginmanager.getplugin(Listener.NAME)
    plugin.connected = connected
    listeners = config.hook.pytest_runtest_logreport
    for listener in list(listeners.get_hookimpls()):  # for example, the terminal reporter and xdist's connection
        if listener.plugin is not plugin:
            listeners._remove_plugin(listener.plugin)
    reports: list[pytest.TestReport] = plugin.reports
    return reports


def _take_terminal() -> None:
    """Move to the (Unix) process group of the test process, which owns the terminal."""
    with suppress(OSError):
        os.setpgid(0, os.getpgid(os.getppid()))


def _unittest_error(item: Any) -> BaseException | None:
    """Return the exception that unittest caught, if `item` is a method of a TestCase."""
    caught = getattr(item, "_excinfo", None)
    return caught[0].value if caught else None


def _outcome_of(item: Any, error: BaseException | None, connected: Connected) -> Outcome:
    """Return the outcome of the test body on this rank."""
    if error is None:
        return Outcome("passed")
    if isinstance(error, pytest.skip.Exception | unittest.SkipTest):
        return Outcome("skipped", str(error))
    if isinstance(error, XFailed):
        return Outcome("xfailed", str(error))
    if isinstance(error, pytest.exit.Exception):
        return Outcome("exit", str(error), returncode=error.returncode)
    info = pytest.ExceptionInfo.from_exception(error)
    report = item.repr_failure(info)
    message = _first_line(_crash_message(report) or info.exconly())
    if item.config.getoption("usepdb", False) and connected.request("may I debug?"):
        try:
            _debug(item, info)
        except pytest.exit.Exception as quitting:
            return Outcome("exit", str(quitting), returncode=quitting.returncode)
    consequence = isinstance(error, CommunicationError) or any(text in str(error) for text in CONSEQUENCES)
    return Outcome("failed", message, _kept(report), _pickled(error), consequence)


def _debug(item: Any, info: pytest.ExceptionInfo[BaseException]) -> None:
    """Open the debugger, as ``--pdb`` does."""
    _take_terminal()
    now = time.time()
    call: pytest.CallInfo[None] = pytest.CallInfo(None, info, now, now, 0.0, "call", _ispytest=True)
    report = pytest.TestReport.from_item_and_call(item, call)
    item.ihook.pytest_exception_interact(node=item, call=call, report=report)


def _crash_message(report: Any) -> str:
    crash = getattr(report, "reprcrash", None)
    return crash.message if crash is not None else ""


def _first_line(text: str) -> str:
    """Return the first line that is not blank; an empty string if there is none."""
    return next((line for line in text.splitlines() if line.strip()), "")


def _kept(value: Any) -> Any:
    """Return `value` if it can be pickled, otherwise its text."""
    try:
        pickle.dumps(value)
    except Exception:
        return str(value)
    return value


def _pickled(error: BaseException) -> bytes | None:
    """Return the pickled exception; None if it cannot be restored."""
    try:
        # Loading fails, for example, if __init__ takes more arguments than ``args`` contains.
        data = pickle.dumps(error)
        return data if type(pickle.loads(data)) is type(error) else None
    except Exception:
        return None


def _warning(record: Any) -> tuple[str, bytes, str, int]:
    try:
        category = pickle.dumps(record.category)
    except Exception:
        # for example, the class is defined inside a function
        category = pickle.dumps(UserWarning)
    return str(record.message), category, record.filename, record.lineno


def _log(config: pytest.Config) -> list[tuple[str, str]]:
    """Return the rank's log records."""
    plugin: Any = config.pluginmanager.getplugin("logging-plugin")
    text = plugin.report_handler.stream.getvalue().strip() if plugin is not None else ""
    return [("log", text)] if text else []
