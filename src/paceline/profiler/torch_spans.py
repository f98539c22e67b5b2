"""Records spans of torch's functions: backward passes, collectives, batches and optimizer steps.

Replaces a few torch functions with wrappers that record a span, so scripts need no change. torch's own
DistributedDataParallel waits for its all-reduces in callbacks at the end of backward; a callback queued before them
marks the start of the wait.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.core.spans import BACKWARD, COLLECTIVE, COLLECTIVES, DATA_WAIT, FORWARD, OPTIMIZER, WAIT, Recorder, Span
from paceline.core.torch_internals import BatchIterator, compiled_below, queue_callback
from paceline.profiler.steps import Step

if TYPE_CHECKING:
    from paceline.profiler.recorder import Session


# Records when a GPU reaches the start and end of each span, because the host runs ahead of the GPU.


LAG = 8
"""Delay in steps before the events of a step are read. By then the device has passed them, so reading never waits."""


class DeviceTimes:
    """Replaces a step's host times with the times of events on `device`, a few steps later.

    Times add up step by step from one synchronization at the beginning, because the time between two events is a
    float32 in milliseconds, which is imprecise for long times.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: deque[tuple[Step, Any, Any]] = deque()
        """Steps to read, with the events of their start and end."""
        torch.accelerator.synchronize(device)
        self._begin = self.event()
        self._now = time.perf_counter()
        """Host time when the device reached the event ``_before``."""
        self._before = self._begin

    def event(self) -> Any:
        """Record an event on the device's current stream, and return it."""
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event

    def step_begins(self) -> None:
        """Note that a step begins."""
        self._begin = self.event()

    def step_ends(self, step: Step) -> list[Step]:
        """Queue `step`, whose last span has ended, and return the steps whose events the device has passed."""
        self._pending.append((step, self._begin, self.event()))
        return [self._read() for _ in range(len(self._pending) - LAG)]

    def rest(self) -> list[Step]:
        """Wait for the device, and return all remaining steps."""
        torch.accelerator.synchronize(self._device)
        return [self._read() for _ in range(len(self._pending))]

    def _read(self) -> Step:
        step, begin, end = self._pending.popleft()
        end.synchronize()  # returns immediately unless the device is more than LAG steps behind
        start: float = self._now + self._before.elapsed_time(begin) / 1000
        self._now, self._before = start, begin

        def seconds(event: Any) -> float:
            elapsed: float = begin.elapsed_time(event)
            return start + elapsed / 1000

        spans = [_by_device(span, seconds) for span in step.spans]
        return replace(step, start=start, end=seconds(end), spans=spans)


def _by_device(span: Span, seconds: Any) -> Span:
    """Return `span` with device times. Marks have no events and stay unchanged."""
    if span.events is None or None in span.events:
        return span
    return span._replace(start=seconds(span.events[0]), end=seconds(span.events[1]), events=None)


BUFFERS_TRAVEL = "_distributed_broadcast_coalesced"
"""Method of torch's wrapper that waits for rank 0's buffers during the forward pass."""


