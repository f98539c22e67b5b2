"""Communication hooks: user functions that replace the all-reduce of a bucket, as in torch's DDP.

``hook(state, bucket)`` gets this rank's gradients and returns a future with their new values, which torch expects to be
the mean over the N ranks. With ``model.weight(w)`` around summed losses, the wrapper therefore multiplies this mean by
N/Σw. The hook is called once for each bucket in each synchronized backward pass, in the same order on every rank.
Control blocks and late deltas do not pass through the hook; they are all-reduced directly.

A hook that fails raises on its own rank, like any other exception in backward, and the wrapper cannot be used again.
The other ranks do not exchange anything to learn of it: they get an error when that rank exits or at the group's
timeout.

Decision 0007 gives the reasons.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import BuiltinCommHookType as Builtin
from torch.distributed import GradBucket as TorchGradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from paceline.compression import Compressor
from paceline.core.messages import with_article
from paceline.core.spans import BUCKET_WAIT, recorder
from paceline.core.stacks import place_in
from paceline.core.torch_distributed import Future, is_sharded, local_of
from paceline.core.torch_internals import multiply_each
from paceline.core.unwrapping import Communicates
from paceline.ddp.buckets import Bucket
from paceline.ddp.channel import Channel, Launched
from paceline.ddp.connection import Replica
from paceline.ddp.control_block import Notes
from paceline.ddp.finisher import Finisher, show_own
from paceline.ddp.ledger import Ledger
from paceline.ddp.options import Options
from paceline.ddp.reducer import Reducer
from paceline.ddp.weights import compute_correction
from paceline.errors import CommunicationError, HookError, PacelineError, UsageError

Hook = Callable[[Any, Any], Any]
_ZERO = "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook"
_ANY = (inspect.Parameter.empty, Any, object)
_BUILTIN = {Builtin.ALLREDUCE: default_hooks.allreduce_hook, Builtin.FP16_COMPRESS: default_hooks.fp16_compress_hook}


def name_of(hook: object) -> str:
    return str(getattr(hook, "__qualname__", None) or repr(hook))


def check_hook(hook: Any) -> None:
    """Check the signature of a communication hook before its first call, like torch does."""
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


def builtin_hook(comm_hook_type: Any) -> Hook:
    """Return torch's Python hook for ``ALLREDUCE`` or ``FP16_COMPRESS``."""
    if comm_hook_type not in _BUILTIN:
        raise UsageError(f"{comm_hook_type!r} is not a dist.BuiltinCommHookType; give ALLREDUCE or FP16_COMPRESS")
    return _BUILTIN[comm_hook_type]


def use_hook(
    state: object, hook: Hook, reducer: Reducer, replica: Replica, options: Options, group: dist.ProcessGroup
) -> None:
    """Use `hook` instead of the all-reduce to reduce the buckets of `reducer` from now on."""
    if reducer.virtual_ranks:
        raise UsageError(
            f"communication hook {name_of(hook)!r} adds up gradients in another order; leave it out with "
            f"virtual_ranks={reducer.virtual_ranks}"
        )
    if isinstance(state, Compressor) and state.group is not group:
        raise UsageError(
            f"{type(state).__name__} was not created for this wrapper's process group; create it from the wrapped "
            f"model: {type(state).__name__}(model, ...)"
        )
    # A bucket fills earlier on a rank that does not use some of its parameters. There, the hook's collective would
    # precede a layer's collective, but on other ranks it would follow; both usually use the same process group.
    layers = any(isinstance(layer, nn.SyncBatchNorm | Communicates) for layer in replica.module.modules())
    make = partial(
        HookFinisher,
        state,
        hook,
        [local_of(parameter) for parameter in replica.parameters()],
        replica.ledger,
        layers_first=layers and options.unused == "allow",
    )
    reducer.use_finisher(make)
    # A hook may average over only some of the ranks (local SGD); replicas then differ between averages.
    replica.ledger.compare_at = inf


class GradBucket(TorchGradBucket):
    """A bucket with torch's interface; a subclass, because hooks and annotations check for torch's class.

    torch creates its buckets only in C++, and the class has no constructor, so instances lack the C++ state. Therefore
    every method is overridden, and :meth:`of` creates instances.
    """

    @classmethod
    def of(cls, bucket: Bucket, parameters: Sequence[Tensor], number: int, *, last: bool) -> GradBucket:
        """Return a bucket for the hook.

        Args:
            bucket: the reducer's bucket.
            parameters: the reducer's parameters.
            number: index of the bucket in launch order, from 0.
            last: whether this is the last bucket.
        """
        result = cls.__new__(cls)
        result._bucket, result._buffer, result._number, result._last = bucket, bucket.flat, number, last
        result._parameters = [parameters[index] for index in bucket.indices]
        result._when_waited = []
        return result

    _bucket: Bucket
    _buffer: Tensor
    _parameters: list[Tensor]
    _number: int
    _last: bool
    _when_waited: list[Callable[[], None]]

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the backward pass."""
        return self._last

    def buffer(self) -> Tensor:
        """Return this rank's gradients as one flat tensor, not divided by anything."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the tensor used by :meth:`buffer` and :meth:`gradients`."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Return each parameter's part of the buffer, in the parameter's shape.

        As in torch, these views are contiguous. For a channels-last parameter, their elements are therefore in a
        different order than the parameter's.
        """
        sizes = [view.numel() for view in self._bucket.views]
        parts = self._buffer.split(sizes)
        return [part.view(view.shape) for part, view in zip(parts, self._bucket.views, strict=True)]

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of their gradients in the buffer."""
        return list(self._parameters)

    # -- not in torch -----------------------------------------------------------------------------------------------

    def when_waited(self, function: Callable[[], None]) -> None:
        """Call `function` when the wrapper waits for the bucket, on the same stream and thread."""
        self._when_waited.append(function)

    def carry_on(self) -> None:
        while self._when_waited:  # a function may register another
            self._when_waited.pop(0)()


