"""Handles for what a process group has begun, and the thread that completes what nobody waits for in Python."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Handle(dist.Work):
    """A ``Work``: finished when its function has run, with that function's error if it raised."""

    def __init__(self, result: Sequence[Tensor]) -> None:
        super().__init__()
        self._result = list(result)
        self._event = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()

    def run(self, function: Callable[[], None]) -> None:
        """Run `function` and be finished."""
        try:
            function()
        except BaseException as error:
            self._error = error
        with self._lock:
            self._event.set()
            if self._future is not None:
                self._settle(self._future)

    def _settle(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result(self._result)
        else:
            future.set_exception(self._error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until finished; raises what the operation raised."""
        seconds = timeout.total_seconds()
        if not self._event.wait(seconds if seconds > 0 else None):
            raise RuntimeError(f"the operation was not finished within {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the operation's tensors."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._event.is_set():
                    self._settle(self._future)
            return self._future

    def is_completed(self) -> bool:
        """Whether it is finished."""
        return self._event.is_set()

    def is_success(self) -> bool:
        """Whether it is finished without an error."""
        return self._event.is_set() and self._error is None

    def exception(self) -> Any:
        """The error, if there was one."""
        return self._error

    def synchronize(self) -> None:
        """The same as :meth:`wait`."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The operation's tensors."""
        return self._result


class Runner:
    """Runs operations in the order in which they come: those waited for at once here, others in a thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Handle, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Handle | None = None

    def submit(self, function: Callable[[], None], result: Sequence[Tensor], *, asynchronous: bool) -> Handle:
        """Run `function` now, or after those before it in the thread; returns its handle."""
        handle = Handle(result)
        if not asynchronous and (self._last is None or self._last.is_completed()):
            handle.run(function)
            return handle
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._last = handle
        self._queue.put((handle, function))
        return handle

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            handle, function = item
            handle.run(function)

    def close(self) -> None:
        """Let the thread end after what is queued."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(5)
            self._thread = None
