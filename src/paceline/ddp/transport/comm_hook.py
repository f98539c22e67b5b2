"""Communication hooks: a user's function in place of a bucket's all-reduce, with torch's contract.

``hook(state, bucket)`` gets this rank's gradients and returns a future of their new values: by torch's contract the
mean over the N ranks. So with ``model.weight(w)`` around summed losses, N/Σw times that is the gradient. The hook is
called once for each bucket in each synchronized backward, in the same order on every rank; it sees neither the control
block nor late deltas, which are all-reduced plainly.

A hook that fails on one rank ends the step on all of them. The others learn of a call that failed from the control
block, before they wait for collectives that the hook has not begun on that rank. They learn of an answer that is not a
gradient from a second exchange, after they have waited.

Decision 0007 says why; decision 0019 describes the failure of a hook.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from paceline.core.output.wording import with_article
from paceline.core.processes.missing_ranks import named_ranks
from paceline.core.telemetry.spans import BUCKET_WAIT, Recorder
from paceline.core.torch_internals.distributed.ddp import Future
from paceline.core.torch_internals.distributed.ddp import GradBucket as TorchGradBucket
from paceline.core.torch_internals.distributed.dtensor import is_sharded
from paceline.core.torch_internals.tensors import multiply_each
from paceline.ddp.agreement.control_block import ControlBlock
from paceline.ddp.agreement.digest import Notes
from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.agreement.weight_block import compute_correction
from paceline.ddp.options.buckets import Bucket
from paceline.ddp.transport.channel import Channel, Launched
from paceline.ddp.transport.finisher import CONTROL_EXCHANGE, AlreadyDone, Finisher, show_own
from paceline.ddp.transport.hook_signature import Hook, name_of
from paceline.errors import CommunicationError, DesyncError, HookError, PacelineError


class GradBucket(TorchGradBucket):
    """A bucket with the interface that hooks know; a subclass, because hooks and annotations ask for torch's class.

    torch makes its own in C++ only, and the class has no constructor, so the state in C++ is missing here. Every method
    is overridden, and instances come from :meth:`of`.
    """

    @classmethod
    def of(cls, bucket: Bucket, parameters: Sequence[Tensor], number: int, *, last: bool) -> GradBucket:
        """Return the `number`-th bucket in the order of launch.

        Args:
            bucket: the reducer's bucket.
            parameters: the reducer's parameters.
            number: index of the bucket, from 0.
            last: whether no bucket follows.
        """
        made = cls.__new__(cls)
        made._bucket, made._buffer, made._number, made._last = bucket, bucket.flat, number, last
        made._parameters = [parameters[index] for index in bucket.indices]
        made._when_waited = []
        return made

    _bucket: Bucket
    _buffer: Tensor
    _parameters: list[Tensor]
    _number: int
    _last: bool
    _when_waited: list[Callable[[], None]]

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        """Return whether it is the last one of this backward."""
        return self._last

    def buffer(self) -> Tensor:
        """Return all gradients of the bucket, flat; this rank's own, not divided by anything."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the tensor that :meth:`buffer` and :meth:`gradients` show."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Return, for each parameter, its part of the buffer in the parameter's shape.

        As in torch these views are contiguous; so for a parameter in channels-last memory their elements are in
        another order than the parameter's.
        """
        sizes = [view.numel() for view in self._bucket.views]
        parts = self._buffer.split(sizes)
        return [part.view(view.shape) for part, view in zip(parts, self._bucket.views, strict=True)]

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of their gradients in the buffer."""
        return list(self._parameters)

    # -- not in torch -----------------------------------------------------------------------------------------------

    def when_waited(self, function: Callable[[], None]) -> None:
        """Call `function` at the wait for the bucket, on its stream and in its thread."""
        self._when_waited.append(function)

    def carry_on(self) -> None:
        while self._when_waited:  # one of them may register another
            self._when_waited.pop(0)()


GRACE_S = 5.0
"""How long a rank whose hook failed stays for the others to learn of it, in seconds, before it raises."""


