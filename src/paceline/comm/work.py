"""Handles of operations that a process group has begun, and the thread that runs asynchronous operations."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.forking import check_own_process
from paceline.comm.shm_engine import Operation
from paceline.core.torch_internals import class_never_compiled
from paceline.errors import CommunicationError


@class_never_compiled
class Handle(dist.Work):
    """A ``Work`` that is finished once its function has run; it keeps the error if the function raised one."""

    value: Callable[[], Any] | None = None
    """Function that returns the future's value; None if the value is the operation's tensors."""

    def __init__(self, result: Sequence[Tensor]) -> None:
        super().__init__()
        self._result = list(result)
        self._finished = self._calls_back = False
        self._event: threading.Event | None = None
        """Event for threads that wait. Created on demand, because most handles are already finished when returned."""
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._given: torch.futures.Future[Any] | None = None
        """The future that callers get. It is created together with :attr:`_future` and follows it."""
        self._lock = threading.Lock()
        self._process = os.getpid()

    def run(self, function: Callable[[], None]) -> None:
        """Run `function` and mark the operation as finished, unless another thread has already done so."""
        error: BaseException | None = None
        try:
            function()
        # wait() will raise the error; this thread must go on to run other operations.
        except BaseException as raised:
            error = raised
        with self._lock:
            if self._finished:
                return
            event, future = self._event, self._future
            self._error, self._finished, self._calls_back = error, True, future is not None
        if event is not None:
            event.set()
        if future is not None:  # outside the lock, because its callbacks may use this handle
            self._complete(future)
            self._calls_back = False

    def is_over(self) -> bool:
        """Return whether the operation and its future's callbacks, which may begin further operations, are finished."""
        return self._finished and not self._calls_back

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            try:
                result = self._result if self.value is None else self.value()
            except Exception as error:  # such as out of memory; the thread must go on
                future.set_exception(error)
            else:
                future.set_result(result)
        elif isinstance(self._error, Exception):
            future.set_exception(self._error)
        else:
            future.set_exception(CommunicationError(f"the operation was interrupted by {self._error!r}"))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until finished, and raise the operation's error."""
        seconds = timeout.total_seconds()
        if not self.join(seconds if seconds > 0 else None):
            raise CommunicationError(f"the operation did not finish within {seconds:g} s; pass a longer timeout")
        if self._error is not None:
            raise self._error
        return True

    def join(self, seconds: float | None = None) -> bool:
        """Wait up to `seconds` until finished; return whether it is. Never raises the operation's error."""
        if not self._finished:
            check_own_process(self._process)  # a forked child does not have the thread that would finish it
        with self._lock:
            if self._finished:
                return True
            event = self._event = self._event or threading.Event()
        return event.wait(seconds)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the operation's tensors.

        The error is raised in a callback, because C++ recognizes only such errors: if Python sets an exception on a
        future, torch DDP's reducer mistakes it for the operation's value and aborts the process.
        """
        with self._lock:
            if self._given is not None:
                return self._given
            future = self._future = torch.futures.Future()
            value_future = self._given = future.then(_value_of)
            finished = self._finished
        # Exactly one side completes the future: if run() had already finished, it did not see the future under the
        # lock.
        if finished:
            self._complete(future)
        return value_future

    def is_completed(self) -> bool:
        """Return whether it is finished."""
        return self._finished

    def is_success(self) -> bool:
        """Return whether it is finished without an error."""
        return self._finished and self._error is None

    def exception(self) -> Any:
        """Return the error, if there was one."""
        return self._error

    def synchronize(self) -> None:
        """Wait like :meth:`wait`."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Return the operation's tensors."""
        return self._result


