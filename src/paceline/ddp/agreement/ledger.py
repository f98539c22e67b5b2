"""The ledger: counts of this rank's steps so far, which the control block tells the others."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from paceline.core.state import data_position
from paceline.core.telemetry.spans import black_box
from paceline.core.torch_internals.autograd import GraphTask, current_task, is_plain_backward, queue_callback
from paceline.ddp.agreement.control_block import Status
from paceline.ddp.agreement.mean_loss_warning import MistakenMeans
from paceline.ddp.agreement.weight_block import Block
from paceline.ddp.agreement.weighting import BY_SLICE, UNCOUNTED, UNWEIGHTED, WEIGHTED
from paceline.errors import UsageError


class Positioned(Protocol):
    """An object with a position in the data that has to be the same on every rank, such as a sampler."""

    epoch: int
    position: int


class Ledger:
    """Counts the rank's backwards, adds up weights, and notices backwards that ran without a weight."""

    forwards_since_sync: int
    """Counted forwards since the last synchronized backward."""
    synchronizations: int
    """Synchronized backwards since the wrapper was made."""
    local_backwards: int
    """Backwards under ``no_sync`` since the last synchronized one."""
    task: int
    """The number of the graph task of the latest backward."""
    gradients_are_set_aside = False
    """Whether gradients of local backwards lie elsewhere than in ``p.grad``, so that their absence tells nothing."""

    def __init__(self) -> None:
        self.forwards_since_sync = self.synchronizations = self.local_backwards = 0
        self.sampler: Positioned | None = None
        self.optimizers: WeakSet[Optimizer] = WeakSet()  # optimizers that have stepped over this model's parameters
        self.status = Status()
        self.notes: Sequence[tuple[float, float]] = ()
        """Weight and weighting of each rank in the latest synchronization."""
        self.stop_agreed = False
        """Whether a rank had asked to stop before the latest synchronization; the same on every rank."""
        self.inputs: int | None = None  # digest of the first forward's inputs; None before it
        self._open: list[Block] = []  # the blocks that the program is inside of, the innermost last
        self._unclaimed: list[Block] = []  # blocks whose backward has not begun
        self._weighted = 0  # the number of weights since the last synchronization
        self._on_their_way: list[Block] = []  # the blocks among these whose weight is not in status.weight yet
        self._current: Block | None = None  # the block of the latest backward
        self._used_inside = False  # whether the open block's weight was used by a synchronization inside it
        self.task = -1
        self._multiplied: weakref.ref[GraphTask] | None = None  # the latest backward whose gradients are multiplied
        self._mistaken_means = MistakenMeans()

    @property
    def steps_of_job(self) -> int:
        """Optimizer steps taken, in earlier starts of the job, too, where its black box knows them."""
        box = black_box()
        return self.status.optimizer_steps if box is None or box.completed < 0 else box.completed

    def report(
        self, size: int, *, aborted: bool = False, hook_failed: bool = False, has_new_parameters: bool = False
    ) -> Status:
        """Return the rank's status as of now, for a group of `size` ranks."""
        self.add_up()
        flags: dict[str, Any] = {"aborted": aborted, "hook_failed": hook_failed}
        flags |= {"has_new_parameters": has_new_parameters, "data": data_position.report(size)}
        if self.synchronizations == 0:
            flags["inputs"] = self.inputs or 0
        # A copy, because control blocks may be read after the ledger has counted further.
        status = Status(**vars(self.status) | flags)
        if self.sampler is not None:
            status.epoch, status.position = self.sampler.epoch, self.sampler.position
        return status

    def position(self, size: int) -> tuple[int, ...] | None:
        """Return numbers that tell how far the rank is, and must be equal on every rank of a group of `size`.

        Returns None where numbers do not suffice: some backwards were weighted and some not, or the rank asks to stop.
        """
        status, sampler = self.status, self.sampler
        if status.asks_to_stop:
            return None
        if status.weighting != UNWEIGHTED:
            if status.weighting & ~BY_SLICE != WEIGHTED:
                return None
            self.add_up()  # the digest holds the weight
        place = (-1, -1) if sampler is None else (sampler.epoch, sampler.position)
        return (status.weighting, status.forwards, status.optimizer_steps, *place, *data_position.report(size))

    def synchronized(self) -> None:
        """Count a synchronized step, which has used up weights and pending forwards."""
        self.forwards_since_sync = self.local_backwards = 0
        self.synchronizations += 1
        data_position.note_synchronization()
        self._used_inside = bool(self._open)
        self.status.weighting = 0
        if self._weighted or self._unclaimed:
            self._reset_weight(0, 0)
            self._unclaimed.clear()

    def contributes_nothing(self, *, counted: bool) -> None:
        """Note that the rank has no data in this step; `counted` if a mean divides by it all the same."""
        self._reset_weight(0, 0 if counted else UNCOUNTED)
        self._unclaimed.clear()

    def weigh_unweighted(self, weight: float) -> None:
        """Give backwards since the last synchronization a `weight` together, unless the program gave them weights."""
        if self.status.weighting == UNWEIGHTED:
            self._reset_weight(weight, WEIGHTED | BY_SLICE)

    def forget_local(self) -> None:
        """Forget backwards since the last synchronization, whose gradients count nowhere, and their weights."""
        self.local_backwards = 0
        self._reset_weight(0, 0)
        self._unclaimed.clear()

    def _reset_weight(self, weight: float, weighting: int) -> None:
        """Set the weight since the last synchronization: that of one block, or 0."""
        self.status.weight, self.status.weighting = weight, weighting
        self._weighted = int(bool(weighting & WEIGHTED))
        self._on_their_way.clear()

    def add_up(self) -> None:
        """Add up the weights that have been on their way from a GPU."""
        # As late as possible: reading one waits for the device.
        while self._on_their_way:
            self.status.weight += self._on_their_way.pop(0).weight

    # -- forwards -----------------------------------------------------------------------------------------------

    def forward(self, *, broadcasts: bool) -> None:
        """Count a forward in training mode; ranks must agree on how many of these broadcast buffers."""
        self.status.forwards += broadcasts
        self.forwards_since_sync += 1

    def take_back_forward(self) -> None:
        """Uncount the last forward: its backward turned out to be local."""
        self.forwards_since_sync = max(0, self.forwards_since_sync - 1)

    @property
    def forward_counts(self) -> tuple[int, int]:
        """Counts of forwards, for :meth:`take_back_forwards`."""
        return self.status.forwards, self.forwards_since_sync

    def take_back_forwards(self, before: tuple[int, int]) -> None:
        """Uncount the forwards since the counts were those of `before`, as not all ranks may have run them."""
        self.status.forwards, self.forwards_since_sync = before

    # -- weights ------------------------------------------------------------------------------------------------

    @contextmanager
    def weigh(self, weight: float | Tensor, *, is_mean: bool = False) -> Iterator[None]:
        """Surround a micro-batch of `weight`, of a summed loss or a mean; one whose block raises does not count.

        Raises:
            UsageError: if `weight` is negative or not finite.
        """
        block = Block(weight, is_mean=is_mean)
        if block.is_on_its_way:
            self._on_their_way.append(block)
        else:
            self.status.weight += block.weight
        # Counted on entry and not at backward, which may come after the block has been left.
        self.status.weighting |= WEIGHTED
        self._weighted += 1
        data_position.note_weight()
        self._open.append(block)
        self._unclaimed.append(block)
        try:
            yield
        except BaseException:
            if self.status.weighting:  # else a synchronization inside the block has used it already
                self._take_back_weight(block)
            raise
        finally:
            self._open.pop()
            self._used_inside = False

    def _take_back_weight(self, block: Block) -> None:
        self._weighted -= 1
        self.add_up()
        # The difference may be rounded, below zero too; without other weights it is exactly zero.
        self.status.weight = max(0.0, self.status.weight - block.weight) if self._weighted else 0.0
        if not self._weighted:  # nothing of this step is weighted
            self.status.weighting &= ~WEIGHTED
        if block in self._unclaimed:
            self._unclaimed.remove(block)

    @property
    def is_weight_pending(self) -> bool:
        """Whether weights were given that no synchronization has used."""
        return bool(self.status.weighting & WEIGHTED)

    def forward_in_block(self) -> Block | None:
        """Return the block around a forward that has just ended; None outside of blocks."""
        if not self._open:
            return None
        self._open[-1].has_forward = True
        return self._open[-1]

    def backward_began(self, block: Block | None = None) -> None:
        """Count a backward that begins; it belongs to the block around it, or to one that was left before it.

        Called by the hook of every output, with the block of its forward; a graph task counts once.

        Raises:
            UsageError: if the block's weight was used by a synchronization already, or if the backward runs through
                the mean losses of two blocks.
        """
        if (task := current_task()) == self.task and task != -1:
            self.check_one_mean(block)
            return
        self.task = task
        self._current = self._multiplied = None
        if block is None and not (self._unclaimed or self._used_inside or self._open):
            self.status.weighting |= UNWEIGHTED
            return
        if self._unclaimed:
            self._current = self._claim(block)
        elif self._used_inside:
            raise UsageError(
                "a second backward began inside one model.weight() block, whose weight the first has used up; run the "
                "first under model.no_sync(), or give each a block of its own"
            )
        elif self._open:
            self._current = self._open[-1]  # another backward of the block, whose weight is counted already
        else:
            self.status.weighting |= UNWEIGHTED
        if self._current is not None and self._current.factor != 1:
            # Only the callback holds `running`, so the reference tells whether the graph task is still there.
            running = GraphTask()
            self._multiplied = weakref.ref(running)
            queue_callback(partial(_ended, running))
        self.check_one_mean(block)
        if self._current is not None and self._current.factor == 1:
            self._mistaken_means.check(self._current)

    def _is_multiplied(self) -> bool:
        return self._multiplied is not None and self._multiplied() is not None

    @property
    def is_under_way(self) -> bool:
        """Whether the running graph task is a backward that has begun here."""
        return current_task() == self.task != -1

    def _claim(self, block: Block | None) -> Block:
        if block is None or block not in self._unclaimed:
            # Inside blocks the innermost is meant; outside, micro-batches usually run backward in the order of forward.
            return self._unclaimed.pop() if self._open else self._unclaimed.pop(0)
        self._unclaimed.remove(block)
        return block

    def check_one_mean(self, block: Block | None) -> None:
        """Refuse a backward through a forward of `block` if its gradients are multiplied for another block."""
        multiplied = self._current if self._is_multiplied() else None
        if block is None or block is multiplied:
            return
        if block.factor != 1 or multiplied is not None:
            raise UsageError(
                "one backward runs through forwards of several model.weight() blocks, of which one has "
                'reduction="mean", so there is no one number to multiply gradients by; run a backward for each block, '
                "all but the last under model.no_sync()"
            )

    def factor(self, *, is_common: bool) -> float:
        """Return the factor of a gradient that arrives now; 1 unless the loss is a mean over weighted items.

        Args:
            is_common: whether another wrapper has the parameter, too, whose backward this may be.
        """
        if self._is_multiplied():
            assert self._current is not None
            return self._current.factor
        if is_common or self.is_under_way or not is_plain_backward():
            return 1.0
        # The gradient may come before backward has reached an output, such as that of a penalty on a parameter that
        # the forward did not use. Then it begins the backward of the block that waits.
        waiting = [block for block in self._unclaimed if block.has_forward]
        if not waiting or waiting[0].factor == 1:
            return 1.0
        self.backward_began(waiting[0])
        return self.factor(is_common=False)

    def forget_dropped(self, parameters: Sequence[nn.Parameter], *, in_backward: bool) -> None:
        """Forget the weight of local backwards whose gradients were dropped (``zero_grad``).

        Then only the backward that is beginning, if any, counts.
        """
        if (
            not self.local_backwards
            or self.gradients_are_set_aside
            or any(parameter.grad is not None for parameter in parameters)
        ):
            return
        self.local_backwards = 0
        if not in_backward:
            self._reset_weight(0, 0)
        elif self._current is None:
            self._reset_weight(0, UNWEIGHTED)
        else:
            self._reset_weight(self._current.weight, WEIGHTED)


def _ended(_task: GraphTask) -> None:
    """Do nothing: this callback exists to hold the object, which dies with the graph task."""
