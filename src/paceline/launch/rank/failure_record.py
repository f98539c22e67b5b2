"""The record of a rank's failure: the error, and when it was raised, to the microsecond.

Standard library only, because ranks of plain scripts load this file by path (``hook/sitecustomize.py``). The
note is torchelastic's error file, so that torchrun and ``@record`` understand it, with some keys more.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
import stat
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any

FILE = "TORCHELASTIC_ERROR_FILE"
LAUNCHER = "PACELINE_LAUNCHER"  # the process id of our launcher on this host, which reports for its ranks
# Messages with which Gloo and NCCL report that another rank is gone, in a plain RuntimeError. Other peers of a script
# may cause the same message, but it has no such address, and names neither library.
TRANSPORT = re.compile(r"gloo|nccl|\[[0-9a-f.:]+\]:\d+", re.IGNORECASE)
FROM_CALLBACK = "Got the following error when running the callback: CommunicationError: "
"""Start of the message of our CommunicationError after it has passed through C++, such as torch DDP's reducer."""
PEER_LOST = re.compile(
    r"connection (was likely )?closed|connection reset|connection refused|broken pipe|got 0 bytes|socket closed"
    r"|remote process exited|timed out waiting \d+ ?ms|caused pair closure|connectFullMesh",
    re.IGNORECASE,
)
_WRONG_PATHS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_PASSING = ("OutOfMemoryError", "AcceleratorError", "DistError", "WrongComputation")
"""Error classes for devices and collectives, torch's by name because importing torch takes seconds."""
_PASSING_TEXT = re.compile(r"CUDA error|out of memory|DataLoader worker")
LONGEST_MESSAGE, LONGEST_TRACE = 2_000, 8_000
"""Characters of an error's message and traceback that are kept: the beginning and the end."""
CUT = " … … "
"""Begins what stands between them."""
_FACTS = ("usage", "may_pass", "has_optimizer", "is_one_of")
"""Fields of a :class:`Record` that torch's own error files lack."""


@dataclass(frozen=True)
class Record:
    """The error of a rank: ``ValueError: …``, the whole traceback, and when, in seconds since the epoch.

    ``usage`` says that it is a UsageError; then only the message is shown. ``blamed`` is None unless the error is a
    consequence of another rank's failure; then it holds those ranks, as far as they are known. ``may_pass`` is from
    :func:`may_pass`. ``has_optimizer`` is False if the rank is known to have held none, so that it has hardly trained.
    ``is_one_of`` says that the error names several ranks, of which one is at fault, and nobody knows which.
    """

    message: str
    trace: str
    at: float
    usage: bool = False
    blamed: tuple[int, ...] | None = None
    may_pass: bool = False
    has_optimizer: bool = True
    is_one_of: bool = False


def write(path: str, record: Record) -> None:
    """Write `record` to the file `path`; a file that cannot be written must not hide the error itself."""
    note = {
        "message": {
            "message": shortened(record.message),
            "extraInfo": {"py_callstack": shortened(record.trace, LONGEST_TRACE), "timestamp": str(int(record.at))},
        },
        **{name: value for name, value in asdict(record).items() if name not in ("message", "trace")},
    }
    _write(path, note)


def _write(path: str, note: object) -> None:
    try:
        with open(path, "w") as file:
            json.dump(note, file)
    except OSError as error:
        print(f"warning: the error cannot be reported to the launcher: {error}", file=sys.stderr)


def read(path: str) -> Record | None:
    """Return the record in the file `path`, by us or by torch's ``@record``; None if there is no complete one."""
    note = _read(path)
    try:
        content = note["message"]
        if "leaving" in note:
            return None
        if isinstance(content, str):  # written by C++ and others
            at, message = float(note.get("at", note.get("timestamp", 0))), shortened(content)
            return Record(message, message, at, blamed=blamed_by(message), may_pass=True)
        more, message = content["extraInfo"], shortened(content["message"])
        at, trace = float(note.get("at", more["timestamp"])), shortened(more["py_callstack"], LONGEST_TRACE)
        blamed = note["blamed"] if "blamed" in note else blamed_by(message)
        facts = {"may_pass": True} | {name: bool(note[name]) for name in _FACTS if name in note}
        return Record(message, trace, at, blamed=None if blamed is None else tuple(blamed), **facts)
    except (ValueError, KeyError, TypeError):
        return None


def read_leaving(path: str) -> float | None:
    """Return when the rank whose file is `path` began to leave without reporting an error; None if it did not."""
    try:
        return float(_read(path)["leaving"])
    except (ValueError, KeyError, TypeError):
        return None


def _read(path: str) -> Any:
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def of(error: BaseException, usage: bool = False) -> Record:
    """Return the record of `error`, raised just now."""
    blamed = consequence(error)
    usage = usage and blamed is None
    named = f"{type(error).__name__}: {message_of(error)}"
    text = message_of(error) if usage else named
    try:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException:  # raised by the error's own __getattr__, of which Python wants notes
        trace = "".join([*traceback.format_tb(error.__traceback__), named])
    at, passing = time.time(), may_pass(error)
    is_one_of = type(error).__name__ == "WrongComputation" and len(getattr(error, "ranks", ())) > 1
    return Record(text, trace, at, usage, blamed, passing, passing or _has_optimizer(), is_one_of)


