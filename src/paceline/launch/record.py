"""The note that a failing rank leaves for its launcher: what it raised, and when, to the microsecond.

Standard library only, because ranks of plain scripts load this file by path (``hook/sitecustomize.py``). The
note is torchelastic's error file, so that torchrun and ``@record`` understand it, with two keys more.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from types import TracebackType

FILE = "TORCHELASTIC_ERROR_FILE"


@dataclass(frozen=True)
class Record:
    """What a rank raised: ``ValueError: …``, the whole traceback, and when, in seconds since the epoch.

    ``usage`` says that it is a mistake of the caller's, of which the message is all that has to be shown.
    """

    message: str
    trace: str
    at: float
    usage: bool = False


def write(path: str, record: Record) -> None:
    """Leave `record` in the file `path`; a file that cannot be written must not hide the error itself."""
    note = {
        "message": {
            "message": record.message,
            "extraInfo": {"py_callstack": record.trace, "timestamp": str(int(record.at))},
        },
        "at": record.at,
        "usage": record.usage,
    }
    try:
        with open(path, "w") as file:
            json.dump(note, file)
    except OSError as error:
        print(f"warning: the error cannot be reported to the launcher: {error}", file=sys.stderr)


def read(path: str) -> Record | None:
    """The record in the file `path`, by us or by torch's ``@record``; None if there is no whole one."""
    try:
        with open(path) as file:
            note = json.load(file)
        message = note["message"]
        if isinstance(message, str):  # what C++ and other writers leave
            return Record(message, message, float(note.get("at", note.get("timestamp", 0))))
        more = message["extraInfo"]
        at = float(note.get("at", more["timestamp"]))
        return Record(message["message"], more["py_callstack"], at, bool(note.get("usage", False)))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def of(error: BaseException, usage: bool = False) -> Record:
    """The record of `error`, raised just now."""
    text = str(error) if usage else f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Record(text, trace, time.time(), usage)


def install() -> None:
    """Record what this process fails to catch, before anything else is done about it.

    Before: a peer can lose its connection to this rank only after the interpreter began to shut down, so the
    order of the records is the order of cause and effect.
    """
    path, process, shown = os.environ.get(FILE), os.getpid(), sys.excepthook
    if not path:
        return

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == process and not issubclass(kind, KeyboardInterrupt):
            write(path, of(error))
            atexit.register(_leave_gloo)
        shown(kind, error, trace)

    sys.excepthook = note


def _leave_gloo() -> None:
    """Let go of the process group before the interpreter takes the process down around Gloo's threads.

    Else they sometimes abort it, and a signal hides how it ended. NCCL's may wait for peers, so they are left alone.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized() and "nccl" not in str(dist.get_backend_config()):
        dist.destroy_process_group()
