"""The engine of a copy that has not been trained: it connects to its peers in its first synchronized backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from paceline.core.torch_internals.autograd import Accumulators
from paceline.core.torch_internals.compile import class_never_compiled
from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.consistency.module_changes import ModuleWatch, OnChange
from paceline.ddp.engine.interface import WithoutPeers
from paceline.ddp.reducer.forwards import Forward
from paceline.ddp.reducer.reducer import Reducer


@class_never_compiled
class DormantEngine(WithoutPeers):
    """Stands in for the reducer of a copy until one is needed.

    Args:
        watch: looks at the module.
        ledger: counts the steps.
        on_change: called with all parameters if the module has got new ones since it was copied.
        connect: makes a reducer, together with all ranks, and puts it in this engine's place.
    """

    def __init__(
        self, watch: ModuleWatch, ledger: Ledger, on_change: OnChange, connect: Callable[[], Reducer | None]
    ) -> None:
        self._watch, self._ledger, self._on_change, self._connect = watch, ledger, on_change, connect
        # The reducer that took this engine's place; outputs that were hooked before still call this engine.
        self._reducer: Reducer | None = None

    def check_finite(self, enabled: bool) -> None:
        """Leave this to the reducer that takes over, which gets the wrapper's options."""

    def hook_outputs(self, outputs: Sequence[Tensor], *, counts_if_averaged: bool) -> None:
        forward = Forward(self._ledger.blocks.forward_ended(), counts_if_averaged=counts_if_averaged)
        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(partial(self._output_hook, forward))

    def _output_hook(self, forward: Forward, gradient: Tensor) -> None:
        # Looked up in each backward: a copy is usually not trained, so no list is kept up to date for it.
        named = [pair for pair in self._watch.named_parameters() if pair[1].requires_grad]
        names, parameters = [name for name, _ in named], [parameter for _, parameter in named]
        if not Accumulators(parameters).are_accumulated():
            return
        if self.sync_enabled:
            self.connected().backward_reached(forward, gradient)
            return
        self._ledger.begin_local(forward.block, parameters)
        self._ledger.keep_gradients(names, parameters, is_last=False)

    def synchronize(self) -> None:
        """Connect, and average the gradients in ``p.grad``."""
        self.connected().synchronize()

    def check_equal(self) -> None:
        """Connect, and compare the gradients of all ranks."""
        self.connected().check_equal()

    def connected(self) -> Reducer:
        """Return the reducer that takes this engine's place; the first time, all ranks make it."""
        if self._reducer is None:
            # Before the reducer is made, so that it has buckets for the parameters that the copy has now.
            if (change := self._watch.detect()) is not None:
                self._watch.follow(change.named)
                self._on_change(change.named, True)
            self._reducer = self._connect()
            assert self._reducer is not None, "the wrapper is gone"
            self._reducer.sync_enabled = self.sync_enabled
        return self._reducer
