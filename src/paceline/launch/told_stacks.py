"""Asks ranks for the Python stacks of their threads, and reads what they answer."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from paceline.black_box import handles
from paceline.launch.stacks import number, path_of

ANSWER_S = 1.0
"""How long a rank may take to write its stacks."""


def ask(folder: Path, processes: Mapping[int, int], resume: bool = False) -> dict[int, str]:
    """Return the stacks of the ranks whose `processes` these are, by local rank; those that do not answer are left out.

    Args:
        folder: the job's.
        processes: by local rank.
        resume: whether ranks that were stopped are continued for it, without which they do not answer.
    """
    waiting = {}
    for rank, pid in processes.items():
        path = path_of(folder, rank)
        try:
            if handles(pid, number()):
                os.truncate(path, 0)
                _signal_main_thread(pid, number())
                if resume:
                    os.kill(pid, signal.SIGCONT)
                waiting[rank] = path
        except OSError:
            continue
    stacks: dict[int, str] = {}
    deadline = time.monotonic() + ANSWER_S
    while waiting and time.monotonic() < deadline:
        time.sleep(0.002)
        for rank, path in list(waiting.items()):
            text = _read(path)
            if "Current thread" in text and text == stacks.get(rank):  # to the end, as nothing has come for a moment
                del waiting[rank]
            elif text:
                stacks[rank] = text
    return stacks


def _signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread itself.

    Of a process that is stopped any thread may take what is sent to the process, when it goes on; and the main thread,
    whose stack is asked for, would be elsewhere by then.

    Raises:
        OSError: if that fails.
    """
    try:
        send = ctypes.CDLL(None, use_errno=True).tgkill
    except AttributeError:  # an old C library
        os.kill(pid, number)
        return
    if send(pid, pid, number) != 0:
        raise OSError(ctypes.get_errno(), "tgkill")


def main_thread(stacks: str) -> list[str]:
    """Return the frames of the thread that wrote `stacks`, which is the main one, the innermost first."""
    _, _, after = stacks.partition("Current thread ")
    return [line.strip() for line in after.split("\n\n")[0].splitlines()[1:]]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
