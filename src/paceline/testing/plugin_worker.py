"""The part of the plug-in that runs on a rank: runs a test's body as pytest would run it in the test process.

The test process also uses the parts that both must agree on: the marker, the deferred fixtures, and coverage.
"""

from __future__ import annotations

import functools
import os
import pickle
import re
import sys
import tempfile
import time
import unittest
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from _pytest.outcomes import XFailed

import paceline.core.world
from paceline.core.option_rules import choice, positive
from paceline.core.torch_distributed import cell_of
from paceline.errors import CommunicationError, UsageError
from paceline.testing.faults import Faults
from paceline.testing.rank_processes import TOO_LATE, Connected, Outcome, environment
from paceline.testing.recorded_collectives import Recorder

WORLD: pytest.StashKey[Any] = pytest.StashKey()
FAULTS: pytest.StashKey[Any] = pytest.StashKey()
TIMEOUT_S = 60.0
BACKENDS = ("paceline", "gloo", "nccl")
FORM = "write @pytest.mark.ranks(2) or @pytest.mark.ranks(1, 2, 4, timeout=30, backend='gloo')"
LEAST_PATIENCE_S = 30.0
"""Minimum timeout of collectives in seconds, to leave ranks time to start."""
CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe")
"""Parts of error messages of collectives that failed because of another rank."""
UNFORKABLE = ("fork-based multiprocessing", "in forked subprocess", "CUDA error: initialization error")
"""Parts of torch's error messages in a process that was forked too late (:data:`.TOO_LATE`)."""
RUNNER = re.compile(r"event_loop|_function_scoped_runner")
"""Names of pytest-asyncio fixtures that contain an event loop, whose file descriptors ranks cannot share."""


@dataclass(frozen=True)
class RanksMark:
    """The checked arguments of a test's ``ranks`` marker."""

    counts: tuple[int, ...]
    """Numbers of ranks; the test runs once for each."""
    timeout: float = TIMEOUT_S
    """Seconds that the test may take once all ranks have started."""
    backend: str | None = None
    """Backend of the process group; None for the default of ``paceline.init()``."""

    @classmethod
    def of(cls, counts: tuple[Any, ...], options: Mapping[str, Any]) -> RanksMark:
        """Return the marker with these arguments, or raise a :class:`UsageError`."""
        unknown = options.keys() - {"timeout", "backend"}
        if unknown:
            raise UsageError(f"the ranks marker has no argument {', '.join(sorted(unknown))}; {FORM}")
        if not counts or any(type(count) is not int or count < 1 for count in counts):
            raise UsageError(f"the ranks marker got {counts}, not one or more whole numbers above 0; {FORM}")
        if len(set(counts)) < len(counts):
            raise UsageError(f"the ranks marker got {counts}; give each number only once")
        mark = cls(counts, **options)
        positive("the ranks marker's timeout", mark.timeout)
        if mark.backend is not None:
            choice("the ranks marker's backend", mark.backend, BACKENDS)
        return mark


class _Deferred:
    """Placeholder for a fixture that the test process does not set up."""

    def __repr__(self) -> str:
        return "<set up on the ranks>"


DEFERRED = _Deferred()


def defer(item: Any) -> None:
    """Keep the test process from setting up fixtures that need the process group, and fixtures that depend on them.

    They are set up and torn down on the ranks.
    """
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


def run_body(item: Any, runtest: Callable[[], None], mark: RanksMark, connected: Connected) -> Outcome:
    """Run the test of `item` on this rank, and record its calls to torch's functions."""
    properties = len(item.user_properties)
    _separate_output(item.config)
    reports = _listen(item.config, connected)
    with measured(connected.folder, connected.rank), ExitStack() as stack:
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
    outcome.sections = _read_output(item.config) + _log(item.config)
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
    faults = Faults(connected.rank, connected.size, lambda why: connected.send("killed", why))
    recorder = None
    # The test process tears down the fixtures that it has set up.
    undo = run_new_finalizers(item)
    error: BaseException | None = None
    try:
        os.environ.update(environment(connected.rank, connected.size, connected.port))
        # If the test's timeout is long, use a shorter one, so that a hang ends with the collective's message.
        patience = timedelta(seconds=max(mark.timeout * 0.8, LEAST_PATIENCE_S))
        world = paceline.core.world.init(mark.backend, patience)
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
            paceline.core.world.current().close()
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


