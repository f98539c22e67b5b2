"""The local engine, for a single rank and for a copy of a wrapper until it is trained; it never communicates.

On a single rank, it costs time only if micro-batches are weighted or checked. Most copies are never trained, so a copy
connects to its peers only in its first synchronized backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from paceline.core.device_streams import is_capturing
from paceline.core.torch_internals import (
    Accumulators,
    GraphTask,
    check_eager_backward,
    class_never_compiled,
    has_ended,
    has_nonzero,
    queue_callback,
    stored_elements,
)
from paceline.ddp.backward import Forward
from paceline.ddp.connection import Replica
from paceline.ddp.control_block import non_finite
from paceline.ddp.extensions import CHECK_FINITE, Magnitudes, cannot_capture
from paceline.ddp.module_changes import Named, OnChange, Trained
from paceline.ddp.options import check_averaged
from paceline.ddp.reducer import Reducer
from paceline.ddp.shared_parameters import NOTHING_SHARED, Sharing
from paceline.ddp.weights import UNWEIGHTED, WEIGHTED, Block, compute_scale, multiply_gradients
from paceline.errors import DesyncError


@class_never_compiled
class LocalEngine:
    """Gradient engine without communication; changes gradients only to apply ``model.weight(w)``.

    Weighted gradients become Σ gradient / Σ w over micro-batches, the same as with several ranks.

    Args:
        replica: the parameters, and the ledger that counts the steps.
        check_finite: whether gradients are checked for NaN and Inf.
        on_change: called with all parameters when the module has new ones.
        connect: creates a reducer, together with all ranks, to replace this engine. A copy needs a reducer when it is
            trained, and a communication hook needs the reducer's buckets.
        has_peers: whether this is a copy in a world of several ranks, whose gradients only a reducer can average.
    """

    sync_enabled = True
    """False inside ``no_sync``: a backward pass that starts now stays local."""
    exposed_time = None
    """None, because there is no communication to wait for."""

    def __init__(
        self,
        replica: Replica,
        check_finite: bool,
        on_change: OnChange,
        connect: Callable[[], Reducer | None],
        *,
        has_peers: bool,
    ) -> None:
        self._watch, self._ledger, self._check_finite = replica.watch, replica.ledger, check_finite
        self._on_change, self._connect, self._has_peers = on_change, connect, has_peers
        # The reducer that has replaced this engine; outputs that were hooked earlier still call this engine.
        self._reducer: Reducer | None = None
        # The running backward pass, if there is work to do at its end.
        self._task: weakref.ref[GraphTask] | None = None
        # This wrapper's share of the parameters that other wrappers also have.
        self._share = NOTHING_SHARED
        self._follow(replica.trained)

    def _follow(self, named: Named) -> None:
        self._trained = Trained(named)
        self._accumulators = Accumulators(self._trained.originals)
        # A copy may have another wrapper's parameters (copy.copy()), but it shares them only once it is trained.
        self._sharing = Sharing(Trained([]) if self._has_peers else self._trained, self._ledger, ranks=[0])

    def _inspect_module(self) -> None:
        if (change := self._watch.detect()) is not None:
            check_averaged(change.named)
            self.close()
            self._follow(change.named)
            self._watch.follow(change.named)
            self._on_change(change.named, True)

    def check_finite(self, enabled: bool) -> None:
        """Turn the check of gradients for NaN and Inf on or off, starting with the next backward pass."""
        self._check_finite = enabled

    def hook_outputs(self, outputs: Sequence[Tensor], *, counts_if_averaged: bool) -> None:
        """Hook the outputs of a forward pass, whose micro-batch may be weighted."""
        if hooked := [output for output in outputs if output.grad_fn is not None]:
            if (block := self._ledger.blocks.forward_ended()) is not None:
                self._ledger.kept.look(self._trained.parameters)
            for output in hooked:
                output.register_hook(partial(self._output_hook, block))

    def _output_hook(self, block: Block | None, gradient: Tensor) -> None:
        forward = Forward()
        forward.block = block
        if self._reducer is not None:
            self._reducer.backward_reached(forward, gradient)
            return
        task = self._task() if self._task is not None else None
        # An autograd thread may still hold the task of a backward pass that was interrupted by an exception.
        if task is not None and has_ended(task.number):
            self._task_ended(None)
        elif task is not None:  # under way
            self._ledger.backward_goes_on(block)
            return
        self._inspect_module()
        if not self._accumulators.are_accumulated():
            return
        parameters = self._trained.parameters
        if not self.sync_enabled:
            self._ledger.begin_local(block, parameters)
            self._sharing.begin_local()
            self._ledger.keep_gradients(self._trained.names, parameters, is_last=False)
            return
        if self._has_peers:
            self.connected().backward_reached(forward, gradient)
            return
        self._ledger.backward_began(block)
        self._ledger.forget_dropped(parameters, in_backward=True)
        check_eager_backward(0)
        self._share = self._sharing.begin()
        # Only the callback holds the task, so if it is freed before the callback runs, the backward pass raised.
        task = GraphTask()
        self._task = weakref.ref(task, self._task_ended)
        queue_callback(partial(self._end, task))
        elsewhere = self._share.averaged_elsewhere
        self._ledger.keep_gradients(self._trained.names, parameters, elsewhere, is_last=True)

    def _end(self, _task: GraphTask) -> None:
        self._task = None
        self._finish()

    def _task_ended(self, _: object) -> None:
        """Restore other wrappers' averages if an exception made autograd drop the graph task early."""
        if self._task is not None:
            self._task = None
            self._sharing.abort(self._share)

    def synchronize(self) -> None:
        """Scale the gradients to the weighted mean without a backward pass; in a copy, connect and average them."""
        if self._has_peers:
            self.connected().synchronize()
            return
        self._inspect_module()
        self._ledger.count_unused_blocks(self.local_gradient)
        self._share = self._sharing.begin()
        self._finish()

    @torch.no_grad()
    def _finish(self) -> None:
        weighting = self._ledger.status.weighting
        if weighting == WEIGHTED | UNWEIGHTED:
            raise DesyncError(
                "some micro-batches of this step ran inside model.weight() and some outside; use it for all or for none"
            )
        self._ledger.add_up()
        self._ledger.notes = [self._ledger.status.note]
        if weighting & WEIGHTED:
            pairs = enumerate(self._trained.parameters)
            averaged = (parameter for index, parameter in pairs if index not in self._share.averaged_elsewhere)
            weighted = [parameter for parameter in averaged if parameter.grad is not None]
            multiply_gradients(weighted, compute_scale(self._ledger.notes))
        self._ledger.synchronized()
        self._ledger.stop_agreed = self._ledger.status.asks_to_stop
        # p.grad already holds this wrapper's average, so only averages that were set aside are added.
        self._sharing.show(dict.fromkeys(self._share.set_aside), self._share)
        self._sharing.end()
        self._sharing.check_not_mixed()
        if self._check_finite:
            self._refuse_non_finite()

    def _refuse_non_finite(self) -> None:
        gradients = {index: parameter.grad for index, parameter in enumerate(self._trained.parameters)}
        present = {index: stored_elements(gradient) for index, gradient in gradients.items() if gradient is not None}
        if any(is_capturing(gradient.device) for gradient in present.values()):
            raise cannot_capture(CHECK_FINITE, 0)
        check = Magnitudes()
        check.add(present.keys(), present.values())
        if bad := check.found():
            names = self._trained.names
            raise non_finite([0], [names[index] for index in bad], len(names))

    def local_gradient(self) -> str | None:
        """Return the name of a parameter whose gradient may have bypassed the wrapper inside ``model.weight()``."""
        if self._ledger.blocks.without_forward():
            for index, (name, parameter) in enumerate(zip(self._trained.names, self._trained.parameters, strict=True)):
                gradient = None if index in self._sharing.left_to_others else parameter.grad
                if gradient is not None and has_nonzero(gradient):
                    return name
        return None

    def connected(self) -> Reducer:
        """Return a reducer with buckets, which replaces this engine; called by all ranks."""
        if self._reducer is None:
            self._inspect_module()  # first, so that the reducer creates buckets for the module's current parameters
            self._reducer = self._connect()
            assert self._reducer is not None, "the wrapper is gone"
            self._reducer.set_sync(self.sync_enabled)
            self.close()  # otherwise it would count as another wrapper with the same parameters
        return self._reducer

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self._sharing.close()
        self._trained.release()

    # -- between peers ------------------------------------------------------------------------------------------

    def check_equal(self) -> None:
        """Raise an error if gradients differ between ranks; a copy connects to its peers for this check."""
        if self._has_peers:
            self.connected().check_equal()

    def read_late(self) -> None:
        """Do nothing, because only a reducer reads reports from other ranks."""

    def resync_aborted(self) -> None:
        """Do nothing, because only a reducer can have collectives left to catch up on."""

    def check_idle(self) -> None:
        """Do nothing, because the local engine's backward pass is always complete when ``backward()`` returns."""

    def bucket_bytes(self) -> list[int]:
        """Return an empty list, because only a reducer has buckets."""
        return []

    def named_layout(self) -> list[list[str]]:
        """Return an empty list, because only a reducer has buckets."""
        return []

    def restore_layout(self, layout: list[list[str]]) -> None:
        """Ignore the layout, because only a reducer has buckets."""


GradientEngine: TypeAlias = Reducer | LocalEngine
"""Either engine that averages the gradients of a wrapper."""