def of_script(error: BaseException) -> Record:
    """Return the record of an error that ended a script; our UsageError is the user's mistake, at a line of the script.

    It is recognized by the name of its class, because importing the class would import torch.
    """
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__}
    record = of(error, usage="paceline.errors.UsageError" in kinds)
    if not record.usage:
        return record
    from paceline.core.telemetry.users_code import place_in  # paceline is there already, as the error is of its own

    return replace(record, message=record.message + place_in(error.__traceback__))


def message_of(error: BaseException) -> str:
    """Return the message of `error`, shortened; a ``__str__`` that raises must not hide the error."""
    try:
        return shortened(str(error))
    except BaseException as problem:  # SystemExit, too
        return f"<no message: {type(error).__name__}.__str__() raised {type(problem).__name__}>"


def shortened(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """Return the beginning and the end of a `text` that is longer than `longest` characters."""
    left_out = len(text) - longest
    if left_out <= 0:
        return text
    return f"{text[: longest // 2]}{CUT}{left_out:,} characters left out … {text[-(longest // 2) :]}"


def consequence(error: BaseException | None) -> tuple[int, ...] | None:
    """Return the ranks whose failure led to `error`, as far as it names them; None if it is no consequence.

    An error that was raised from another one, or while another one was handled, is a consequence if that one is.
    """
    for each in _chain(error):
        try:
            blamed = getattr(each, "blamed", None)
        except Exception:  # the error has attributes of its own
            blamed = None
        if isinstance(blamed, tuple):
            return blamed
        # torch's classes for sockets and stores: they fail when a rank does not come, or the one that serves is gone.
        if type(each).__name__ in ("DistNetworkError", "DistStoreError"):
            return ()
        if type(each).__name__ in ("RuntimeError", "DistBackendError") and blamed_by(message_of(each)) is not None:
            return ()
    return None


def may_pass(error: BaseException) -> bool:
    """Return whether `error` comes from the host, a device or the network, so that the next start may be spared it.

    These are system errors (but not wrong paths), lack of memory, errors of devices and collectives, killed workers of
    a DataLoader, and every error raised from one of them.
    """
    return any(
        (isinstance(each, OSError) and not isinstance(each, _WRONG_PATHS))
        or isinstance(each, MemoryError)
        or any(kind.__name__ in _PASSING for kind in type(each).__mro__)
        or (isinstance(each, RuntimeError) and _PASSING_TEXT.search(message_of(each)) is not None)
        for each in _chain(error)
    )


def _has_optimizer() -> bool:
    """Return whether this process holds an optimizer of torch's, like every script that trains, with any wrapper."""
    torch = sys.modules.get("torch")
    optimizer = getattr(getattr(torch, "optim", None), "Optimizer", None)
    return optimizer is not None and any(issubclass(type(each), optimizer) for each in gc.get_objects())


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error`, and the chain of its causes and contexts."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def blamed_by(message: str) -> tuple[int, ...] | None:
    """Return the result of :func:`consequence` for an error that is known only by its text."""
    if message.startswith(FROM_CALLBACK):
        return ()
    return () if PEER_LOST.search(message) and TRANSPORT.search(message) else None


def is_shown_by_launcher() -> bool:
    """Return whether a launcher shows this rank's error where the rank would show it; then the rank does not."""
    try:
        theirs, ours = f"/proc/{int(os.environ[LAUNCHER])}/fd", os.fstat(2)
        # The launcher holds the pipe or terminal to which its ranks print; the file of a log is not on its stderr.
        for number in ["2"] if stat.S_ISREG(ours.st_mode) else os.listdir(theirs):
            with suppress(FileNotFoundError):  # closed meanwhile
                if os.path.samestat(os.stat(f"{theirs}/{number}"), ours):
                    return True
    except (KeyError, ValueError, OSError):
        pass
    return False


def install() -> None:
    """Record uncaught exceptions of this process before anything else handles them, and when the process leaves.

    Before: a peer can lose its connection to this rank only after the interpreter began to shut down, so the
    order of the records is the order of cause and effect.
    """
    path, process, shown = os.environ.get(FILE), os.getpid(), sys.excepthook
    if not path:
        return

    def note(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_own_error = os.getpid() == process and not issubclass(error_type, KeyboardInterrupt)
        if is_own_error:
            write(path, of_script(error))
            atexit.register(_leave_gloo)
        if not is_own_error or not is_shown_by_launcher():
            shown(error_type, error, trace)

    def leave() -> None:
        if os.getpid() == process and _read(path) is None:
            # With a message, because torchelastic's agent reads the file of a rank that ended with another code than 0.
            now = time.time()
            _write(path, {"leaving": now, "message": "", "timestamp": int(now)})

    sys.excepthook = note
    if LAUNCHER in os.environ:  # other launchers would take it for an error
        atexit.register(leave)


def _leave_gloo() -> None:
    """Release the process group before the interpreter shuts down around Gloo's threads.

    Otherwise they sometimes abort it, and a signal hides how the rank ended. NCCL's threads may wait for peers, so they
    are left alone.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized() and "nccl" not in str(dist.get_backend_config()):
        dist.destroy_process_group()