def _separate_output(config: pytest.Config) -> None:
    """Make pytest's own capturing write this rank's output into the rank's own files.

    Forks share the test process's files, with one offset for all ranks. A rank replaces them, so that ``capsys``,
    ``capfd`` and the report contain only the output of this rank.
    """
    manager: Any = config.pluginmanager.getplugin("capturemanager")
    for capturing in _capturings(manager):
        for capture in (capturing.out, capturing.err):
            file = getattr(capture, "tmpfile", None)
            descriptor = getattr(capture, "targetfd", None)
            if file is None or descriptor is None:  # not captured, or captured in memory
                continue
            with tempfile.TemporaryFile(buffering=0) as capture_file:
                os.dup2(capture_file.fileno(), file.fileno())
            # While capturing is suspended, for example by capsys.disabled(), the descriptor is the terminal's.
            if capture._state == "started":
                os.dup2(file.fileno(), descriptor)


def _read_output(config: pytest.Config) -> list[tuple[str, str]]:
    """Return this rank's output since the last call, as pairs of ``stdout`` or ``stderr`` and the text."""
    manager: Any = config.pluginmanager.getplugin("capturemanager")
    texts = {"stdout": "", "stderr": ""}
    for stream in (sys.stdout, sys.stderr):
        with suppress(ValueError, OSError):
            stream.flush()
    for capturing in _capturings(manager):
        # A test may have closed a file; pytest asserts that this does not happen.
        with suppress(ValueError, OSError, AssertionError):
            out, err = capturing.readouterr()
            texts["stdout"] += out if isinstance(out, str) else out.decode(errors="replace")
            texts["stderr"] += err if isinstance(err, str) else err.decode(errors="replace")
    return [(name, text) for name, text in texts.items() if text]


def _capturings(manager: Any) -> list[Any]:
    """Return pytest's active capturing objects: the session's, and that of a fixture, if any."""
    fixture = getattr(manager, "_capture_fixture", None)
    capturings = [getattr(manager, "_global_capturing", None), getattr(fixture, "_capture", None)]
    return [capturing for capturing in capturings if capturing is not None]


@contextmanager
def measured(folder: Path, rank: int) -> Iterator[None]:
    """Measure coverage of the block with the test process's settings, and write the data to a file in `folder`.

    coverage.py's ``patch = fork, _exit`` is not enough: it saves when a process calls ``os._exit``, but the test
    process kills ranks. The user would also have to configure it.
    """
    inherited = _current_coverage()
    if inherited is None:
        yield
        return
    coverage: Any = sys.modules["coverage"]
    inherited.stop()
    options = {name: inherited.get_option(f"run:{name}") for name in ("branch", "source", "include", "omit")}
    options["config_file"] = getattr(inherited.config, "config_file", None) or False
    measurement = coverage.Coverage(data_file=str(folder / f"coverage-{rank}"), messages=False, **options)
    measurement.set_option("run:parallel", False)
    measurement.set_option("run:patch", [])
    # Disable warnings that pytest might turn into errors. A rank does not have to run any of the measured source.
    measurement._warn_no_data = measurement._warn_unimported_source = measurement._warn_preimported_source = False
    with _where_paths_begin():
        measurement.start()  # start() resolves relative paths
    try:
        yield
    finally:
        measurement.stop()
        measurement.save()


@contextmanager
def _where_paths_begin() -> Iterator[None]:
    """Change to the base folder of relative source paths, because the test may have changed to another folder."""
    from coverage.files import relative_directory

    cwd = os.open(".", os.O_RDONLY)  # a descriptor instead of a path, because the test may have deleted the folder
    try:
        os.chdir(relative_directory())
        yield
    finally:
        os.fchdir(cwd)
        os.close(cwd)


def harvest(folder: Path) -> None:
    """Merge the coverage that ranks wrote to `folder` into the test process's own."""
    current = _current_coverage()
    if current is None:
        return
    coverage: Any = sys.modules["coverage"]
    for file in sorted(folder.glob("coverage-*")):
        measured_there = coverage.CoverageData(basename=str(file))
        measured_there.read()
        current.get_data().update(measured_there)


def _current_coverage() -> Any:
    """Return the active coverage.py object; None if there is none."""
    coverage: Any = sys.modules.get("coverage")
    return coverage.Coverage.current() if coverage is not None and hasattr(coverage, "Coverage") else None
