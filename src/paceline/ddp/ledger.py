"""The ledger: what this rank has done, as it tells the others in the control block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol
from weakref import WeakSet

from torch import nn
from torch.optim.optimizer import Optimizer

from paceline import sources
from paceline.ddp.autograd import current_task
from paceline.ddp.control import UNCOUNTED, UNWEIGHTED, WEIGHTED, Status
from paceline.errors import UsageError


class Positioned(Protocol):
    """Something with a place in the data that has to be the same on every rank, such as a sampler."""

    epoch: int
    position: int


class Ledger:
    """Counts what the rank does, adds up weights, and notices backwards that ran without one."""

    forwards_since_sync: int
    """Counted forwards since the last synchronized backward."""
    synchronizations: int
    """Synchronized backwards since the wrapper was made."""
    local_backwards: int
    """Backwards under ``no_sync`` since the last synchronized one."""

    def __init__(self) -> None:
        self.forwards_since_sync = self.synchronizations = self.local_backwards = 0
        self.sampler: Positioned | None = None
        self.optimizers: WeakSet[Optimizer] = WeakSet()  # that have stepped over this model's parameters
        self.status = Status()
        self._open: list[float] = []  # weights of the blocks around us, the innermost last
        self._unclaimed: list[float] = []  # weights whose backward has not begun
        self._weighted = 0  # weights since the last synchronization
        self._current: float | None = None  # weight of the latest backward
        self._used_inside = False
        self._task = -1

    def report(self, size: int, *, aborted: bool = False, hook_failed: bool = False) -> Status:
        """The rank's status as of now, for a group of `size` ranks."""
        status = replace(self.status, aborted=aborted, hook_failed=hook_failed, data=sources.told(size))
        if self.sampler is not None:
            status.epoch, status.position = self.sampler.epoch, self.sampler.position
        return status

    def synchronized(self) -> None:
        """A step has been synchronized: weights and pending forwards are used up."""
        self.forwards_since_sync = self.local_backwards = 0
        self.synchronizations += 1
        sources.note_synchronization()
        self._used_inside = bool(self._open)
        self.status.weight, self.status.weighting, self._weighted = 0, 0, 0
        self._unclaimed.clear()

    def contributes_nothing(self, *, counted: bool) -> None:
        """The rank has no data in this step; `counted` if a mean divides by it all the same."""
        self.status.weight, self.status.weighting, self._weighted = 0, 0 if counted else UNCOUNTED, 0
        self._unclaimed.clear()

    # -- forwards -----------------------------------------------------------------------------------------------

    def forward(self, *, broadcasts: bool) -> None:
        """Count a forward in training mode; ranks must agree on how many of these broadcast buffers."""
        self.status.forwards += broadcasts
        self.forwards_since_sync += 1

    def take_back_forward(self) -> Callable[[], None]:
        """A function that takes the last forward back, once: its backward turned out to be local."""
        pending = [1]

        def take_back() -> None:
            if pending:
                pending.pop()
                self.forwards_since_sync = max(0, self.forwards_since_sync - 1)

        return take_back

    # -- weights ------------------------------------------------------------------------------------------------

    @contextmanager
    def weigh(self, weight: float) -> Iterator[None]:
        """A micro-batch of `weight`; one whose block raises does not count.

        Raises:
            UsageError: if `weight` is negative or no finite number.
        """
        weight = float(weight)
        if not math.isfinite(weight) or weight < 0:
            raise UsageError(f"model.weight() takes a finite number >= 0, such as a count of tokens, not {weight!r}")
        self.status.weight += weight
        self.status.weighting |= WEIGHTED
        self._weighted += 1
        self._open.append(weight)
        self._unclaimed.append(weight)
        try:
            yield
        except BaseException:
            if self.status.weighting:  # else a synchronization inside the block has used it already
                self._take_back_weight(weight)
            raise
        finally:
            self._open.pop()
            self._used_inside = False

    def _take_back_weight(self, weight: float) -> None:
        self._weighted -= 1
        self.status.weight = max(0.0, self.status.weight - weight) if self._weighted else 0.0
        if not self._weighted:  # nothing of this step is weighted
            self.status.weighting &= ~WEIGHTED
        if weight in self._unclaimed:
            self._unclaimed.remove(weight)

    @property
    def is_weight_pending(self) -> bool:
        """Whether weights were given that no synchronization has used."""
        return bool(self.status.weighting & WEIGHTED)

    def backward_began(self) -> None:
        """A backward begins; it belongs to the block around it, or to one that was left before it.

        Called by the hook of every output; a graph task counts once.

        Raises:
            UsageError: if the block's weight was used by a synchronization already.
        """
        if (task := current_task()) == self._task and task != -1:
            return
        self._task = task
        self._current = None
        if self._unclaimed:
            self._current = self._unclaimed.pop() if self._open else self._unclaimed.pop(0)
        elif self._used_inside:
            raise UsageError(
                "a second backward began inside one model.weight() block, whose weight the first has used up; run the "
                "first under model.no_sync(), or give each a block of its own"
            )
        elif self._open:
            self._current = self._open[-1]  # another backward of the block, whose weight is counted already
        else:
            self.status.weighting |= UNWEIGHTED

    def forget_dropped(self, parameters: Sequence[nn.Parameter], *, in_backward: bool) -> None:
        """If what local backwards accumulated was dropped (``zero_grad``), let it weigh nothing.

        Then only the backward that is beginning, if any, counts.
        """
        if not self.local_backwards or any(parameter.grad is not None for parameter in parameters):
            return
        self.local_backwards = 0
        if not in_backward:
            self.status.weight, self.status.weighting, self._weighted = 0, 0, 0
        elif self._current is None:
            self.status.weight, self.status.weighting, self._weighted = 0, UNWEIGHTED, 0
        else:
            self.status.weight, self.status.weighting, self._weighted = self._current, WEIGHTED, 1
