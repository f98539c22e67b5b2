"""A copy of a wrapper that has not been trained: it connects to its peers in its first synchronized backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.engine.module_changes import ModuleWatch
from paceline.ddp.engine.pending_forwards import Forward
from paceline.ddp.engine.reducer import Reducer
from paceline.torch_internals.autograd import Accumulators
from paceline.torch_internals.compile import class_never_compiled


@class_never_compiled
class Asleep:
    """Stands in for a copy's reducer, which ``wake()`` makes, with all ranks."""

    exposed_seconds = 0.0

    def __init__(self, watch: ModuleWatch, ledger: Ledger, wake: Callable[[], Reducer]) -> None:
        self.sync_enabled = True
        self._watch, self._ledger, self._wake = watch, ledger, wake

    def check_finite(self, enabled: bool) -> None:
        """Nothing yet; the reducer that wakes up asks the wrapper's options."""

    def watch_outputs(self, outputs: Sequence[Tensor], on_local: Callable[[], None]) -> None:
        """Hook the outputs of a forward."""
        forward = Forward(self._ledger.forward_in_block())
        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(partial(self._output_hook, on_local, forward))

    def _output_hook(self, on_local: Callable[[], None], forward: Forward, gradient: Tensor) -> None:
        parameters = [parameter for _, parameter in self._watch.named_parameters() if parameter.requires_grad]
        if not Accumulators(parameters).are_meant():
            return
        if self.sync_enabled:
            self._wake().backward_reached(on_local, forward, gradient)
            return
        self._ledger.backward_began(forward.block)
        self._ledger.forget_dropped(parameters, in_backward=True)
        self._ledger.local_backwards += 1

    def synchronize(self) -> None:
        """Wake up, and average what ``p.grad`` holds."""
        self._wake().synchronize()

    def expect_equal(self) -> None:
        """Wake up, and compare the gradients of all ranks."""
        self._wake().expect_equal()

    def settle_aborted(self) -> None:
        """Nobody waits for one that has not begun."""