class HookFinisher(Finisher):
    """Finishes buckets by calling `hook`."""

    owner = "a communication hook"
    is_capturable = False
    """False, because a hook may do anything on the host."""
    reads_late = False
    carries_tail = False
    layers_first: bool
    """Whether buckets are launched at the end of backward, when layers have no collectives to run any more."""

    def __init__(
        self,
        state: Any,
        hook: Hook,
        parameters: Sequence[Tensor],
        ledger: Ledger,
        timeout: timedelta | None,
        channel: Channel,
        recorder: Recorder,
        *,
        layers_first: bool = False,
    ) -> None:
        self.layers_first = layers_first
        self._state, self._hook, self._parameters = state, hook, parameters
        self._ledger, self._timeout = ledger, timeout
        self._rank, self._channel, self._recorder = channel.rank, channel, recorder
        # The first error of the hook, which is never called again.
        self._failure: BaseException | None = None
        # That error until it is raised, at the end of backward.
        self._untold: Exception | None = None

    @property
    def failed(self) -> bool:
        """Whether the hook raised in this backward, or returned no future."""
        return self._untold is not None

    def launches_at_end(self, *, shadowed: bool) -> bool:
        """Return True if ranks without data take part: they do not know which buckets are full at a layer's turn."""
        return shadowed or self.layers_first

    def prescale(self, flat: Tensor) -> float:
        """Return 1, because a hook sees this rank's own gradients."""
        return 1.0

    def launch(self, bucket: Bucket, number: int) -> Launched:
        """Call the hook, unless it has failed in this backward: then :meth:`wait` raises its error."""
        if self._recorder.bucket_watch is not None:
            show_own(self._recorder.bucket_watch, self._ledger, bucket.flat, 1.0)
        if self._untold is not None:
            return AlreadyDone()
        where = f"rank {self._rank}: communication hook {name_of(self._hook)!r}, called for bucket {number}"
        if self._failure is not None:
            raise HookError(
                f"rank {self._rank}: communication hook {name_of(self._hook)!r} failed earlier "
                f"({self._failure!r}), so the ranks are out of step; start again from the last checkpoint"
            )
        shown = GradBucket.of(bucket, self._parameters, number, last=bucket.is_last)
        try:
            future = self._hook(self._state, shown)
            if not isinstance(future, Future):
                raise HookError(
                    f"{where}, returned {with_article(type(future).__qualname__)}; let it return a "
                    "torch.futures.Future[torch.Tensor]"
                )
        except Exception as error:
            self._failure = error
            if isinstance(error, CommunicationError | DesyncError):
                raise  # at once: the others cannot be reached, or know it already
            # Not raised here: backward goes on, so that layers still meet and the control block reports it.
            self._untold = error
            if not isinstance(error, PacelineError):
                self._untold = HookError(f"{where}, raised {type(error).__qualname__}: {error}; mend the hook")
                self._untold.__cause__ = error
            return AlreadyDone()
        except BaseException as error:
            self._failure = error
            raise
        return _Answer(future, bucket.flat, shown, where, self._timeout)

    def wait(self, buckets: Sequence[Launched], block: Launched | None, control: ControlBlock) -> None:
        """Copy the hook's answers into the buckets."""
        assert block is not None, "it tells whether a hook failed on another rank, which is asked before its buckets"
        if (error := self._untold) is not None:
            self._untold = None
            # For ranks that wait for it; not for ever, because one that is stuck inside the hook never reads it.
            self._channel.linger(block, GRACE_S)
            raise error
        # Before the buckets: a hook that failed on another rank has not begun its collectives.
        self._channel.wait(block, CONTROL_EXCHANGE)
        _check_none([rank for rank, status in enumerate(control.statuses()) if status.hook_failed], self._rank)
        failure: Exception | None = None
        for number, answer in enumerate(buckets):
            try:
                with self._recorder.span(BUCKET_WAIT, number):
                    answer.wait()
            except Exception as error:  # the other buckets' collectives are waited for all the same
                failure = failure or error
        self._agree(failure)

    def _agree(self, failure: Exception | None) -> None:
        """Collective: raise on every rank if any has a `failure`."""
        if isinstance(failure, CommunicationError):
            raise failure
        verdict, launched = self._channel.gather_rows(torch.tensor(float(failure is not None), dtype=torch.float64))
        if failure is not None:
            self._channel.linger(launched, GRACE_S)
            raise failure
        self._channel.wait(launched, "exchange of whether communication hooks have failed")
        _check_none(verdict.nonzero().flatten().tolist(), self._rank)

    def scale(self, buckets: Sequence[Bucket], notes: Notes) -> None:
        """Turn the mean over all ranks into that over the weights, or over the ranks that count, where these differ."""
        factor = compute_correction(notes)
        if factor != 1.0:
            multiply_each([bucket.flat for bucket in buckets], factor)
        if (watch := self._recorder.bucket_watch) is not None:
            for bucket in buckets:
                watch.averaged(bucket.flat)


