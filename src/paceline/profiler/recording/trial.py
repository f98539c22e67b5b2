"""Settings that a program runs with to try a piece of advice, without a change of its code."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.data
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.ddp import DistributedDataParallel


@contextmanager
def trying(settings: Mapping[str, float]) -> Iterator[None]:
    """Run the block with other settings than its own.

    Args:
        settings: ``num_workers`` of every DataLoader, ``bucket_cap_mb`` of every wrapper, or ``accumulate``: the number
            of batches in a step.
    """
    with ExitStack() as stack:
        if (workers := settings.get("num_workers")) is not None:
            loader = torch.utils.data.DataLoader
            _with_argument(stack, loader, "num_workers", int(workers))
            # It warns of more workers than cores, which are advised where they wait for a disk.
            _replace(stack, loader, "check_worker_number_rationality", lambda _: lambda _loader: None)
        if (capacity := settings.get("bucket_cap_mb")) is not None:
            _with_argument(stack, DistributedDataParallel, "bucket_cap_mb", capacity)
        if (times := settings.get("accumulate")) is not None:
            _accumulate(stack, int(times))
        yield


def _replace(stack: ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original, was_own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, functools.wraps(original)(make(original)))
    stack.callback(*((setattr, owner, name, original) if was_own else (delattr, owner, name)))


def _with_argument(stack: ExitStack, owner: type, name: str, value: float) -> None:
    """Have every object of class `owner` made with the argument `name`."""

    def make(original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        def init(*args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            # By its place, because the program may have given it as a positional argument.
            if name in signature.parameters:
                bound.arguments[name] = value
                original(*bound.args, **bound.kwargs)
            else:
                original(*args, **{**kwargs, name: value})

        return init

    _replace(stack, owner, "__init__", make)


def _accumulate(stack: ExitStack, times: int) -> None:
    """Have wrappers synchronize, and optimizers step, in one of `times` batches only: for times, not for results."""
    forwards = 0

    def is_last() -> bool:
        return forwards % times == 0

    def make_call(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(model: TorchDDP, *args: Any, **kwargs: Any) -> Any:
            nonlocal forwards
            forwards += model.training and torch.is_grad_enabled()
            # At the forward, as no_sync() does: a wrapper decides there whether its backward synchronizes.
            model.require_backward_grad_sync = is_last()
            return original(model, *args, **kwargs)

        return call

    def make_init(original: Callable[..., None]) -> Callable[..., None]:
        def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            # On each object, because every class of optimizers has a step of its own.
            for name in ("step", "zero_grad"):
                _only(optimizer, name, is_last)

        return init

    _replace(stack, TorchDDP, "__call__", make_call)
    _replace(stack, torch.optim.Optimizer, "__init__", make_init)


def _only(optimizer: torch.optim.Optimizer, name: str, is_wanted: Callable[[], bool]) -> None:
    """Have the method `name` of `optimizer` do nothing unless it is wanted. A scheduler asks for a bound method."""
    original = getattr(optimizer, name)

    def method(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if is_wanted() else None

    setattr(optimizer, name, types.MethodType(method, optimizer))
