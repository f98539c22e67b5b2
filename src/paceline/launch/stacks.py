"""Python stacks of a rank's threads, which it writes itself when a signal comes, whatever it is doing.

Python's ``faulthandler`` does that in C, in the main thread, without the interpreter: also in an endless loop, and in a
call that does not come back. Standard library only, because ranks load this file by path (``hook/sitecustomize.py``).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

FOLDER = "PACELINE_BLACK_BOX"  # where the launcher reads; as in paceline.black_box
ANSWER_S = 1.0
"""How long a rank may take to write its stacks."""


def number() -> int:
    """Return the signal: one that no program uses, as far as one can know; 0 where there is none."""
    return signal.SIGRTMAX - 5 if sys.platform == "linux" else 0


def path_of(folder: Path, local_rank: int) -> Path:
    """Return the path of a rank's file."""
    return folder / f"stacks-{local_rank}"


def install(environment: Mapping[str, str] = os.environ) -> None:
    """Have this process write its stacks when the signal comes."""
    folder, rank = environment.get(FOLDER), environment.get("LOCAL_RANK")
    if not folder or not rank or not number():
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC | os.O_CLOEXEC
    try:
        descriptor = os.open(path_of(Path(folder), int(rank)), flags, 0o600)
    except (OSError, ValueError):  # the report does without
        return
    faulthandler.register(number(), descriptor, all_threads=True, chain=False)


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
            if _catches(pid, number()):
                os.truncate(path, 0)
                os.kill(pid, number())
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


def main_thread(stacks: str) -> list[str]:
    """Return the frames of the thread that wrote `stacks`, which is the main one, the innermost first."""
    _, _, after = stacks.partition("Current thread ")
    return [line.strip() for line in after.split("\n\n")[0].splitlines()[1:]]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _catches(pid: int, signal_number: int) -> bool:
    """Return whether the process handles the signal; otherwise that would end it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "SigCgt":
            return bool(int(value, 16) >> (signal_number - 1) & 1)
    return False