def _check_none(failed: Sequence[int], rank: int) -> None:
    if failed:
        raise DesyncError(
            f"rank {rank}: the communication hook failed on {named_ranks(failed)}, so the gradients of this step are "
            "not whole; see that rank's own error, and start again from the last checkpoint"
        ).because_of(())  # the launcher names the rank that raised the cause, not this one


class _Answer:
    """The result of a communication hook, which is a future."""

    def __init__(self, future: Any, flat: Tensor, shown: GradBucket, where: str, timeout: timedelta | None) -> None:
        self._future, self._where, self._timeout = future, where, timeout
        # The bucket, and the one that the hook saw, whose buffer it may have replaced by one of another dtype.
        self._flat, self._shown = flat, shown

    @torch.no_grad()
    def wait(self) -> None:
        """Copy the future's value into the bucket."""
        self._shown.carry_on()
        value = self._value()
        if not isinstance(value, Tensor):
            raise HookError(
                f"{self._where}, returned a future of {with_article(type(value).__qualname__)}; let its value "
                "be one tensor"
            )
        flat = self._flat
        if flat.is_complex() and (value.shape, value.dtype) == ((*flat.shape, 2), flat.dtype.to_real()):
            value = torch.view_as_complex(value.contiguous())  # the future of a collective holds real numbers
        if not self._fits(value):
            raise HookError(
                f"{self._where}, returned a future of {_described(value)} for a bucket of {_described(flat)}; let it "
                "be like bucket.buffer()"
            )
        if value.data_ptr() != flat.data_ptr():
            flat.copy_(value)
        elif value.stride() != flat.stride() or value.is_conj() or value.is_neg():
            flat.copy_(value.clone())  # another order of the same memory, which cannot be copied onto itself

    def _fits(self, value: Tensor) -> bool:
        """Return whether `value` is like the bucket, or of the dtype that the hook gave the buffer.

        torch's compression wrappers give it another dtype.
        """
        if is_sharded(value) or value.layout is not torch.strided:
            return False
        flat, seen = self._flat, self._shown.buffer().dtype
        chosen = value.dtype is seen and seen.is_floating_point and flat.is_floating_point()
        return (value.shape, value.device) == (flat.shape, flat.device) and (value.dtype is flat.dtype or chosen)

    def _value(self) -> Any:
        self._check_done()
        try:
            return self._future.wait()
        except PacelineError:
            raise
        except Exception as error:
            text = " ".join(str(error).partition("\n\nAt:\n")[0].split())  # torch appends the whole stack
            if CommunicationError.__name__ in text:  # torch passes an error on as text, from callback to callback
                raise CommunicationError(f"{self._where}, could not reach the other ranks: {text}") from error
            raise HookError(
                f"{self._where}, returned a future that failed, in the hook's own callback or because another rank "
                f"ended: {type(error).__qualname__}: {text}"
            ) from error

    def _check_done(self) -> None:
        """Wait until the future is completed, for at most the group's timeout.

        Without one, a hook that forgets to complete it would make the rank wait for ever.
        """
        if self._timeout is None or self._future.done():
            return
        done = threading.Event()
        self._future.add_done_callback(lambda _: done.set())
        seconds = self._timeout.total_seconds()
        if not done.wait(seconds):
            raise HookError(
                f"{self._where}, returned a future that was not completed within {seconds:g} s; let the hook complete "
                "it with set_result, or return that of a collective"
            )


def _described(tensor: Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f", {tensor.layout}"
    kind = f"{type(tensor).__name__} of " if is_sharded(tensor) else ""
    return f"{kind}shape {tuple(tensor.shape)}, {tensor.dtype}{layout}, on {tensor.device}"
