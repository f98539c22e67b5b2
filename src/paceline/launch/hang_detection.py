"""Detects ranks that make no progress while other ranks wait for them, and ranks that were stopped.

Progress is any change in a rank's black box. A rank waits for others if it is inside a collective, according to its box
or stack, and its main thread has been asleep the whole time. A rank that neither makes progress nor waits counts as
hanging. When a rank has made no progress for the length of the timeout, the launcher requests the stacks of all ranks,
and repeats the request every half timeout.

The timeout is :data:`PATIENCE` times as long in the first step of a start, which may compile; during a save; and in the
script's own code while no other rank waits, because that may be an evaluation.
"""

from __future__ import annotations

import ctypes
import linecache
import os
import re
import signal
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import dropwhile, takewhile
from pathlib import Path

from paceline import errors
from paceline.core.black_box import WAITING, Snapshot, snapshot_of
from paceline.core.host import context_switches, handles, process_state
from paceline.launch.root_cause import End, doings, missed, quoted, state_of
from paceline.launch.stack_dump import number, path_of, polite_number

POLITE_S, ANSWER_S = 0.5, 1.0
"""Seconds for a rank to write its stacks, after the first signal and after the second."""
BACKWARD = "Tensor.backward"
"""The call in the script during which torch's wrapper waits for gradients."""
_FOLDER = re.escape(f"{Path(errors.__file__).parent}/")
# Without a virtual environment, the folder of installed packages is inside the standard library's folder.
_STDLIB = re.escape(f"{sysconfig.get_path('stdlib')}/") + "(?!(?:site|dist)-packages/)"
_PACKAGE, _LAUNCHES, _STANDARD = (re.compile(folder) for folder in (_FOLDER, f"{_FOLDER}launch/", _STDLIB))
_WAITS = re.compile(
    rf"/torch/distributed/(?!checkpoint/|elastic/)|/torch/nn/parallel/distributed\.py|{_FOLDER}(comm/|core/missing_ranks\.py)"
)
"""Code that waits for other ranks."""
ENGINE = re.compile(r"/torch/autograd/graph\.py.* in _engine_run_backward$")
"""A frame of torch's autograd engine. When the engine has finished, torch's wrapper waits in this frame."""
_LIBRARY = re.compile(rf'{_FOLDER}|{_STDLIB}|/(site|dist)-packages/|"<')
_SAVING = re.compile(rf"{_FOLDER}checkpoint/(saving|due_saves|run_folder)\.py")
_HANDLER = re.compile(r"  File .*/stack_dump\.py\", line \d+ in write_stacks\n")
PLACE = re.compile(r'File "(.*)", line (\d+) in (.*)')
"""File, line and function of a frame."""
PATIENCE = 10
"""Multiplier of the timeout for phases that may take long."""
BETWEEN_S = 0.2
"""Interval between two checks, in seconds."""
TO_ANSWER = 4
"""Maximum number of times that a sleeping thread has to run in order to write its stacks."""
LONGEST_S = 1.0
"""Maximum time between two checks that counts, in seconds. Ranks that were stopped together with the launcher do not
hang."""


class HangWatch:
    """Watches the ranks of one start.

    Args:
        folder: the job's folder.
        timeout: seconds that a rank may go without progress before it counts as hanging; None disables the watch.
    """

    def __init__(self, folder: Path, timeout: float | None) -> None:
        self._folder, self._timeout = folder, timeout
        self._views: dict[int, RankView] = {}
        self._stacks: dict[int, str] = {}
        """Latest stacks that each rank has reported."""
        self._due = 0.0
        """Time of the next request for stacks, if a rank makes no progress."""
        self._checked = 0.0
        """Time of the latest check."""
        self._killed: dict[int, str] = {}
        """Description of the hang for each rank that was killed."""

    def check(self, processes: Mapping[int, int], say: Callable[[str], None]) -> None:
        """Look for a hang; report and kill the ranks that hang.

        Args:
            processes: process ids of the running ranks.
            say: prints a message.
        """
        now = time.monotonic()
        if self._timeout is None or now - self._checked < BETWEEN_S:
            return
        if self._killed:  # the other ranks will soon save their last step and exit
            return
        passed = min(now - self._checked, LONGEST_S) if self._checked else 0.0
        self._checked = now
        views = [self._views.setdefault(rank, RankView(rank)) for rank in processes]
        for view in views:
            view.update(snapshot_of(self._folder, view.rank), processes[view.rank], passed)
        if not any(max(view.still, view.stopped) >= self._timeout for view in views):
            self._due = 0.0
            for view in views:
                view.frames = ()
            return
        if now < self._due:
            return
        stacks = request_stacks(self._folder, {view.rank: processes[view.rank] for view in views if not view.stopped})
        self._stacks |= stacks
        for view in views:
            view.note_stacks(stacks.get(view.rank, ""), self._timeout)
        self._due = time.monotonic() + self._timeout / 2
        ranks = hanging(views, self._timeout)
        if not ranks:
            return
        by_rank = {view.rank: view for view in views}
        hung = [by_rank.pop(rank) for rank in ranks]
        self._stacks |= {view.rank: "" for view in hung if view.stopped}  # older stacks belong to another moment
        details = {view.rank: _detail(view) for view in hung}
        lines = [line for view in hung for line in quoted(view.rank, view.stacks)]
        lines += doings((rank, _doing(view)) for rank, view in by_rank.items() if view.box is not None)
        say("\n".join([*lines, *(f"rank {rank} hangs: {detail}" for rank, detail in details.items())]))
        # If all ranks wait for each other, kill only one, so that the others notice.
        for rank in ranks if len(ranks) < len(processes) else ranks[-1:]:
            self._killed[rank] = details[rank]
            with suppress(ProcessLookupError):
                os.kill(processes[rank], signal.SIGKILL)

    def pause(self, seconds: float) -> float:
        """Return the seconds until the next check, at most `seconds`."""
        return seconds if self._timeout is None else min(seconds, BETWEEN_S)

    def request_absent(self, ends: Sequence[End], processes: Mapping[int, int]) -> None:
        """Request the stacks of ranks that kept the others waiting, before the launcher terminates them."""
        absent = {end.rank: processes[end.rank] for end in missed(ends) if end.rank in processes}
        self._stacks |= request_stacks(self._folder, absent, resume=True)

    def with_hangs(self, ends: Sequence[End]) -> list[End]:
        """Return `ends` with the ranks' hangs and stacks added."""
        return [
            replace(end, hang=self._killed.get(end.rank, ""), stacks=self._stacks.get(end.rank, "")) for end in ends
        ]