class HookFinisher(Finisher):
    """Finishes buckets by calling `hook`."""

    is_capturable = False
    """False, because a hook may run arbitrary code on the host."""
    carries_tail = False
    layers_first: bool
    """Whether buckets are launched at the end of backward, after the layers' own collectives."""

    def __init__(
        self,
        state: Any,
        hook: Hook,
        parameters: Sequence[Tensor],
        ledger: Ledger,
        channel: Channel,
        *,
        layers_first: bool = False,
    ) -> None:
        self.layers_first = layers_first
        self._state, self._hook, self._parameters = state, hook, parameters
        self._ledger, self._rank = ledger, channel.rank

    def launches_at_end(self, *, shadowed: bool) -> bool:
        """Return True if ranks without data take part, because they do not know when buckets fill."""
        return shadowed or self.layers_first

    def prepare(self, bucket: Bucket) -> None:
        """Leave gradients undivided, because a hook receives this rank's own."""
        bucket.prescale, bucket.is_averaged = 1.0, False

    def launch(self, bucket: Bucket, number: int) -> Launched:
        """Call the hook."""
        if recorder.bucket_watch is not None:
            show_own(recorder.bucket_watch, self._ledger, bucket.flat, 1.0)
        where = f"rank {self._rank}: communication hook {name_of(self._hook)!r}, called for bucket {number}"
        shown = GradBucket.of(bucket, self._parameters, number, last=bucket.is_last)
        self.has_failed = True  # until the hook has returned a future
        try:
            future = self._hook(self._state, shown)
        except PacelineError:
            raise
        except Exception as error:
            raised = f"{type(error).__qualname__}: {error}{place_in(error.__traceback__)}"
            raise HookError(f"{where}, raised {raised}; fix the hook, or see the errors of the other ranks") from error
        if not isinstance(future, Future):
            raise HookError(
                f"{where}, returned {with_article(type(future).__qualname__)}; return a "
                "torch.futures.Future[torch.Tensor]"
            )
        self.has_failed = False
        return _Answer(future, bucket.flat, shown, where)

    def wait(self, buckets: Sequence[Launched]) -> None:
        """Wait for the hook's results and copy them into the buckets."""
        for number, answer in enumerate(buckets):
            with recorder.span(BUCKET_WAIT, number):
                answer.wait()

    def scale(self, buckets: Sequence[Bucket], notes: Notes) -> None:
        """Turn the mean over all ranks into the weighted mean, or into the mean over the ranks that count."""
        factor = compute_correction(notes)
        if factor != 1.0:
            multiply_each([bucket.flat for bucket in buckets], factor)
        if (watch := recorder.bucket_watch) is not None:
            for bucket in buckets:
                watch.averaged(bucket.flat)


class _Answer:
    """The result of a communication hook."""

    def __init__(self, future: Any, flat: Tensor, shown: GradBucket, where: str) -> None:
        self._future, self._where = future, where
        # The bucket's memory, and the bucket passed to the hook, whose buffer the hook may have replaced.
        self._flat, self._shown = flat, shown

    @torch.no_grad()
    def wait(self) -> None:
        """Copy the future's value into the bucket."""
        self._shown.carry_on()
        value = self._value()
        if not isinstance(value, Tensor):
            raise HookError(
                f"{self._where}, returned a future of {with_article(type(value).__qualname__)}; its value "
                "must be a tensor"
            )
        flat = self._flat
        if flat.is_complex() and (value.shape, value.dtype) == ((*flat.shape, 2), flat.dtype.to_real()):
            value = torch.view_as_complex(value.contiguous())  # collectives on complex tensors return real numbers
        if not self._fits(value):
            raise HookError(
                f"{self._where}, returned a future of {_described(value)} for a bucket of {_described(flat)}; it "
                "must match bucket.buffer()"
            )
        if value.data_ptr() != flat.data_ptr():
            flat.copy_(value)
        elif value.stride() != flat.stride() or value.is_conj() or value.is_neg():
            flat.copy_(value.clone())  # the same memory in another layout; copying in place would corrupt it

    def _fits(self, value: Tensor) -> bool:
        """Return whether `value` matches the bucket; the dtype may be that of a buffer set by the hook instead.

        torch's compression wrappers replace the buffer with another dtype.
        """
        if is_sharded(value) or value.layout is not torch.strided:
            return False
        flat, shown_dtype = self._flat, self._shown.buffer().dtype
        chosen = value.dtype is shown_dtype and shown_dtype.is_floating_point and flat.is_floating_point()
        return (value.shape, value.device) == (flat.shape, flat.device) and (value.dtype is flat.dtype or chosen)

    def _value(self) -> Any:
        try:
            return self._future.wait()
        except PacelineError:
            raise
        except Exception as error:
            text = " ".join(str(error).partition("\n\nAt:\n")[0].split())  # torch appends the call stack
            if CommunicationError.__name__ in text:  # torch passes errors between callbacks as text
                raise CommunicationError(f"{self._where}, could not reach the other ranks: {text}") from error
            raise HookError(
                f"{self._where}, returned a future that failed, in the hook's own callback or because another rank "
                f"ended: {type(error).__qualname__}: {text}; see the errors of the other ranks"
            ) from error


def _described(tensor: Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f", {tensor.layout}"
    kind = f"{type(tensor).__name__} of " if is_sharded(tensor) else ""
    return f"{kind}shape {tuple(tensor.shape)}, {tensor.dtype}{layout}, on {tensor.device}"
