"""Checks the signature of a communication hook before its first call, like torch does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import HookError

Hook = Callable[[Any, Any], Any]
_ZERO = "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook"
_ANY = (inspect.Parameter.empty, Any, object)


def name_of(hook: object) -> str:
    return str(getattr(hook, "__qualname__", None) or repr(hook))


def check_hook(hook: Any) -> None:
    """Check the signature of a hook like torch does."""
    wanted = "give a function hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]"
    if not callable(hook):
        raise HookError(f"Communication hook must be callable, but {hook!r} is not; {wanted}")
    if getattr(hook, "__module__", None) == _ZERO:
        raise HookError(
            f"Communication hook: {name_of(hook).partition('.')[0]} runs the optimizer inside torch's "
            "own reducer, which Paceline replaces; use ZeroRedundancyOptimizer without overlap_with_ddp, and step it "
            "after backward"
        )
    name = name_of(hook)
    signature = _signature(hook)
    if signature is None:
        return
    try:
        bound = signature.bind(None, None)
    except TypeError as error:
        raise HookError(f"Communication hook {name!r} does not take a state and a bucket ({error}); {wanted}") from None
    parameter = signature.parameters.get("bucket") or signature.parameters[list(bound.arguments)[-1]]
    bucket, returned = parameter.annotation, signature.return_annotation
    is_open = parameter.kind is inspect.Parameter.VAR_POSITIONAL or isinstance(bucket, str) or bucket in _ANY
    if not is_open and bucket is not dist.GradBucket:
        raise HookError(
            f"Communication hook: bucket annotation should be dist.GradBucket, but {name!r} has {bucket!r}; {wanted}"
        )
    futures = (torch.futures.Future, torch.futures.Future[Tensor])
    if not isinstance(returned, str) and returned not in (*_ANY, *futures):
        raise HookError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor], but "
            f"{name!r} has {returned!r}; {wanted}"
        )


def _signature(hook: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(hook, eval_str=True)
    except (ValueError, TypeError):
        return None  # functions written in C may have no signature
    except Exception:  # an annotation may name a type that is imported only for a type checker
        return inspect.signature(hook)
