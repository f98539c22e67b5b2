"""The record of a rank's failure: the error and when it was raised.

The file has the format of torchelastic's error file, with additional keys, so torchrun and ``@record`` can read it.
Standard library only, because ranks load this module by path (``launch/hook/sitecustomize.py``).
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
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

FILE = "TORCHELASTIC_ERROR_FILE"
LAUNCHER = "PACELINE_LAUNCHER"  # process id of Paceline's launcher on this host
# Gloo and NCCL report a lost rank with a RuntimeError whose message matches both TRANSPORT and PEER_LOST. Errors from a
# script's other connections contain neither such an address nor the name of such a library.
TRANSPORT = re.compile(r"gloo|nccl|\[[0-9a-f.:]+\]:\d+", re.IGNORECASE)
FROM_CALLBACK = "Got the following error when running the callback: CommunicationError: "
"""Start of the message of a CommunicationError that was raised through C++ code, such as torch DDP's reducer."""
PEER_LOST = re.compile(
    r"connection (was likely )?closed|connection reset|connection refused|broken pipe|got 0 bytes|socket closed"
    r"|remote process exited|timed out waiting \d+ ?ms|caused pair closure|connectFullMesh",
    re.IGNORECASE,
)
_WRONG_PATHS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_PASSING = ("OutOfMemoryError", "AcceleratorError", "DistError")
"""Error classes for devices and collectives, by name because importing torch would take seconds."""
_PASSING_TEXT = re.compile(r"CUDA error|out of memory|DataLoader worker")
LONGEST_MESSAGE, LONGEST_TRACE = 2_000, 8_000
"""Maximum length of an error's message and traceback; the middle is cut out."""
CUT = " … … "
"""Start of the text that replaces the middle."""
_FACTS = ("usage", "may_pass", "has_optimizer")
"""Fields of a :class:`Record` that are not in torch's error files."""


@dataclass(frozen=True)
class Record:
    """The error of a rank: a message such as ``ValueError: …``, the traceback, and the time in seconds since the epoch.

    Args:
        usage: whether it is a UsageError, which is shown without its traceback.
        blamed: ranks known to have caused this error; None if the error is not a consequence.
        may_pass: see :func:`may_pass`.
        has_optimizer: whether the rank may have held an optimizer; without one it has not trained.
    """

    message: str
    trace: str
    at: float
    usage: bool = False
    blamed: tuple[int, ...] | None = None
    may_pass: bool = False
    has_optimizer: bool = True


def write(path: str, record: Record) -> None:
    """Write `record` to the file `path`. If that fails, print a warning."""
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
        print(f"warning: cannot report the error to the launcher: {error}", file=sys.stderr)


def read(path: str) -> Record | None:
    """Return the record from the file `path`, which torch's ``@record`` may have written; None if it has no error."""
    note = _read(path)
    try:
        content = note["message"]
        more, message = content["extraInfo"], shortened(content["message"])
        at, trace = float(note.get("at", more["timestamp"])), shortened(more["py_callstack"], LONGEST_TRACE)
        blamed = note["blamed"] if "blamed" in note else blamed_by(message)
        facts = {"may_pass": True} | {name: bool(note[name]) for name in _FACTS if name in note}
        return Record(message, trace, at, blamed=None if blamed is None else tuple(blamed), **facts)
    except (ValueError, KeyError, TypeError):
        return None


def read_leaving(path: str) -> float | None:
    """Return when the rank with the error file `path` began to exit without an error; None if it did not."""
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


def of(error: BaseException) -> Record:
    """Return the record of an error that was just raised. A UsageError also gets the line in the script.

    A UsageError is recognized by its class name, because importing the class would import torch.
    """
    blamed, message = consequence(error), message_of(error)
    text = f"{type(error).__name__}: {message}"
    try:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException:  # raised by the error's __getattr__ when Python asks for its notes
        trace = "".join([*traceback.format_tb(error.__traceback__), text])
    at, passing = time.time(), may_pass(error)
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__}
    usage = "paceline.errors.UsageError" in kinds and blamed is None
    if usage:
        from paceline.core.stacks import place_in  # paceline has already been imported

        text = message + place_in(error.__traceback__)
    return Record(text, trace, at, usage, blamed, passing, passing or _has_optimizer())


def message_of(error: BaseException) -> str:
    """Return the shortened message of `error`, or a substitute if its ``__str__`` raises."""
    try:
        return shortened(str(error))
    except BaseException as problem:
        return f"<no message: {type(error).__name__}.__str__() raised {type(problem).__name__}>"


