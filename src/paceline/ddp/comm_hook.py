"""Communication hooks: a function of the user's in place of a bucket's all-reduce, with torch's contract.

``hook(state, bucket)`` gets this rank's gradients and returns a future of what they become: by torch's contract the
mean over the N ranks. So with ``model.weight(w)`` around summed losses, N/Σw times that is the gradient. The hook is
called once for each bucket in each synchronized backward, in the same order on every rank; it sees neither the control
block nor late deltas, which are all-reduced plainly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from paceline.buckets import Bucket
from paceline.ddp.control import UNCOUNTED, WEIGHTED, scale_of
from paceline.ddp.finisher import Notes
from paceline.ddp.grad_bucket import GradBucket
from paceline.ddp.ledger import Ledger
from paceline.errors import CommunicationError, HookError, PacelineError

Hook = Callable[[Any, Any], Any]
_ANY = (inspect.Parameter.empty, Any, object)


def name_of(hook: object) -> str:
    """The hook's name, for messages."""
    return str(getattr(hook, "__qualname__", None) or repr(hook))


def check_hook(hook: Any) -> None:
    """What can be known of a hook before it is called: torch's checks of its signature.

    Raises:
        HookError: if it is not callable, does not take a state and a bucket, or says of itself that it takes or
            returns something else.
    """
    wanted = "give a function hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]"
    if not callable(hook):
        raise HookError(f"Communication hook must be callable, but {hook!r} is not; {wanted}")
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
    if not is_open and bucket is not c10d.GradBucket:
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
        return None  # it is written in C and says nothing of itself
    except Exception:  # an annotation names what is only there for a type checker
        return inspect.signature(hook)


class HookFinisher:
    """Has `hook` finish the buckets.

    ``steps_inside`` says that the hook also runs an optimizer, which cannot know of weights.
    """

    steps_inside = False

    def __init__(self, state: Any, hook: Hook, parameters: Sequence[Tensor], rank: int, ledger: Ledger) -> None:
        self._state, self._hook, self._parameters = state, hook, parameters
        self._rank, self._ledger = rank, ledger
        self._failure: BaseException | None = None

    def launch(self, bucket: Bucket, at: int, *, last: bool) -> _Answer:
        """Call the hook.

        Raises:
            HookError: if it raises or returns no future; then and whenever it is to be called again, as its own
                collectives do not fit those of the other ranks any more. These learn of it when this rank ends, or
                by their timeout.
        """
        where = f"rank {self._rank}: communication hook {name_of(self._hook)!r}, called for bucket {at}"
        if self._failure is not None:
            raise HookError(
                f"rank {self._rank}: communication hook {name_of(self._hook)!r} has failed before "
                f"({self._failure!r}), so ranks no longer agree on where they are; start again from the last checkpoint"
            )
        if self.steps_inside and self._ledger.is_weight_pending:
            raise HookError(
                f"rank {self._rank}: the optimizer inside the communication hook steps before the weights of "
                "model.weight() are known; use a mean loss without weights, or an optimizer outside"
            )
        try:
            future = self._hook(self._state, GradBucket.of(bucket, self._parameters, at, last=last))
            if not isinstance(future, torch._C.Future):
                raise HookError(
                    f"{where}, returned a {type(future).__qualname__}; let it return a "
                    "torch.futures.Future[torch.Tensor]"
                )
        except BaseException as error:
            self._failure = error
            if isinstance(error, PacelineError) or not isinstance(error, Exception):
                raise
            raise HookError(f"{where}, raised {type(error).__qualname__}: {error}; mend the hook") from error
        return _Answer(future, bucket.flat, where)

    def scale(self, flat: Tensor, notes: Notes) -> None:
        """Turn the mean over all ranks into that over the weights, or over the ranks that count, where these differ."""
        if any(int(weighting) & (WEIGHTED | UNCOUNTED) for _, weighting in notes):
            flat.mul_(scale_of(notes) * len(notes))


class _Answer:
    """What a hook will have made of a bucket."""

    def __init__(self, future: Any, flat: Tensor, where: str) -> None:
        self._future, self._flat, self._where = future, flat, where

    @torch.no_grad()
    def wait(self) -> None:
        """Put the future's value into the bucket.

        Raises:
            HookError: if the future failed, or its value is no tensor of the bucket's size.
        """
        try:
            value = self._future.wait()
        except PacelineError:
            raise
        except Exception as error:
            text = " ".join(str(error).partition("\n\nAt:\n")[0].split())  # torch appends the whole stack
            if CommunicationError.__name__ in text:  # torch hands an error on as text, from callback to callback
                raise CommunicationError(f"{self._where}, could not reach the other ranks: {text}") from error
            raise HookError(
                f"{self._where}, returned a future that failed, in the hook's own callback or because another rank "
                f"ended: {type(error).__qualname__}: {text}"
            ) from error
        if not isinstance(value, Tensor):
            raise HookError(
                f"{self._where}, returned a future of a {type(value).__qualname__}; let its value be one tensor"
            )
        if value.numel() != self._flat.numel() or value.device != self._flat.device:
            raise HookError(
                f"{self._where}, returned a future of {value.numel()} elements on {value.device} for a bucket of "
                f"{self._flat.numel()} on {self._flat.device}; let it be like bucket.buffer()"
            )
        if value.data_ptr() != self._flat.data_ptr() or value.dtype != self._flat.dtype:
            self._flat.copy_(value.reshape(-1))
