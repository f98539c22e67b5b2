"""Methods that control the synchronization of gradients, and the weight of each micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from paceline.core.torch_internals.tensors import has_nonzero
from paceline.ddp.agreement.step_guard import StepGuard
from paceline.ddp.agreement.weight_block import total_weight
from paceline.ddp.engine.connection import Connection
from paceline.ddp.engine.local import GradientEngine
from paceline.ddp.engine.replica import Replica
from paceline.ddp.options.config import Options
from paceline.errors import UsageError


class SyncControl(Joinable):
    """A stateless base class of the wrapper; precedes torch's class in the method resolution order."""

    training: bool
    device: torch.device
    process_group: dist.ProcessGroup
    forward_sync_buffers: bool
    _has_joined: bool
    _connection: Connection | None
    """The parts that communicate with other ranks; None on a single rank, and in a copy until it is trained."""
    _engine: GradientEngine
    """Averages gradients; the connection's reducer if there is a connection."""
    _guard: StepGuard
    """Refuses optimizer steps with gradients that were not averaged."""
    _options: Options
    """Checked settings; only ``check_finite`` may change."""
    _replica: Replica
    """The parameters and buffers that are synchronized."""
    _comm_hooks: list[Any]
    """The communication hook and its state; empty without a hook."""

    @property
    def do_sync(self) -> bool:
        """Whether a backward pass that starts now will be synchronized."""
        return self._engine.sync_enabled

    @property
    def require_backward_grad_sync(self) -> bool:
        """torch's name for :attr:`do_sync`, which frameworks read and set."""
        return self.do_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, enabled: bool) -> None:
        self._engine.sync_enabled = enabled

    def enable_grad_sync(self) -> None:
        """Synchronize gradients in backward passes that start from now on."""
        self._engine.sync_enabled = True

    def disable_grad_sync(self) -> None:
        """Accumulate gradients locally in backward passes that start from now on."""
        self._engine.sync_enabled = False

    @property
    def check_finite(self) -> bool:
        """Whether a gradient with NaN or Inf raises an error on every rank. May be set, on all ranks."""
        return self._options.check_finite

    @check_finite.setter
    def check_finite(self, enabled: bool) -> None:
        self._options = replace(self._options, check_finite=enabled)
        self._engine.check_finite(enabled)

    def ask_to_stop(self) -> None:
        """Ask all ranks to stop training; may be called on any rank. See :attr:`stop_agreed`."""
        self._replica.ledger.status.asks_to_stop = True

    @property
    def stop_agreed(self) -> bool:
        """Whether any rank had called :meth:`ask_to_stop` before the latest synchronized backward pass.

        The value is the same on every rank after ``optimizer.step()``, so all ranks can leave their loops after the
        same step. The request travels with the reports of that backward pass; no other step is affected.
        """
        self._engine.read_late()
        return self._replica.ledger.stop_agreed

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in backward passes inside the block; the next one outside reduces the sum.

        Only the start of the backward pass matters, so the block may contain forward and backward, or backward alone.
        """
        # Otherwise local gradients would be added to averages that are not complete yet.
        self._engine.read_late()
        previous = self.do_sync
        self.disable_grad_sync()
        try:
            yield
        finally:
            self._engine.sync_enabled = previous

    def sync_gradients(self) -> None:
        """Average the gradients in ``p.grad`` now, without a backward pass.

        Use it on a rank without data while the others run a backward pass, or after micro-batches that all ran under
        :meth:`no_sync`. A missing gradient counts as zero. If the other ranks use :meth:`weight`, a rank without data
        calls ``optimizer.zero_grad()`` first. A rank that has not run a forward pass since the last synchronization
        also takes part in the broadcast of buffers that the other ranks run with theirs. If one backward pass runs
        through several wrappers on other ranks, call this method for each wrapper, in order of construction.

        Raises:
            DesyncError: if numbers that must be equal differ between ranks, such as counts of optimizer steps and of
                steps with a forward pass.
            CommunicationError: if a rank has exited or did not take part.
        """
        if (connection := self._connection) is not None:
            self._engine.resync_aborted()
            # The other ranks broadcast buffers in forward or at the end of backward.
            if self.training and self._replica.ledger.forwards_since_sync == 0:
                if connection.joined_steps.enabled:
                    connection.joined_steps.forward_begins()
                connection.buffers.forward_begins()
        self._engine.synchronize()

    def sync_buffers(self) -> bool:
        """Make buffers equal to rank 0's now; returns whether there are any to synchronize.

        After a synchronized backward pass they are already equal. Call this method on all ranks if other code has
        changed them, such as forward passes under ``no_grad`` in training mode that recompute running statistics.
        """
        return self._connection is not None and self._connection.buffers.synchronize()

    def gradients_are_averaged(self) -> None:
        """Allow an optimizer step with gradients that the program averaged, or that are the same on all ranks anyway.

        Examples are gradients computed with ``autograd.grad`` and ``all_reduce``, or from random numbers that are the
        same on all ranks. Call this method on all ranks, after setting ``p.grad`` and before the step. It compares a
        64-bit digest of each gradient, which costs one read of the gradients and a small collective. It also discards
        the weights from :meth:`weight` and the local backward passes under :meth:`no_sync` since the last
        synchronization.

        Raises:
            UsageError: if a gradient is not the same on every rank; names the gradient.
            CommunicationError: if a rank has exited or did not take part.
        """
        self._engine.check_equal()
        # This counts as a synchronization for the step guard, and discards weights and local backward passes.
        self._replica.ledger.synchronized()
        self._replica.ledger.task = -1  # and gradients that this backward pass produced outside the module

    def weight(self, weight: float | torch.Tensor) -> AbstractContextManager[None]:
        """Weight a micro-batch whose loss is a *sum* over `weight` samples or tokens.

        The gradient becomes Σ gradient / Σ weight over all ranks and micro-batches since the last synchronization. This
        is the gradient of the mean loss over the whole global batch, even if the batch is split unevenly::

            with model.weight(len(y)):
                F.cross_entropy(model(x), y, reduction="sum").backward()

        A mean times its number of items is a sum: ``(F.cross_entropy(model(x), y) * len(y)).backward()``. A bare mean
        would give gradients that are too small. The wrapper checks its first backward passes for this, and warns with
        the line of code if one starts from a mean.

        The average is accumulated into ``p.grad``, as in an ordinary backward pass. A block without a backward pass
        does not count, nor does a micro-batch under :meth:`no_sync` if all of the wrapper's gradients have been set to
        None or zero since.

        Args:
            weight: a count, or any number >= 0, or a tensor of one element. The host does not wait for a tensor on a
                GPU, so an invalid value raises an error only at the end of backward.

        Raises:
            UsageError: if `weight` is negative or not finite. Also in backward, if a backward pass outside the wrapper
                ran between the forward and its backward.
        """
        # Resync before counting this weight, because the resync consumes all counted weights.
        self._engine.resync_aborted()
        return self._replica.ledger.weigh(weight)

    # -- virtual ranks ------------------------------------------------------------------------------------------

    @property
    def virtual_ranks(self) -> int | None:
        """Number of slices over which a step's gradient is summed in a fixed tree; None for an ordinary step."""
        return self._options.virtual_ranks or None

    @property
    def slice_number(self) -> int:
        """The number of the current slice among this rank's slices, starting at 0; always 0 without virtual ranks."""
        slices = None if self._connection is None else self._connection.virtual_ranks
        return 0 if slices is None else slices.number

    @property
    def is_repeat(self) -> bool:
        """Whether the current slice is a repetition for ``check_compute_every``, whose results do not count."""
        slices = None if self._connection is None else self._connection.virtual_ranks
        return slices is not None and slices.is_repeat

    def _connected(self) -> Connection:
        if self._connection is None:
            self._engine.connected()
        assert self._connection is not None
        return self._connection

    # -- uneven inputs ------------------------------------------------------------------------------------------

    @property
    def _join_config(self) -> Any:
        """Settings of ``join``; set by torch when the block begins, and by :class:`.Leaving` when it ends."""
        return self.__dict__["_join_config"]

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self.__dict__["_join_config"] = config
        if (connection := self.__dict__.get("_connection")) is not None:
            connection.joined_steps.enable(config.enable)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        optimizers: Sequence[Optimizer] = (),
    ) -> Join:
        """Let ranks run out of data at different times, or have no data at all.

        A rank that leaves its loop takes part in the other ranks' steps, including SyncBatchNorm's collectives, without
        contributing. Once all ranks have left, each gets the model of the rank that left last (the highest one if
        several did).

        Args:
            divide_by_initial_world_size: whether means without :meth:`weight` divide by the number of all ranks
                (default), or only of ranks with data. Weighted means always cover all samples.
            enable: ``False`` turns ``join`` off.
            throw_on_early_termination: raise ``RuntimeError`` on every rank as soon as one runs out.
            optimizers: optimizers whose state is updated at the end on ranks that ran out early. Without this argument,
                momentum and other state remain as of that rank's last step, and a warning says so.

        Raises:
            UsageError: with ``virtual_ranks``; once a rank has run out, if the model contains torch's SyncBatchNorm.
        """

        from paceline.ddp.wrapper.join import JoinOfOne  # few loops need this import

        options = {"divide_by_initial_world_size": divide_by_initial_world_size, "optimizers": optimizers}
        return JoinOfOne(self, enable, throw_on_early_termination, options)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for ``torch.distributed.algorithms.join.Join``; takes the arguments of :meth:`join`."""

        from paceline.ddp.wrapper.join import Leaving, Shadow

        if count := self._options.virtual_ranks:
            raise UsageError(
                f"join cannot be combined with virtual_ranks={count}, whose tree of sums does not account for ranks "
                "that run out of data; leave one of the two out"
            )
        self._has_joined = True
        self._engine.resync_aborted()
        if dist.get_world_size(self.process_group) > 1:
            self._engine.connected()  # now, because not all ranks may run a copy's first backward
        if self._connection is None:
            return Leaving(self)
        self._connection.reducer.follow_module_on_all_ranks()  # inside join, ranks without data could not follow
        # torch passes the same keyword arguments to everything in one Join, so some may be meant for other objects.
        divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        optimizers = tuple(kwargs.get("optimizers", ()))
        return Shadow(self, self._connection, self._replica, self._guard, optimizers, divides_by_all=divides_by_all)

    @property
    def join_device(self) -> torch.device:
        """Device of the tensors in ``Join``'s own collectives."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """Process group of ``Join``'s own collectives."""
        return self.process_group

    # -- costs --------------------------------------------------------------------------------------------------

    @property
    def gradient_bytes_per_step(self) -> int:
        """Bytes of gradients that this rank communicates in one synchronized backward pass."""
        return sum(self._engine.bucket_bytes())

    @property
    def exposed_seconds(self) -> float:
        """Total seconds that backward passes have waited for communication at their end, since the wrapper was created.

        On a GPU, this is GPU time and does not yet include the latest steps.
        """
        time = self._engine.exposed_time
        return 0.0 if time is None else time.seconds

    # -- checks -------------------------------------------------------------------------------------------------

    def holds_local_gradients(self) -> bool:
        """Return whether gradients of micro-batches that ran under :meth:`no_sync` have yet to be synchronized."""
        if not self._replica.ledger.local_tasks:
            return False
        gradients = [parameter.grad for parameter in self._replica.all_parameters()]
        # They may have been dropped or zeroed in the meantime.
        return any(gradient is not None and has_nonzero(gradient) for gradient in gradients)

    @property
    def total_weight(self) -> float:
        """Sum of all ranks' weights (:meth:`weight`) in the latest synchronized backward pass; 0 without weights."""
        return total_weight(self._replica.ledger.notes)