@class_never_compiled
class LaunchedHandle(Handle):
    """The handle of a posted operation. No thread waits for the operation until a caller needs to be notified.

    A caller needs this if it asks for the future, waits with a timeout, or finds the operation unfinished. Then the
    runner's thread waits for the operation and calls the future's callbacks, so that collectives begun in callbacks
    have the same order on every rank.
    """

    def __init__(self, result: Sequence[Tensor], operation: Operation, runner: Runner) -> None:
        super().__init__(result)
        self._operation, self._runner = operation, runner
        self._is_followed = False
        """Whether the runner's thread waits for the operation."""

    def _settle(self) -> None:
        if not self._finished:
            self.run(self._operation.wait)

    def _follow(self) -> None:
        if not self._is_followed and not self._finished:
            self._runner.submit(self._settle, (), asynchronous=True)  # raises in a forked child
            self._is_followed = True

    def join(self, seconds: float | None = None) -> bool:
        """Wait, like :meth:`Handle.join`."""
        if seconds is not None:
            self._follow()
        # In a callback, the runner's thread waits for the operation directly; it must not wait for itself.
        if self._is_followed and not self._runner.is_current_thread():
            return super().join(seconds)
        if not self._finished:
            check_own_process(self._process)
            self._settle()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future, like :meth:`Handle.get_future`."""
        self._follow()
        return super().get_future()

    def is_completed(self) -> bool:
        """Return whether it is finished; this call may finish it."""
        if not self._finished and not self._is_followed and self._runner.is_ours:
            self._operation.progress()
            if self._operation.is_completed():
                self._settle()
            else:
                self._follow()  # only waiting reveals that a rank has ended or is late
        return self._finished


def _nothing() -> None:
    """A no-op, because waiting for this operation waits for all earlier ones."""


def _value_of(future: torch.futures.Future[Any]) -> Any:
    return future.value()


def last_of(works: Sequence[Any]) -> Any:
    """Return the last of several works. Our own works finish in order, so wait only for other kinds of works."""
    for work in works[:-1]:
        if not isinstance(work, Handle):
            work.wait()
    return works[-1]


class Runner:
    """Runs operations in order: synchronous ones in the calling thread, asynchronous ones in its own thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Handle, Callable[[], None]] | None] = queue.SimpleQueue()
        """Operations for the thread, in order; None ends the thread."""
        self._thread: threading.Thread | None = None
        """Started when it is first needed."""
        self._queued: Handle | None = None
        """Last operation queued for the thread, until it is finished."""
        self._launched: Operation | None = None
        """Last operation that was launched without the thread."""
        self._turn = threading.RLock()
        """Held while beginning an operation, so that operations have the same order on all ranks."""
        self._process = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this process created it, rather than its parent before a fork."""
        return os.getpid() == self._process

    def submit(self, function: Callable[[], None], result: Sequence[Tensor], *, asynchronous: bool) -> Handle:
        """Run `function` now, or in the thread after the queued operations; return its handle.

        If a future's callback in the thread begins an operation, it runs at once, ahead of the queue. So it has the
        same place in the order on every rank, and the callback may wait for it.
        """
        handle = Handle(result)
        with self._turn:
            if self.is_current_thread() or (not asynchronous and self.is_idle()):
                handle.run(function)
                return handle
            check_own_process(self._process)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._queued = handle
            self._queue.put((handle, function))
            return handle

    def launch(self, post: Callable[[], Operation | None], result: Sequence[Tensor]) -> Handle | None:
        """Post an operation without the thread, and return its handle.

        Return None if earlier operations are queued, or if `post` returns None because it would have to wait.
        """
        with self._turn:
            if (self.is_current_thread() or self.is_idle()) and (operation := post()) is not None:
                self._launched = operation
                return LaunchedHandle(result, operation, self)
        return None

    def is_current_thread(self) -> bool:
        """Return whether the caller runs in the runner's thread, that is, in an operation's callback."""
        return threading.current_thread() is self._thread

    def is_idle(self) -> bool:
        """Return whether the operations in its thread are finished, with their callbacks."""
        return self._queued is None or self._queued.is_over()

    def drain(self) -> None:
        """Wait until all earlier operations and their callbacks have ended, with or without an error."""
        check_own_process(self._process)
        launched = self._launched
        if launched is not None and not launched.is_completed():
            # The engine finishes operations in order, so waiting for the last launched one is enough.
            with suppress(Exception):  # its handle raises the error
                launched.wait()
        if not (self.is_current_thread() or self.is_idle()):
            self.submit(_nothing, (), asynchronous=True).join()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            handle, function = item
            handle.run(function)
            if self._queued is handle:
                self._queued = None
            del item, handle, function  # otherwise the tensors would be kept alive until the next operation

    def close(self, seconds: float = 5, interrupt: Callable[[], None] | None = None) -> None:
        """End the thread after the queued operations; call `interrupt` if they take longer than `seconds`."""
        self._launched = None
        if self._thread is not None:
            self._queue.put(None)
            if not self.is_current_thread():  # a callback may destroy the group
                self._thread.join(seconds)
                if interrupt is not None and self._thread.is_alive():
                    interrupt()
                    self._thread.join(5)
            self._thread = None
