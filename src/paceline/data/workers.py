"""Errors for DataLoader workers that died, naming the rank and the worker.

torch notices a dead worker in three ways, but never names the rank: its SIGCHLD handler raises a ``RuntimeError``
anywhere in the main thread; its wait for a batch raises one; or a batch cannot be opened, because the worker died
before it sent the batch's memory.

An exception inside the standard library's lock code, between ``acquire`` and the ``with`` block, would leave the lock
held, and shutting down the workers needs the locks of their queues. So a signal that arrives there is sent again 5 ms
later.
"""

from __future__ import annotations

import _thread
import atexit
import multiprocessing.queues
import multiprocessing.synchronize
import os
import queue
import re
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import Any

import torch

from paceline.core.messages import signal_name
from paceline.core.step_progress import ECHO_S, STOP_SIGNALS
from paceline.core.torch_internals import pipes_of
from paceline.data.position import Position
from paceline.errors import DataError

_CAUSES = {
    signal.SIGKILL: "usually because memory ran out (see dmesg); use fewer workers, a smaller prefetch_factor or "
    "smaller batches",
    signal.SIGBUS: "usually because shared memory ran out; enlarge /dev/shm (docker run --shm-size=8g), or call "
    "torch.multiprocessing.set_sharing_strategy('file_system')",
}
_CRASH = "see its message above, or run with num_workers=0 to find the cause"
_REAP_S = 1.0
"""Seconds to wait for the kernel to report a worker's exit after its connection has broken."""
_LOCKED_IN = {module.__file__ for module in (threading, queue, multiprocessing.queues, multiprocessing.synchronize)}
"""Standard library files that use locks; a signal handler must not raise while their code is running."""
_AGAIN_S = 0.005
"""Seconds before a signal is sent again."""
_watched: weakref.WeakKeyDictionary[Any, Position] = weakref.WeakKeyDictionary()
"""torch's iterators with workers, and the positions of their loaders."""


class OutliveStop:
    """Makes a worker survive a stop signal to all processes of the job, because its rank needs it to finish the step.

    Use an instance as ``worker_init_fn`` of torch's DataLoader. A second SIGTERM, which torch or multiprocessing sends
    to a worker that does not exit, ends the worker. Other stop signals are ignored; the worker ends with its rank in
    any case.

    Args:
        then: the user's own ``worker_init_fn``.
    """

    def __init__(self, then: Callable[[int], object] | None) -> None:
        self._then = then
        self._process = 0
        """Process id of the worker; a forked child takes the signal's default action instead."""
        self._first: float | None = None
        """Time of the first SIGTERM."""

    def __call__(self, worker: int) -> None:
        """Install the handlers in this worker."""
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                signal.signal(number, self._note)  # not SIG_IGN, which child processes inherit
        if self._then is not None:
            self._then(worker)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            if number != signal.SIGTERM:
                return
            now = time.monotonic()
            if self._first is None or now - self._first < ECHO_S:
                self._first = now if self._first is None else self._first
                return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def begin(loader: Iterable[Any], progress: Position) -> Any:
    """Return the iterator of torch's `loader`; from now on, errors name a worker that died."""
    try:
        # torch draws a seed for its workers from a CPU generator. Forked workers keep this default device.
        with torch.device("cpu"):
            iterator = iter(loader)
    except RuntimeError as error:
        # torch's iterator failed in its constructor, so only the traceback's frames refer to it and its workers.
        owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
        unfinished = next(filter(workers_of, owners), None)
        lost = None if unfinished is None else lost_worker(unfinished, progress, progress.position, error)
        if lost is None:
            raise
        end_workers(unfinished)
        raise lost from error
    if workers_of(iterator):
        _watched[iterator] = progress
        # If the iterator is in a reference cycle, the garbage collector may close the pipes before the iterator asks
        # its workers to exit. The finalizer's reference keeps the pipes open until the iterator is gone.
        weakref.finalize(iterator, _hold, pipes_of(iterator))
        _end_with_process(os.getpid())
        if threading.current_thread() is threading.main_thread():  # handlers can be installed only there
            _name_in_signal_handler()
    return iterator


def _hold(_pipes: Sequence[Any]) -> None: ...


