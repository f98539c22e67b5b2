"""Copies of a wrapper: whole from the start, but without a word to other ranks until they train.

``copy.deepcopy(model)`` keeps an average of weights as a rule (EMA), often on one rank alone, so making one must not
need the others. A copy that is trained after all connects in its first synchronized backward, as all ranks run that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from paceline.ddp.autograd import Accumulators
from paceline.ddp.ledger import Ledger
from paceline.ddp.reducer import Reducer


class Asleep:
    """Stands in for a copy's reducer, which ``wake()`` makes, with all ranks."""

    exposed_seconds = 0.0

    def __init__(self, parameters: Sequence[nn.Parameter], ledger: Ledger, wake: Callable[[], Reducer]) -> None:
        self.sync_enabled = True
        self._parameters, self._ledger, self._wake = parameters, ledger, wake
        self._accumulators = Accumulators(parameters)

    def watch(self, outputs: Sequence[Tensor], on_local: Callable[[], None]) -> None:
        """Hook the outputs of a forward."""
        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(partial(self._output_hook, on_local))

    def _output_hook(self, on_local: Callable[[], None], gradient: Tensor) -> None:
        if not self._accumulators.are_meant():
            return
        if self.sync_enabled:
            self._wake().backward_reached(on_local, gradient)
            return
        self._ledger.backward_began()
        self._ledger.forget_dropped(self._parameters, in_backward=True)
        self._ledger.local_backwards += 1

    def synchronize(self) -> None:
        """Wake up, and average what ``p.grad`` holds."""
        self._wake().synchronize()

    def settle_aborted(self) -> None:
        """Nobody waits for one that has not begun."""
