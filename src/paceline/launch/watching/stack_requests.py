"""Requests and analyzes the Python stacks of ranks."""

from __future__ import annotations

import ctypes
import linecache
import os
import re
import signal
import sysconfig
import time
from collections.abc import Mapping
from itertools import dropwhile, takewhile
from pathlib import Path

from paceline import errors
from paceline.core.process_status import handles
from paceline.launch.rank.stack_dump import number, path_of, polite_number

POLITE_S, ANSWER_S = 0.5, 1.0
"""Seconds for a rank to write its stacks, after the first signal and after the second."""
BACKWARD = "Tensor.backward"
"""The call in the script during which torch's wrapper waits for gradients."""
_FOLDER = re.escape(f"{Path(errors.__file__).parent}/")
# Without a virtual environment, the folder of installed packages is inside the standard library's folder.
_STDLIB = re.escape(f"{sysconfig.get_path('stdlib')}/") + "(?!(?:site|dist)-packages/)"
_PACKAGE, _LAUNCHES, _STANDARD = (re.compile(folder) for folder in (_FOLDER, f"{_FOLDER}launch/", _STDLIB))
_WAITS = re.compile(
    rf"/torch/distributed/(?!checkpoint/|elastic/)|/torch/nn/parallel/distributed\.py|{_FOLDER}(comm/|core/processes/missing_ranks\.py)"
)
"""Code that waits for other ranks."""
ENGINE = re.compile(r"/torch/autograd/graph\.py.* in _engine_run_backward$")
"""A frame of torch's autograd engine. When the engine has finished, torch's wrapper waits in this frame."""
_LIBRARY = re.compile(rf'{_FOLDER}|{_STDLIB}|/(site|dist)-packages/|"<')
_SAVING = re.compile(f"{_FOLDER}checkpoint/saving/")
_HANDLER = re.compile(r"  File .*/stack_dump\.py\", line \d+ in write_stacks\n")
PLACE = re.compile(r'File "(.*)", line (\d+) in (.*)')
"""File, line and function of a frame."""


def request_stacks(folder: Path, processes: Mapping[int, int], resume: bool = False) -> dict[int, str]:
    """Request stacks and return the answers by local rank, leaving out ranks that do not answer.

    Args:
        folder: the job's folder.
        processes: process ids by local rank.
        resume: whether to continue stopped ranks, which would otherwise not answer.
    """
    stacks: dict[int, str] = {}
    for signal_number, seconds in ((polite_number(), POLITE_S), (number(), ANSWER_S)):
        waiting = {}
        for rank, pid in processes.items():
            path = path_of(folder, rank)
            try:
                if rank not in stacks and handles(pid, signal_number):
                    # From now on, any text in the file is part of the answer.
                    os.truncate(path, 0)
                    _signal_main_thread(pid, signal_number)
                    # Continue only after the signal, so that the main thread handles the signal first.
                    if resume:
                        os.kill(pid, signal.SIGCONT)
                    waiting[rank] = path
            except OSError:
                continue
        stacks |= _answers(waiting, seconds)
    return stacks


def _answers(waiting: dict[int, Path], seconds: float) -> dict[int, str]:
    """Return the stacks that the ranks write within `seconds`."""
    stacks: dict[int, str] = {}
    deadline = time.monotonic() + seconds
    while waiting and time.monotonic() < deadline:
        time.sleep(0.002)
        for rank, path in list(waiting.items()):
            text = _read(path)
            if "Current thread" in text and text == stacks.get(rank):  # complete
                del waiting[rank]
            elif text:
                stacks[rank] = text
    return stacks


def _signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of a process, because its stack is requested.

    If the signal went to a stopped process as a whole, another thread could handle it while the main thread moves on.
    """
    try:
        send = ctypes.CDLL(None, use_errno=True).tgkill
    except AttributeError:  # old C library
        os.kill(pid, number)
        return
    if send(pid, pid, number) != 0:
        raise OSError(ctypes.get_errno(), "tgkill")


def main_thread(stacks: str) -> list[str]:
    """Return the frames of the main thread from `stacks`, innermost first."""
    _, _, frames = stacks.partition("Current thread ")
    return [line.strip() for line in frames.split("\n\n")[0].splitlines()[1:]]


def waiting_frames(stacks: str, also: str | None = None) -> list[str]:
    """Return the frame that waits for other ranks, followed by its callers; an empty list if the rank does not wait.

    Args:
        stacks: the rank's stacks.
        also: part of a path; code in matching files also counts as waiting.
    """
    frames = main_thread(stacks)
    if frames and (ENGINE.search(frames[0]) or _is_script_waiting(frames[0])):
        return frames
    frames = list(dropwhile(_STANDARD.search, frames))
    waits = bool(frames) and (_WAITS.search(frames[0]) or (also is not None and also in frames[0]))
    return frames if waits else []


def waiting_call(stacks: str) -> str:
    """Return the name of the call in the script that waits for other ranks; an empty string if no call waits."""
    frames = waiting_frames(stacks)
    if not frames:
        return ""
    if ENGINE.search(frames[0]):
        return BACKWARD
    call = "wait"
    for frame in takewhile(_WAITS.search, frames):  # the last match is the script's call
        name = frame.rpartition(" in ")[2]
        if "/torch/" in frame and name not in ("wrapper", "_wait"):
            call = name
    return call


def is_in_script(stacks: str) -> bool:
    """Return whether the rank is in code of the script that Paceline or torch.distributed called.

    Examples are hooks and the ``state_dict`` method of a saved object.
    """
    is_script = False
    for frame in main_thread(stacks):
        if _WAITS.search(frame) or (_PACKAGE.search(frame) and not _LAUNCHES.search(frame)):
            return is_script
        is_script = is_script or not _LIBRARY.search(frame)
    return False


def waits_for_save(stacks: str) -> bool:
    """Return whether the main thread waits for a background save, in close() or during interpreter shutdown."""
    frames = list(dropwhile(_STANDARD.search, main_thread(stacks)))
    return bool(_SAVING.search(stacks)) and (not frames or bool(_SAVING.search(frames[0])))


def _is_script_waiting(frame: str) -> bool:
    """Return whether the frame is in the script and calls ``wait()`` on an asynchronous collective or a future."""
    place = PLACE.search(frame)
    return bool(place and not _LIBRARY.search(frame) and ".wait(" in linecache.getline(place[1], int(place[2])))


def _read(path: Path) -> str:
    try:
        return _HANDLER.sub("", path.read_text(errors="replace"))
    except OSError:
        return ""