def shortened(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """Return `text` without its middle if it is longer than `longest` characters."""
    left_out = len(text) - longest
    if left_out <= 0:
        return text
    return f"{text[: longest // 2]}{CUT}{left_out:,} characters left out … {text[-(longest // 2) :]}"


def consequence(error: BaseException | None) -> tuple[int, ...] | None:
    """Return the ranks that `error` blames, possibly an empty tuple; None if the error is not a consequence.

    An error is also a consequence if its ``__cause__`` or ``__context__`` is one.
    """
    for link in _chain(error):
        try:
            blamed = getattr(link, "blamed", None)
        except Exception:  # raised by the error's __getattr__
            blamed = None
        if isinstance(blamed, tuple):
            return blamed
        # torch's errors for sockets and stores, raised if a rank is absent or the rank that serves the store has ended
        if type(link).__name__ in ("DistNetworkError", "DistStoreError"):
            return ()
        if type(link).__name__ in ("RuntimeError", "DistBackendError") and blamed_by(message_of(link)) is not None:
            return ()
    return None


def may_pass(error: BaseException) -> bool:
    """Return whether `error` comes from the host, a device or the network, and so may not recur.

    True for system errors (except wrong paths), out-of-memory errors, errors from devices and collectives, killed
    DataLoader workers, and errors raised from any of these.
    """
    return any(
        (isinstance(link, OSError) and not isinstance(link, _WRONG_PATHS))
        or isinstance(link, MemoryError)
        or any(kind.__name__ in _PASSING for kind in type(link).__mro__)
        or (isinstance(link, RuntimeError) and _PASSING_TEXT.search(message_of(link)) is not None)
        for link in _chain(error)
    )


def _has_optimizer() -> bool:
    """Return whether this process holds a torch optimizer."""
    torch = sys.modules.get("torch")
    optimizer = getattr(getattr(torch, "optim", None), "Optimizer", None)
    return optimizer is not None and any(issubclass(type(instance), optimizer) for instance in gc.get_objects())


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error`, followed by its chain of causes and contexts."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def blamed_by(message: str) -> tuple[int, ...] | None:
    """Like :func:`consequence`, but based only on the error's message."""
    if message.startswith(FROM_CALLBACK):
        return ()
    return () if PEER_LOST.search(message) and TRANSPORT.search(message) else None


def is_shown_by_launcher() -> bool:
    """Return whether the launcher will print this rank's error to the rank's own stderr."""
    try:
        launcher_fds, own_stderr = f"/proc/{int(os.environ[LAUNCHER])}/fd", os.fstat(2)
        # A pipe or terminal may be any open descriptor of the launcher. Compare a log file only with its stderr.
        for number in ["2"] if stat.S_ISREG(own_stderr.st_mode) else os.listdir(launcher_fds):
            with suppress(FileNotFoundError):  # closed in the meantime
                if os.path.samestat(os.stat(f"{launcher_fds}/{number}"), own_stderr):
                    return True
    except (KeyError, ValueError, OSError):
        pass
    return False


def install() -> None:
    """Record any uncaught exception of this process, or else the time of its exit.

    A peer loses its connection to this rank only after the interpreter begins to shut down, so the cause is recorded
    before its consequences.
    """
    path, process, shown = os.environ.get(FILE), os.getpid(), sys.excepthook
    if not path:
        return

    def note(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_own_error = os.getpid() == process and not issubclass(error_type, KeyboardInterrupt)
        if is_own_error:
            write(path, of(error))
            atexit.register(_leave_gloo)
        if not is_own_error or not is_shown_by_launcher():
            shown(error_type, error, trace)

    def leave() -> None:
        if os.getpid() == process and _read(path) is None:
            # If the rank exits with a nonzero code, torchelastic's agent reads "message" and "timestamp".
            now = time.time()
            _write(path, {"leaving": now, "message": "", "timestamp": int(now)})

    sys.excepthook = note
    if LAUNCHER in os.environ:  # other launchers would mistake the file for an error
        atexit.register(leave)


def _leave_gloo() -> None:
    """Destroy the process group before the interpreter shuts down; otherwise Gloo's threads may abort the shutdown.

    Leaves NCCL groups alone, because their threads may wait for peers.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized() and "nccl" not in str(dist.get_backend_config()):
        dist.destroy_process_group()