def hanging(views: Sequence[RankView], timeout: float) -> tuple[int, ...]:
    """Return the ranks that hang: stopped ranks; else ranks that others wait for; else all ranks, if all of them do."""
    if stopped := tuple(view.rank for view in views if view.stopped >= timeout):
        return stopped
    waited = [view.waited for view in views]
    is_missed = any(seconds is not None and seconds >= timeout for seconds in waited)
    if still := tuple(view.rank for view in views if view.hangs(timeout, is_missed)):
        return still
    if is_missed and all(seconds is not None and seconds >= timeout for seconds in waited):
        return tuple(view.rank for view in views)
    return ()


@dataclass
class RankView:
    """The launcher's view of a rank during one start."""

    rank: int
    box: Snapshot | None = None
    process: str = ""
    """State of its process, a letter from /proc; empty if unknown."""
    still: float = 0.0
    """Seconds since its box last changed."""
    stopped: float = 0.0
    """Seconds since its process was stopped."""
    asleep: float = 0.0
    """Seconds since its main thread last ran."""
    stacks: str = ""
    """Its stacks at the latest request; empty if it did not report them."""
    moves: bool = False
    """Whether its stacks have changed since its box last changed."""
    frames: Sequence[str] = ()
    """Its main thread's stack at the latest request; empty if the ranks have made progress since then."""
    allowed_runs: int = -1
    """The main thread counts as asleep if it has run at most this many times."""

    def update(self, box: Snapshot | None, pid: int, passed: float) -> None:
        """Update this view from the rank's box and process, `passed` seconds after the last check."""
        self.still = self.still + passed if box == self.box else 0.0
        self.box, self.process = box, process_state(pid)
        self.stopped = self.stopped + passed if self.process == "T" else 0.0
        runs = context_switches(pid)
        self.asleep = self.asleep + passed if runs <= self.allowed_runs else 0.0
        self.allowed_runs = max(runs, self.allowed_runs)

    def note_stacks(self, stacks: str, timeout: float) -> None:
        """Store the answer to a request for stacks."""
        self.allowed_runs += TO_ANSWER
        previous, self.frames = self.frames, main_thread(stacks)
        if self.still < timeout:
            self.moves = False
        elif previous and previous != self.frames:
            self.moves = True
        self.stacks = stacks

    @property
    def waited(self) -> float | None:
        """Seconds since the rank began to wait for other ranks; None if it does not wait."""
        if self.process == "T":
            return None
        if self.box is not None and self.box.phase in WAITING:
            return None if is_in_script(self.stacks) else self.still
        call = waiting_call(self.stacks)
        # Paceline's wrapper records waits during backward in the box; torch's wrapper does not.
        is_ours = call == BACKWARD and self.box is not None and self.box.phase == "backward"
        return min(self.still, self.asleep) if call and not is_ours else None

    def is_still(self, timeout: float, is_missed: bool) -> bool:
        """Return whether the rank has made no progress for too long; `is_missed` if other ranks wait for it."""
        return self.still >= (PATIENCE if self._may_be_long(is_missed) else 1) * timeout

    def _may_be_long(self, is_missed: bool) -> bool:
        if self.box is None or not self.box.has_stepped:
            return True
        if self.waited is not None:
            return False
        if self.box.phase == "loop":
            return not is_missed or waits_for_save(self.stacks)
        return self.box.phase == "checkpoint" and not is_in_script(self.stacks)

    def hangs(self, timeout: float, is_missed: bool) -> bool:
        """Return whether the rank hangs, that is, makes no progress although it does not wait for other ranks."""
        if self.waited is not None or not self.is_still(timeout, is_missed):
            return False
        return is_missed or not (self.box is None or (self.box.phase == "loop" and self.moves))


def _doing(view: RankView) -> str:
    """Describe what a rank that does not hang is doing."""
    call = waiting_call(view.stacks)
    return state_of(view.box, time.monotonic(), raised=False).doing + (f", in {call}()" if call else "")


def _detail(view: RankView) -> str:
    """Describe how a rank hangs."""
    how = f"no progress for {view.still:.0f} s"
    if view.stopped:
        how = f"stopped for {view.stopped:.0f} s, by SIGSTOP or by a terminal"
    elif view.process == "D":
        how += ", in a system call of a disk or driver that cannot be interrupted"
    if view.box is not None:
        how += f", {state_of(view.box, time.monotonic(), raised=False).doing}"
    return how + ("" if view.stacks or view.stopped else "; it did not report its stacks")


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