def workers_of(iterator: Any) -> Sequence[Any]:
    """Return the worker processes of torch's `iterator`."""
    workers: Sequence[Any] = getattr(iterator, "_workers", ())
    return workers


@cache
def _end_with_process(process: int) -> None:
    """Kill the workers of live iterators when `process`, the current process, exits.

    multiprocessing would send them one SIGTERM, which they survive, and wait for them forever.
    """

    def end() -> None:
        if os.getpid() == process:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report a failure
            for iterator in list(_watched):
                for worker in workers_of(iterator):
                    worker.kill()

    atexit.register(end)  # runs before torch's and multiprocessing's exit handlers, which were registered earlier


def lost_worker(iterator: Any, progress: Position, batch: int, error: BaseException) -> DataError | None:
    """Return the error to raise if `error` took the place of `batch` because a worker of `iterator` died; else None."""
    of_torch = isinstance(error, RuntimeError) and str(error).startswith("DataLoader")
    if not of_torch and (isinstance(error, RuntimeError) or not workers_of(iterator)):
        return None
    # The connection breaks before the kernel reports the exit, so the exit code may arrive a moment later.
    deadline = time.monotonic() + _REAP_S
    while not (ended := _ended(iterator)) and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended and not of_torch:
        return None
    return DataError(_message(progress, batch, ended, error))


def _ended(iterator: Any) -> list[tuple[int, Any]]:
    """Return the number and process of each failed worker or, if none failed, of each worker that exited."""
    ended = [(number, worker) for number, worker in enumerate(workers_of(iterator)) if worker.exitcode is not None]
    return [(number, worker) for number, worker in ended if worker.exitcode] or ended


def _message(progress: Position, batch: int, ended: Sequence[tuple[int, Any]], error: BaseException) -> str:
    who = ", ".join(f"worker {number} (pid {worker.pid}, {_end(worker.exitcode)})" for number, worker in ended)
    cause = _CAUSES.get(-ended[0][1].exitcode, _CRASH) if ended else _CRASH
    detail = "" if ended else f": {str(error).splitlines()[0]}"
    return (
        f"rank {progress.rank}: DataLoader {who or 'a worker'} died before batch {batch} of epoch {progress.epoch} "
        f"arrived{detail}; {cause}"
    )


def _end(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"


@cache
def _name_in_signal_handler() -> None:
    """Wrap torch's SIGCHLD handler, which still detects dead workers."""
    of_torch = signal.getsignal(signal.SIGCHLD)
    if not callable(of_torch):
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if _is_at_a_lock(frame):
            _thread.start_new_thread(_send_again, (number,))  # not threading.Thread, whose locks may be held
            return
        try:
            of_torch(number, frame)
        except RuntimeError as error:
            named = _named(error)
            if named is None:
                raise
            raise named from error

    signal.signal(signal.SIGCHLD, handle)


def _is_at_a_lock(frame: FrameType | None) -> bool:
    """Return whether an exception in `frame` could leave a lock held; an exception during a wait cannot."""
    return frame is not None and frame.f_code.co_filename in _LOCKED_IN and frame.f_code.co_name != "wait"


def _send_again(number: int) -> None:
    time.sleep(_AGAIN_S)
    os.kill(os.getpid(), number)


def _named(error: RuntimeError) -> DataError | None:
    """Return the error for the worker whose process torch's `error` names; None for a worker of another loader."""
    # «DataLoader worker (pid 7) is killed by …», «DataLoader worker (pid(s) 7, 8) exited unexpectedly»
    pids = {int(pid) for pid in re.findall(r"\d+", str(error).partition("(pid")[2])}
    for iterator, progress in list(_watched.items()):
        ended = [(number, worker) for number, worker in enumerate(workers_of(iterator)) if worker.pid in pids]
        if ended:
            return DataError(_message(progress, progress.position, ended, error))
    return None


def end_workers(iterator: Any) -> None:
    """End the workers of torch's `iterator` now, not when it is garbage-collected.

    An error's traceback keeps the iterator in a reference cycle. By the time the cycle is collected, the pipes through
    which torch asks the workers to exit may be closed or reused.
    """
    with suppress(RuntimeError):  # a worker died, and another error already reports it
        getattr(iterator, "_shutdown_workers", lambda: None)()
