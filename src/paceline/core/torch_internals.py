"""Asks torch's autograd engine about the running backward pass. Some of this has no public API."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.core.thread_stacks import readable_stacks
from paceline.core.torch_internals.tensors import content_of


class GraphTask:
    """Lives as long as a graph task of autograd, whose callbacks hold the only reference to it.

    A thread of the engine may keep a task alive briefly after ``backward()`` has raised an exception; see
    :func:`has_ended`.
    """

    def __init__(self) -> None:
        self.number = current_task()
        """Number of its graph task."""


class Accumulators:
    """The autograd nodes that accumulate into some parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._find()

    def _find(self) -> None:
        self._content = content_of(self._parameters)
        # Inference tensors have no nodes; check_averaged() refuses them.
        trained = ((i, p) for i, p in enumerate(self._parameters) if p.requires_grad and not p.is_inference())
        self._nodes = {index: _accumulate_node(parameter) for index, parameter in trained}

    def _present_nodes(self) -> dict[int, Any]:
        if content_of(self._parameters) != self._content:
            self._find()
        return self._nodes

    def are_accumulated(self) -> bool:
        """Whether the running graph task is a backward pass for these parameters, not ``autograd.grad``."""
        nodes = self._present_nodes()
        if is_plain_backward():
            # It does not matter which parameters it reaches: all of them may be hidden in reentrant checkpoints, and a
            # rank that uses none contributes zeros.
            return any(parameter.requires_grad for parameter in self._parameters)
        return _are_executed(nodes.values())

    def are_reached(self, left_out: Collection[int]) -> bool:
        """Return whether the running graph task reaches a parameter whose index is not in `left_out`."""
        return _are_executed(node for index, node in self._present_nodes().items() if index not in left_out)


def _are_executed(nodes: Iterable[Any]) -> bool:
    """Return whether the running graph task executes any of the `nodes`."""
    try:
        return any(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # torch's answer while autograd.grad runs with respect to one of these parameters
        return False


def is_plain_backward() -> bool:
    """Whether the running graph task is a ``backward()`` without ``inputs``."""
    return bool(torch.autograd._is_checkpoint_valid())


def is_accumulated(parameter: Tensor) -> bool:
    """Whether the running graph task accumulates into `parameter`, rather than computing ``autograd.grad`` for it."""
    return _are_executed([_accumulate_node(parameter)])


class WithoutGradients:
    """A faster ``torch.no_grad()`` for code that runs in every step. An object must not be shared between threads."""

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)


def current_task() -> int:
    """Number of the running graph task, which is larger for every later task; -1 outside of a task."""
    return int(torch._C._current_graph_task_id())


def has_ended(number: int) -> bool:
    """Return whether graph task `number`, which is still referenced, has ended.

    It has ended if this thread is outside of the task and no thread waits for it. The backward pass of a reentrant
    checkpoint is inside the task that runs it.
    """
    current = current_task()
    return current != number and count_running_calls() <= (current != -1)


def count_running_calls() -> int:
    """Return how many calls of ``backward()`` and ``autograd.grad()`` are running, in all threads."""
    # Every backward() and autograd.grad() goes through this function, in torch 2.11 to 2.15.
    call: Any = torch.autograd.graph._engine_run_backward
    count = 0
    with readable_stacks():
        for innermost in sys._current_frames().values():
            frame: FrameType | None = innermost
            while frame is not None:
                count += frame.f_code is call.__code__
                frame = frame.f_back
    return count


def backward_call() -> FrameType | None:
    """Return the frame of the running ``torch.autograd.backward``; on an autograd thread, search the other threads."""
    if (call_here := _innermost(sys._getframe())) is not None:
        return call_here
    with readable_stacks():
        calls_elsewhere = [call for frame in sys._current_frames().values() if (call := _innermost(frame)) is not None]
    return calls_elsewhere[0] if len(calls_elsewhere) == 1 else None


def _innermost(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not torch.autograd.backward.__code__:
        frame = frame.f_back
    return frame


def is_in_backward() -> bool:
    """Whether a graph task is running in this thread."""
    return current_task() != -1


def comes_last(handle: RemovableHandle, kind: type) -> bool:
    """Return whether only hooks of `kind` come after the hook of `handle`; otherwise move it to the end.

    Autograd calls hooks in the order of insertion, which ``OrderedDict.move_to_end`` does not change.
    """
    hooks = handle.hooks_dict_ref()
    assert hooks is not None, "its parameter is alive"
    for number in reversed(hooks):
        if number == handle.id:
            return True
        if not isinstance(hooks[number], kind):
            break
    hooks[handle.id] = hooks.pop(handle.id)
    return False


def queue_callback(callback: Callable[[], object]) -> None:
    """Queue `callback` for the end of the running graph task, after earlier callbacks; its result is dropped."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[arg-type]


def _accumulate_node(parameter: Tensor) -> Any:
    with torch.enable_grad():
        alias: Any = parameter.expand_as(parameter)
    return alias.grad_fn.next_functions[0][0]
