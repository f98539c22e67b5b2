"""When gradients are synchronized, and how much each micro-batch weighs: what a training loop says to the wrapper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from paceline.ddp.agreement.ledger import Ledger, Positioned
from paceline.ddp.agreement.step_guard import StepGuard
from paceline.ddp.config import Options
from paceline.ddp.engine.mean_losses import MeanLosses
from paceline.ddp.transport.channel import Channel
from paceline.errors import UsageError


class SyncControl:
    """Comes before torch's class among the wrapper's bases."""

    training: bool
    _channel: Channel | None
    _options: Options
    _guard: StepGuard
    _ledger: Ledger
    _mean_losses: MeanLosses
    _reducer: Any

    if TYPE_CHECKING:  # the wrapper's own

        def parameters(self) -> Iterator[nn.Parameter]:
            """The module's."""

        def sync_buffers(self) -> bool:
            """Broadcast buffers."""

        def _count_forward(self) -> bool:
            """Count a forward that all ranks run."""

        def _join_forward(self) -> None:
            """Tell ranks that ran out of data that a forward begins."""

    @property
    def do_sync(self) -> bool:
        """Whether a backward that starts now is synchronized."""
        enabled: bool = self._reducer.sync_enabled
        return enabled

    @property
    def require_backward_grad_sync(self) -> bool:
        """torch's name for :attr:`do_sync`, which frameworks read and set."""
        return self.do_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, enabled: bool) -> None:
        self._reducer.sync_enabled = enabled

    def enable_grad_sync(self) -> None:
        """Synchronize gradients in the backwards that start from now on."""
        self._reducer.sync_enabled = True

    def disable_grad_sync(self) -> None:
        """Accumulate gradients locally in the backwards that start from now on."""
        self._reducer.sync_enabled = False

    @property
    def check_finite(self) -> bool:
        """Whether a gradient that holds NaN or Inf is an error on every rank; may be set, on all ranks alike."""
        return self._options.check_finite

    @check_finite.setter
    def check_finite(self, enabled: bool) -> None:
        self._options = replace(self._options, check_finite=enabled)
        self._reducer.check_finite(enabled)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards that start inside the block accumulate locally; the next one outside reduces the sum.

        It is read when backward starts, so it may surround forward and backward, or backward alone.
        """
        before = self.do_sync
        self.disable_grad_sync()
        try:
            yield
        finally:
            self._reducer.sync_enabled = before

    def sync_gradients(self) -> None:
        """Average what ``p.grad`` holds, now and without a backward.

        For a rank that has no data in a step in which the others run a backward, and after micro-batches that were all
        run under :meth:`no_sync`. A parameter without a gradient counts as zero. A rank that ran no forward since
        the last synchronization also takes part in the broadcast of buffers that belongs to a forward.

        Raises:
            DesyncError: if ranks differ in what must be equal everywhere.
            CommunicationError: if a rank ended or did not come.
        """
        if self._channel is not None:
            self._reducer.settle_aborted()
            if self.training and self._ledger.forwards_since_sync == 0:
                self._join_forward()
                self._count_forward()
        self._reducer.synchronize()

    def gradients_are_averaged(self) -> None:
        """Let an optimizer step over gradients that were averaged over the ranks by hand, or made alike on all of them.

        Such as by ``autograd.grad`` and ``all_reduce``, or from random numbers that are the same everywhere. Call it on
        all ranks, after ``p.grad`` is set and before the step: it compares 64 bits of each gradient, which costs one
        read of them and a small collective. What was counted for :meth:`weight` and :meth:`no_sync` is taken as used.

        Raises:
            UsageError: if a gradient is not the same on every rank; names it.
            CommunicationError: if a rank ended or did not come.
        """
        self._reducer.expect_equal()
        self._ledger.synchronized()

    def weight(self, weight: float, reduction: Literal["sum", "mean"] = "sum") -> AbstractContextManager[None]:
        """Surround a micro-batch whose loss is a *sum*, with the number of samples or tokens it sums over.

        The gradient becomes Σ gradient / Σ weight over all ranks and micro-batches since the last synchronization,
        which is the mean loss's gradient over the whole global batch however unevenly it is spread::

            with model.weight(len(y)):
                F.cross_entropy(model(x), y, reduction="sum").backward()

        With ``reduction="mean"`` the loss inside is a *mean* over that number, as loss functions return by default.
        Gradients of the wrapper's parameters are multiplied by it as they arrive, so the result is the same; one over
        no items, which is NaN, counts as zero::

            with model.weight(len(y), reduction="mean"):
                F.cross_entropy(model(x), y).backward()

        A mean without it would give gradients that are too small; the first backwards of a wrapper are looked at, and a
        warning names the line if they start from one.

        Set gradients to None (or zero) between weighted steps, as usual; an average that is kept is summed again.

        Args:
            weight: a count, or any number >= 0.
            reduction: how the loss inside was made of its items.

        Raises:
            UsageError: if `weight` is negative or no finite number, or `reduction` neither of the two. In backward:
                if one runs through the mean losses of several blocks, or through two wrappers that share parameters
                and of which one has a mean.
        """
        if reduction not in ("sum", "mean"):
            raise UsageError(f'model.weight(reduction=…) takes "sum" or "mean", not {reduction!r}')
        self._reducer.settle_aborted()  # which uses up the weights counted so far, so before this one is
        if reduction == "mean":
            self._mean_losses.follow()
        return self._ledger.weigh(weight, is_mean=reduction == "mean")

    def holds_local_gradients(self) -> bool:
        """Whether gradients of micro-batches that ran under :meth:`no_sync` wait for their synchronization."""
        if not self._ledger.local_backwards:
            return False
        gradients = [parameter.grad for parameter in self.parameters()]
        # They may have been dropped since, or set to zero.
        return any(
            gradient is not None and bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())
            for gradient in gradients
        )

    def expect_averaged(self, caller: str) -> None:
        """Refuse, on behalf of `caller`, gradients that are not averages over the ranks.

        Raises:
            UsageError: says what was not synchronized, and the remedy.
        """
        self._guard.expect_whole(caller)

    def watch(self, sampler: Positioned) -> None:
        """Compare the sampler's epoch and position across ranks in every synchronized backward."""
        self._ledger.sampler = sampler
