"""Samples the main thread's stack, so that advice can name functions in the loop's own code."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType

from paceline.core.stacks import is_users, readable_stacks
from paceline.profiler import step_parts
from paceline.profiler.host_load import CollectorPauses

INTERVAL_S = 0.025
"""Minimum time between two samples. A sample takes 0.1 ms of a core, mostly to wake the thread; 0.4 ms on a busy
host."""
MOST_SHARE = 0.005
"""Maximum share of a core that sampling may use."""
MOST = 20_000
"""Maximum number of samples kept until steps are written. The oldest are dropped first."""
_RECIPES = str(Path(__file__).parents[1] / "tools" / "recipes")
Sample = tuple[float, str]
"""Time by ``time.perf_counter``, and the function that was running."""


class StackSampler:
    """A thread that samples the main thread every :data:`INTERVAL_S`, or less often if samples are expensive.

    Call :meth:`stop` to end the thread.
    """

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=MOST)
        self.interval = INTERVAL_S
        """Mean seconds between two samples."""
        self._watched = threading.get_ident()
        self._is_over = threading.Lock()  # held until the end; not an Event, whose lock may be held during a fork
        self._is_over.acquire()
        self._process = os.getpid()
        # A daemon, because atexit ends this thread, but Python waits for non-daemon threads before it calls atexit
        # functions.
        self._thread = threading.Thread(target=self._run, name="paceline-stack-samples", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop sampling, and wait for the thread, which must end before the interpreter does."""
        atexit.unregister(self.stop)
        if self._is_over.locked():
            self._is_over.release()
        if self._process == os.getpid():
            self._thread.join()

    def of(self, start: float, end: float) -> list[Sample]:
        """Return the samples from `start` to `end`, and drop all samples before `end`."""
        result = []
        while self.samples and self.samples[0][0] < end:
            sample = self.samples.popleft()
            if sample[0] >= start:
                result.append(sample)
        return result

    def _run(self) -> None:
        cost, previous = 0.0, time.thread_time()
        began, count = time.perf_counter(), 0
        while not self._is_over.acquire(timeout=max(INTERVAL_S, cost / MOST_SHARE)):
            cost, previous = time.thread_time() - previous, time.thread_time()
            now, name = time.perf_counter(), self._look()
            count += 1
            self.interval = (now - began) / count
            if name:
                self.samples.append((now, name))

    def _look(self) -> str:
        # A separate function releases the sampled frame at once, because a frame keeps its variables alive. Otherwise,
        # if the sampled function has returned, this thread would free its variables at the next sample. When a rank
        # exits, these may be the whole training, and a destructor that releases the GIL could not reacquire it and
        # would abort.
        with readable_stacks():
            return function_of(sys._current_frames().get(self._watched))


def function_of(frame: FrameType | None) -> str:
    """Return the program's innermost function on a stack, and its callee: ``save() (train.py:8, in …)``.

    Empty for a stack without a function of the program.
    """
    called = ""
    # Recipes count as the user's program.
    while frame is not None and not (is_users(file := frame.f_code.co_filename) or file.startswith(_RECIPES)):
        if (module := frame.f_globals.get("__name__", "")) != CollectorPauses.__module__:  # called at any line
            called = f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    if frame is None:
        return ""
    name, place = frame.f_code.co_name, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    within = f"{place}, in {called}" if called else place
    return within if name == "<module>" else f"{name}() ({within})"


def between_spans(samples: Iterable[Sample], stretches: Sequence[tuple[str, float, float]]) -> list[str]:
    """Return the functions sampled in the loop's own code, given the stretches of a step."""
    gaps = [(begin, end) for part, begin, end in stretches if part == step_parts.OTHER]
    return [name for moment, name in samples if any(begin <= moment < end for begin, end in gaps)]
