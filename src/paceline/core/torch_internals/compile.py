"""Tells ``torch.compile`` to leave Paceline alone: Paceline runs between compiled graphs, never inside them.
torch.compile translates Python functions when they are called, including Paceline's hooks and collectives between two
graphs. These are marked in the same way as torch's own functions, without importing torch._dynamo, which is slow to
load. The mark survives ``torch._dynamo.reset()``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any, TypeVar, cast

from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._compile import _disable_dynamo

from paceline.errors import UsageError

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
AnyClass = TypeVar("AnyClass", bound=type)
TorchDDP = nn.parallel.DistributedDataParallel


def never_compiled(function: AnyFunction) -> AnyFunction:
    """Keep torch.compile away from `function` and everything that it calls."""
    _mark(function, _FrameAction.SKIP)
    return function


def compiled_below(function: AnyFunction) -> AnyFunction:
    """Keep torch.compile away from `function`, but not from the functions that it calls."""
    _mark(function, _FrameAction.DEFAULT)
    return function


def class_never_compiled(kind: AnyClass) -> AnyClass:
    """Apply :func:`never_compiled` to all methods that `kind` itself defines."""
    for member in vars(kind).values():
        if isinstance(member, FunctionType):
            never_compiled(member)
    return kind


def leaves_graph(function: AnyFunction) -> AnyFunction:
    """Run `function` uncompiled: one compiled graph ends before it, and another begins after it."""
    return cast("AnyFunction", _disable_dynamo(function))


def original_of(module: nn.Module) -> nn.Module | None:
    """Return the original of a `module` that ``torch.compile`` returned; None if `module` is not compiled."""
    evaluation = sys.modules.get("torch._dynamo.eval_frame")  # None if no module was compiled
    if evaluation is None or not isinstance(module, evaluation.OptimizedModule):
        return None
    original: nn.Module = module._orig_mod
    return original


def _mark(function: Any, below: _FrameAction) -> None:
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, below))
    # torch.compile reads this before it traces a called function into its graph.
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "Paceline runs between compiled graphs"


def check_eager_backward(rank: int) -> None:
    """Raise under compiled autograd, which calls hooks late and never calls end-of-backward callbacks."""
    autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if autograd is not None and autograd.in_compiled_autograd_region:
        raise UsageError(
            f"rank {rank}: backward runs under torch's compiled autograd, which would leave gradients "
            "unaveraged; set torch._dynamo.config.compiled_autograd = False"
        )


@compiled_below
def call_module(wrapper: TorchDDP | None, module: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call `module`. If it is compiled, split it into graphs at the bucket boundaries of `wrapper`, if given.

    torch's DDPOptimizer does this for the wrapper that is active during compilation. It uses the same rule as our
    buckets: starting from the last operation, a graph ends when its parameters fill a bucket.
    """
    previous = TorchDDP._active_ddp_module
    TorchDDP._active_ddp_module = wrapper
    try:
        kind: Any = type(module)
        return _caller(kind)(module, *inputs, **kwargs)
    finally:
        TorchDDP._active_ddp_module = previous


@cache
@never_compiled  # runs on the first call for each class, in the middle of what should become one graph
def _caller(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return a function that calls a module of the class `kind`."""
    if not getattr(kind.forward, "__module__", "").startswith("torch."):
        return _call
    # torch.compile does not begin a graph in torch's own files, such as that of nn.Sequential, so it needs a function
    # elsewhere. Each class has its own function, because torch.compile stores the shapes of inputs by function name.
    code = _call_from_graph.__code__.replace(co_name=f"call_{kind.__name__}")
    return FunctionType(code, _call_from_graph.__globals__)


@compiled_below
def _call(module: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
    return module(*inputs, **kwargs)


def _call_from_graph(module: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
    return module(*inputs, **kwargs)
