"""The ledger: counts of this rank's steps, which the control block reports to the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any

from torch import Tensor, nn

from paceline.core import data_position
from paceline.core.spans import recorder
from paceline.core.torch_internals import current_task, queue_callback
from paceline.ddp.control_block import NO_DATA, OptimizerSettings, Status
from paceline.ddp.weights import (
    BY_SLICE,
    UNCOUNTED,
    UNWEIGHTED,
    WEIGHTED,
    Block,
    Blocks,
    KeptGradients,
    LocalGradients,
    MistakenMeans,
)


class Ledger:
    """Counts the rank's backward passes, adds up weights, and detects backward passes that ran without a weight."""

    forwards_since_sync: int
    """Number of counted forward passes since the last synchronized backward pass."""
    synchronizations: int
    """Number of synchronized backward passes since the wrapper was created."""
    local_tasks: list[int]
    """Ids of the graph tasks of the backward passes under ``no_sync`` since the last synchronized one."""
    task: int
    """Id of the graph task of the latest backward pass."""
    in_local_steps = False
    """Whether the program is inside ``local_steps``, so optimizers may step on gradients that were not averaged."""
    stepped_task = -1
    """Id of the graph task of the latest backward pass whose local gradients an optimizer has used."""
    is_on_empty_slice = False
    """Whether the running forward pass is over a batch that has no samples on this rank."""
    has_peers = False
    """Whether gradients are averaged over several ranks."""
    compare_at: float = inf
    """Number of synchronizations after which this rank requests the next comparison of the replicas."""
    compares_out_of_turn = False
    """Whether this rank requests that comparison earlier than the other ranks expect."""
    gradients_are_set_aside = False
    """Whether local gradients are kept outside ``p.grad``; if so, ``p.grad is None`` does not mean that they were
    dropped."""

    def __init__(self) -> None:
        self.forwards_since_sync = self.synchronizations = 0
        self.local_tasks = []
        self.status = Status()
        self.settings = OptimizerSettings()
        self.notes: Sequence[tuple[float, float]] = ()
        """Weight and weighting of each rank in the latest synchronization."""
        self.stop_agreed = False
        """Whether any rank had asked to stop before the latest synchronization; the same on every rank."""
        self.inputs: int | None = None  # digest of the first forward's inputs; None until then
        self.blocks = Blocks()
        self._counted: list[Block] = []  # blocks of the backward passes since the last synchronization
        self.kept = KeptGradients()
        """Keeps gradients from before the current step."""
        self._local_gradients = LocalGradients()
        self.current: Block | None = None
        """Block of the latest backward pass."""
        self.task = -1
        self._other_backwards = 0  # number of times that other backward passes ran in between
        self._mistaken_means = MistakenMeans()

    @property
    def steps_of_job(self) -> int:
        """Optimizer steps of the whole job; includes steps before a restart if the black box recorded them."""
        box = recorder.box
        return self.status.optimizer_steps if box is None or box.completed < 0 else box.completed

    def report(self, size: int, **flags: bool) -> Status:
        """Return the rank's current status, with these `flags`, for a group of `size` ranks."""
        self.add_up()
        compares = self.synchronizations >= self.compare_at
        data, settings = data_position.report(size), self.settings.digest()
        values: dict[str, Any] = {"compares": compares, "data": data, "settings": settings}
        if self.synchronizations == 0:
            values["inputs"] = self.inputs or 0
        # A copy, because control blocks may be read after the ledger has counted further.
        return Status(**vars(self.status) | values | flags)

    def position(self, size: int) -> tuple[int, ...] | None:
        """Return the numbers that describe this rank's progress and must be equal on all `size` ranks of the group.

        Returns None if these numbers are not enough: some backward passes were weighted and others not, or the rank
        asks to stop or to compare replicas.
        """
        status = self.status
        if status.asks_to_stop or self.synchronizations >= self.compare_at:
            return None
        if status.weighting != UNWEIGHTED:
            if status.weighting & ~BY_SLICE != WEIGHTED:
                return None
            self.add_up()  # the digest holds the weight
        numbers = status.weighting, status.forwards, status.optimizer_steps, self.settings.digest()
        return (*numbers, *(data_position.report(size) if data_position.taken.sources else NO_DATA))

    def status_at(self, position: tuple[int, ...]) -> Status:
        """Return the status that this rank had when :meth:`position` returned `position`; without its weight."""
        weighting, forwards, optimizer_steps, settings, *data = position
        origin = data_position.Origin(*data[: len(data_position.Origin._fields)])  # the rest are absent parameters
        return Status(forwards, optimizer_steps, weighting=weighting, settings=settings, data=origin)

    def synchronized(self) -> None:
        """Count a synchronized step, which consumes the weights and the pending forward passes."""
        self.forwards_since_sync = 0
        if self.local_tasks:
            self.local_tasks.clear()
            self._local_gradients.forget()
        self.synchronizations += 1
        data_position.taken.sources.clear()
        data_position.taken.synchronizations += 1
        self.status.weighting = 0
        self.blocks.unused.clear()
        if self._counted or self.kept.found is not None:
            self._count_only([], 0)

    def stepped_locally(self) -> None:
        """Record that an optimizer uses the local gradients of all earlier backward passes."""
        if self.local_tasks:
            self.stepped_task = self.local_tasks[-1]
            del self.local_tasks[:-1]  # kept until the gradients are dropped, which a program may never do

    @property
    def is_accumulating(self) -> bool:
        """Whether there was a local backward pass whose gradients were neither averaged nor used by an optimizer."""
        return bool(self.local_tasks) and self.local_tasks[-1] != self.stepped_task

    def contributes_nothing(self, *, counted: bool) -> None:
        """Record that the rank has no data in this step; `counted` if the mean's divisor still includes the rank."""
        self._count_only([], 0 if counted else UNCOUNTED)

    def count_slices(self, slices: int) -> None:
        """Give each of this rank's `slices` non-empty slices a weight of 1, unless the program sets weights."""
        # A rank that skipped all of its slices does not know whether the other ranks use weights.
        if self.status.weighting in (0, UNWEIGHTED):
            is_skipped = not self.status.weighting
            self._count_only([Block(slices)], BY_SLICE if is_skipped else WEIGHTED | BY_SLICE)

    def forget_local(self) -> None:
        """Forget the backward passes since the last synchronization and their weights; gradients will not be used."""
        self.local_tasks.clear()
        self._count_only([], 0)

    def _count_only(self, blocks: Sequence[Block], weighting: int) -> None:
        """Discard all weights since the last synchronization except the weights of `blocks`."""
        self._counted = [*blocks]
        self.kept.forget()
        self._local_gradients.forget()
        self.status.weight, self.status.weighting = 0.0, weighting

    def add_up(self) -> None:
        # Done as late as possible, because reading a weight from a GPU waits for the device.
        self.status.weight = self._total_weight()

    def _total_weight(self) -> float:
        return sum((block.weight for block in self._counted if not any(drop() for drop in block.drops)), 0.0)

    # -- forwards -----------------------------------------------------------------------------------------------

    def take_back_forward(self) -> None:
        """Uncount the last forward pass, because its backward pass turned out to be local."""
        self.forwards_since_sync = max(0, self.forwards_since_sync - 1)

    @property
    def forward_counts(self) -> tuple[int, int]:
        """The counts of forward passes, to pass to :meth:`take_back_forwards`."""
        return self.status.forwards, self.forwards_since_sync

    def take_back_forwards(self, counts: tuple[int, int]) -> None:
        """Reset the counts of forward passes to `counts`, because later ones may not have run on all ranks."""
        self.status.forwards, self.forwards_since_sync = counts

    # -- weights ------------------------------------------------------------------------------------------------

    @contextmanager
    def weigh(self, weight: float | Tensor) -> Iterator[None]:
        """Give `weight` to the micro-batch inside the ``with`` block, unless the block raises an exception."""
        block = Block(weight)
        try:
            with self.blocks.inside(block):
                yield
        except BaseException:
            if block in self._counted:
                self._counted.remove(block)
                if not self._counted:  # no backward pass of this step is weighted
                    self.status.weighting &= ~WEIGHTED
            raise

    @property
    def is_weight_pending(self) -> bool:
        """Whether weights are waiting for the next synchronization."""
        return bool(self.status.weighting & WEIGHTED)

    def count_unused_blocks(self, local_gradient: Callable[[], str | None]) -> None:
        """Count unused blocks if all gradients that ``sync_gradients()`` will average bypassed the wrapper."""
        if not (self._counted or self.local_tasks or self.gradients_are_set_aside):
            unused = self.blocks.without_forward()
            if unused and local_gradient() is not None:
                for block in unused:
                    self._count(block)

    def backward_began(self, block: Block | None = None, *, is_empty: bool = False) -> None:
        """Count a backward pass that is starting, and the weight of its block.

        The block is the one around its forward pass (`block`), else the block around the backward pass, else a block
        that was exited between the two. This method is called by the hook of every output, but counts a graph task only
        once. If `is_empty`, the rank has no samples in this backward pass, and a weight counts as 0.
        """
        if (task := current_task()) == self.task and task != -1:
            self.backward_goes_on(block)
            return
        if task != self.task + 1 and self.task != -1:
            self.note_other_backward()
        self.task = task
        self.current = None
        blocks = self.blocks
        if block is not None or blocks.open or blocks.unused:
            block = blocks.of_backward(block)
        if block is None:
            self.status.weighting |= UNWEIGHTED
            return
        if is_empty:
            block.is_claimed, block = True, Block(0.0)
            self.kept.found = None  # all existing gradients are kept, because this backward pass adds none
        self.current = block
        self._count(block)
        self._mistaken_means.check(block)

    def note_other_backward(self) -> None:
        """Request a comparison of the replicas in the next step, after a backward pass that this wrapper did not see.

        That backward pass may have added a different gradient to the averages on each rank, making the weights drift
        apart. A program may run one in every step, so only the 1st, 2nd, 4th, 8th, … such pass requests a comparison.
        """
        self._other_backwards += 1
        is_due = self._other_backwards & (self._other_backwards - 1) == 0
        if is_due and self.synchronizations + 1 < self.compare_at < inf:
            self.compare_at, self.compares_out_of_turn = self.synchronizations + 1, True

    def backward_goes_on(self, block: Block | None) -> None:
        """Count the weight of another block when the running backward pass reaches an output of its forward."""
        if block is not None:
            block = self.blocks.of_backward(block)
        if block is not None and block not in self._counted:
            self.kept.check_no_more()
            self._count(block)

    def begin_local(self, block: Block | None, parameters: Sequence[nn.Parameter]) -> None:
        """Count a backward pass under ``no_sync``; called by the hook of every output that it reaches."""
        self.backward_began(block)
        if self.local_tasks[-1:] != [self.task]:
            self.forget_dropped(parameters, in_backward=True)
            self.local_tasks.append(self.task)

    def keep_gradients(
        self, names: Sequence[str], parameters: Sequence[Tensor], elsewhere: Collection[int] = (), *, is_last: bool
    ) -> None:
        """Preserve the contents of ``p.grad`` from before the step if the backward pass that is starting is weighted.

        `elsewhere` lists the parameters that another wrapper averages in this backward pass. `is_last` means that it is
        synchronized.
        """
        if self.status.weighting & WEIGHTED:
            self.kept.multiply(names, parameters, self._total_weight, elsewhere, is_last=is_last)
            if not (is_last or self.gradients_are_set_aside):
                queue_callback(partial(self._local_gradients.record, parameters))

    def _count(self, block: Block) -> None:
        block.is_claimed = True
        block.drops.clear()
        if block not in self._counted:
            self._counted.append(block)
            self.status.weighting |= WEIGHTED
            data_position.taken.weights += 1

    def forget_dropped(self, parameters: Sequence[nn.Parameter], *, in_backward: bool) -> None:
        """Forget the weights of local backward passes whose gradients were dropped (``zero_grad``).

        A backward pass that is just starting still counts.
        """
        if not self.local_tasks or self.gradients_are_set_aside:
            return
        dropped = self._local_gradients.are_dropped(parameters)
        if callable(dropped):
            if in_backward and self.status.weighting == WEIGHTED and not self.kept.copies:
                # On a GPU, this is asked when the weights are added up, so that micro-batches do not wait.
                for block in self._counted:
                    if block is not self.current:
                        block.drops.append(dropped)
                return
            dropped = dropped()
        if not dropped:
            return
        self.local_tasks.clear()
        if not in_backward:
            self._count_only([], 0)
        elif self.current is None:
            self._count_only([], UNWEIGHTED)
        else:
            self._count_only([self.current], WEIGHTED)