@contextmanager
def torch_spans(recorder: Recorder, session: Session) -> Iterator[None]:
    """Inside this context, record spans of torch's functions and report events to `session`."""
    with ExitStack() as stack:
        for name in COLLECTIVES:
            if hasattr(dist, name):  # torch may remove deprecated functions
                stack.enter_context(_replaced(dist, name, functools.partial(_collective, recorder)))
        stack.enter_context(_replaced(torch.autograd, "backward", functools.partial(_backward, recorder, session)))
        stack.enter_context(_replaced(BatchIterator, "__next__", functools.partial(_next_batch, recorder, session)))
        stack.enter_context(_replaced(TorchDDP, "__call__", functools.partial(_forward, recorder, session)))
        stack.enter_context(_replaced(TorchDDP, BUFFERS_TRAVEL, functools.partial(_collective, recorder)))
        for handle in _optimizer_hooks(recorder, session):
            stack.callback(handle.remove)
        yield


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace ``owner.name`` with ``make(original)`` inside this context."""
    original, was_own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        # TorchDDP inherits __call__. Leaving a copy on it would hide later changes to nn.Module.__call__.
        if was_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _next_batch(recorder: Recorder, session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    loop = threading.current_thread()

    @functools.wraps(original)
    def next_batch(iterator: Any) -> Any:
        if threading.current_thread() is not loop:  # called by a prefetching thread, which the loop does not wait for
            return original(iterator)
        began = time.thread_time()
        with recorder.span(DATA_WAIT):
            batch = original(iterator)
        session.batch_came(iterator, time.thread_time() - began)
        return batch

    return next_batch


def _backward(recorder: Recorder, session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        session.backward_begins()
        try:
            with recorder.surround(BACKWARD), ExitStack() as at_end:
                group = session.group_of_torch
                if group is not None and recorder.on:
                    roots = signature.bind(*args, **kwargs).arguments.get("tensors")
                    _watch_end(recorder, _name_of(recorder, group), roots, at_end)
                return original(*args, **kwargs)
        finally:
            session.backward_ends()

    return backward


def _watch_end(recorder: Recorder, group: str | None, roots: Any, at_end: ExitStack) -> None:
    """Record a wait for `group`, from the last gradient of a backward pass from `roots` until `at_end` closes."""
    is_queued = False

    def queue(*_: Any) -> None:
        nonlocal is_queued
        if not is_queued:  # before any gradient, and therefore before the wrapper's callback
            is_queued = True
            queue_callback(lambda: at_end.callback(recorder.open(WAIT, group=group)))

    for root in [roots] if isinstance(roots, torch.Tensor) else roots or ():
        # A root may be a GradientEdge.
        node = root.grad_fn if isinstance(root, torch.Tensor) else getattr(root, "node", None)
        if node is not None:
            at_end.callback(node.register_prehook(queue).remove)


def _forward(recorder: Recorder, session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    @compiled_below  # so that a compiled wrapper also calls it
    @functools.wraps(original)
    def forward(model: TorchDDP, *args: Any, **kwargs: Any) -> Any:
        session.forward_begins(model, args, kwargs)
        with recorder.surround(FORWARD):
            return original(model, *args, **kwargs)

    return forward


def _collective(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not recorder.on:
            return original(*args, **kwargs)
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:  # let torch raise the error for invalid arguments
            return original(*args, **kwargs)
        # With async_op, only the later wait counts.
        if bound.get("async_op"):
            return original(*args, **kwargs)
        # The first argument of BUFFERS_TRAVEL is a wrapper.
        group = bound["self"].process_group if "self" in bound else bound.get("group")
        with recorder.span(COLLECTIVE, group=_name_of(recorder, group)):
            return original(*args, **kwargs)

    return collective


def _name_of(recorder: Recorder, group: Any) -> str | None:
    """Return the name of `group`, and add its ranks to the recorder. None before a process group is initialized."""
    if not dist.is_initialized():
        return None
    group = dist.group.WORLD if group is None else group
    name = getattr(group, "group_name", None)
    if name is not None and name not in recorder.groups:
        recorder.groups[name] = dist.get_process_group_ranks(group)
    return name


def _optimizer_hooks(recorder: Recorder, session: Session) -> list[Any]:
    running: list[tuple[int, int, Callable[[], object]]] = []
    """Optimizer steps in progress, innermost last: the optimizer's id, `session.backwards` at the start, and the
    function that ends the span."""

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        running.append((id(optimizer), session.backwards, recorder.open(OPTIMIZER)))

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Entries of steps that raised are still above this step's entry.
        while running:
            number, _backwards, end = running.pop()
            if number == id(optimizer):
                end()
                break
        # A ShardedOptimizer steps another optimizer inside its own step, and gathers the parameters afterwards. Ignore
        # steps that began before the last backward pass, because they may have raised.
        is_inner = any(backwards == session.backwards for _number, backwards, _end in running)
        session.optimizer_stepped(optimizer, is_inner)

    return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
