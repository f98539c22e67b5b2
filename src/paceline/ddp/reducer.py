"""The reducer: averages gradients over the ranks while backward is still running.

Training steps are in :mod:`.step`. This module creates the reducer, changes it between steps, and averages without a
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from paceline.core.torch_internals import Accumulators, class_never_compiled, has_nonzero
from paceline.ddp import abort
from paceline.ddp.arrivals import Arrivals, check_equal_gradients, present
from paceline.ddp.averages import Averages
from paceline.ddp.backward import Backward, PendingForwards, Phase
from paceline.ddp.buckets import BucketSet
from paceline.ddp.buffers import BufferSync
from paceline.ddp.channel import Channel, ExposedTime
from paceline.ddp.control_block import ControlBlock
from paceline.ddp.digest import StatusDigest, width
from paceline.ddp.exchange import LateReading, patience
from paceline.ddp.extension_points import Extension, Extensions
from paceline.ddp.finisher import AllReduce, Finisher, TreeSums
from paceline.ddp.ledger import Ledger
from paceline.ddp.module_changes import Change, ModuleWatch, Named, OnChange, Trained, find_refusal
from paceline.ddp.options import Options
from paceline.ddp.step import Step
from paceline.ddp.weights import UNWEIGHTED
from paceline.errors import CommunicationError, UsageError


@class_never_compiled
class Reducer(Step):
    """Owns the buckets of one wrapper and runs each synchronized backward pass from start to end.

    Args:
        named: the parameters to average.
        watch: detects changes of the module's parameters.
        on_change: called as ``on_change(named, averaged)`` if there are new parameters, with all parameters to average
            and whether they are averaged already.
        channel: the connection to the other ranks.
        ledger: counts this rank's backward passes and weights.
        buffers: broadcasts buffers at the end of backward passes.
        options: the wrapper's options.
    """

    checks_finite: bool
    """Whether gradients are checked for NaN and Inf."""
    virtual_ranks = 0
    """Number of slices over which a step's gradient is summed in a fixed tree; 0 for an ordinary step."""

    def __init__(
        self,
        named: Named,
        watch: ModuleWatch,
        on_change: OnChange,
        channel: Channel,
        ledger: Ledger,
        buffers: BufferSync,
        options: Options,
    ) -> None:
        self.channel, self.ledger, self.buffers = channel, ledger, buffers
        self.checks_finite = options.check_finite
        self.trained, self.watch, self._on_change = Trained(named), watch, on_change
        sparse = watch.sparse(self.trained.originals)
        names, parameters = self.trained.names, self.trained.parameters
        # Not on GPUs: to read the tail, the host would have to wait for all work queued on the device.
        tail = width(channel.size) if channel.host is channel else 0
        self.buckets = BucketSet(names, parameters, options.capacities, channel, sparse, options.reduce_dtype, tail)
        self.digest = StatusDigest(channel.rank, channel.size)
        self.late_reading = LateReading(is_wanted=channel.host is not channel, patience=patience())
        self.finisher: Finisher = AllReduce(channel, ledger)
        self.exposed_time = ExposedTime(parameters[0].device if parameters else torch.device("cpu"))
        self.forwards = PendingForwards(ledger, self.backward_reached)
        self.extensions = Extensions([])
        self._make_parts()
        self.number = abort.register(self)

    def _make_parts(self) -> None:
        """Create the parts that depend on the current parameters."""
        trained = self.trained
        self.control = ControlBlock(trained.names, self.channel.rank, self.channel.size, self.channel.host.allocate)
        self.averages = Averages(trained, self.buckets)
        self.arrivals = Arrivals(trained.parameters, self.gradient_arrived)
        self.arrivals.use_layout(self.buckets.layout, order_known=False)
        # Install hooks from the start, to detect a gradient that arrives before any backward pass reaches an output.
        self.arrivals.begin(grads_were_none=True)
        self._place_digest()
        self._accumulators = Accumulators(trained.originals)

    def extend(self, extensions: Sequence[Extension]) -> None:
        """Use `extensions` from now on, called in this order."""
        self.extensions = Extensions(extensions)

    # -- changes between two steps ------------------------------------------------------------------------------

    def follow_module(self) -> None:
        """Switch to the module's current parameters once all ranks agree on them; called before a step begins."""
        if (change := self._detect_change()) is not None:
            self._take_in(change)

    def follow_module_on_all_ranks(self) -> None:
        """Do the same as a collective that all ranks call, for when some ranks will not run a backward pass."""
        change = self._detect_change()
        row = torch.tensor(int(change is not None), device="cpu")
        if self.channel.gathered_rows(row, "comparison of the module's parameters").any():
            self._take_in(change or self.watch.unchanged())

    def _take_in(self, change: Change) -> None:
        for extension in self.extensions.all:
            extension.check_change()
        try:
            self._announce_change()
            refusal = find_refusal(change, self.channel, self.finisher, self.exposed_time.device)
            if refusal is None:
                self._rebuild(change.named)
        except BaseException:
            # The other ranks have rebuilt their buckets or are waiting for this rank, so refuse any further use of this
            # wrapper.
            self.backward = Backward(sends_block=True)
            self.backward.enter(Phase.BROKEN)
            abort.unfinished.add(self.number)
            raise
        if refusal is not None:
            raise refusal

    @torch.no_grad()
    def _announce_change(self) -> None:
        """Run the collectives of a backward pass on zeros, and report the change in the control block."""
        self.channel.check_open()
        backward = Backward(sends_block=True)
        backward.absent = range(len(self.trained.names))
        memories = []
        for number, bucket in enumerate(self.buckets.buckets):
            # In separate memory, because the bucket may hold gradients.
            memory = self.channel.allocate(bucket.memory.numel(), bucket.memory.dtype, bucket.memory.device)
            size = bucket.flat.numel()
            zeros = replace(bucket, memory=memory, flat=memory[:size], tail=memory[size:])
            backward.launched.append(self.finisher.launch(zeros, number))
            memories.append(memory)
        self.buffers.launch()
        self._launch_block(backward, has_new_parameters=True)
        self._wait_for(backward, backward.block)
        self.buffers.wait()
        for memory in memories:
            self.channel.free(memory)

    def _rebuild(self, named: Named) -> None:
        self.arrivals.close()
        self.trained.release()
        self.watch.follow(named)
        self._on_change(named, True)
        self.trained.use(named)
        sparse = self.watch.sparse(self.trained.originals)
        self.buckets.use_parameters(self.trained.names, self.trained.parameters, sparse)
        self.channel.host.free(self.control.vector)
        self._make_parts()
        self.extensions.parameters_changed()

    def bucket_bytes(self) -> list[int]:
        return [bucket.flat.nbytes for bucket in self.buckets.buckets]

    def named_layout(self) -> list[list[str]]:
        """Return the names of the parameters in each bucket, in the order of launch."""
        return self.buckets.named_layout()

    def restore_layout(self, layout: list[list[str]]) -> None:
        """Use the layout from a checkpoint, given as parameter names, instead of observing the order of arrival.

        A layout of other parameters than the module's current ones has no effect.
        """
        self.resync_aborted()
        self.follow_module_on_all_ranks()  # first, because the layout was saved after the same change
        if self.buckets.use_named(layout):
            self.arrivals.observed = []  # the layout now defines the order of arrival
            self._follow_layout()

    def check_finite(self, enabled: bool) -> None:
        """Turn the check of gradients for NaN and Inf on or off, starting with the next backward pass."""
        self.checks_finite = enabled
        self.extensions.is_stale = True

    def use_virtual_ranks(self, count: int, slices: Extension, before: Extension) -> None:
        """Sum over `count` slices in one tree, starting with the next backward pass.

        The extension `slices` sums this rank's part, and is called before the extension `before`.
        """
        self.virtual_ranks = count
        sums = None if self.channel.size <= 2 or self.channel.sums_in_tree else TreeSums(self.channel)
        # No prescaling: with it, the rounding of values near the dtype's smallest would depend on the number of ranks.
        self.use_finisher(partial(AllReduce, ledger=self.ledger, sums=sums, prescales=False))
        others = self.extensions.all
        place = others.index(before)
        self.extend([*others[:place], slices, *others[place:]])

    def use_finisher(self, make: Callable[[Channel], Finisher]) -> None:
        """Use the finisher returned by `make`, starting with the next backward pass. All ranks call this."""
        self.resync_aborted()
        self.finisher = make(self.channel)
        self._place_digest()

    def connected(self) -> Reducer:
        return self

    def close(self) -> None:
        """Remove the hooks from the parameters, and drop references to the reducer."""
        self.arrivals.close()
        self.trained.release()
        self.extensions.close()
        self.extensions = Extensions([])
        self.forwards.close()
        if (backward := self.backward) is not None:
            backward.task = None
            if backward.phase is Phase.UNREAD and backward.exchange is not None:
                backward.exchange.close()
                if backward.block is not None:
                    self.channel.abandon(backward.block)
            elif backward.phase is Phase.ABORTED:  # its owed collectives cannot be run, because the channel closes
                self.backward = None
        abort.unregister(self.number)

    # -- without a backward ---------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Average the gradients in ``p.grad`` now, without a backward pass; a missing gradient counts as zero."""
        self.resync_aborted()
        self.follow_module()
        self.ledger.forget_dropped(self.trained.parameters, in_backward=False)
        self.ledger.count_unused_blocks(self.local_gradient)
        self.begin()
        if not self.ledger.status.weighting and any(map(has_nonzero, present(self.trained.parameters).values())):
            self.ledger.status.weighting = UNWEIGHTED  # no weights would divide these gradients
        self.complete()

    def launch_all(self) -> None:
        """Begin to average the gradients in ``p.grad``; :meth:`complete` finishes the averaging."""
        # If buckets are launched at the end, leave this to complete(): other ranks' layers may announce collectives
        # first.
        if not self.begin().launches_at_end:
            self.advance()

    def read_late(self) -> None:
        """Read the other ranks' control blocks of the last backward pass, in all wrappers with unread blocks."""
        if abort.unfinished:
            abort.read_all()  # for all wrappers, so that all ranks read in the same order

    def resync_aborted(self) -> None:
        """In all wrappers, run the collectives that other ranks are still waiting for after an exception."""
        if self.backward is not None and self.backward.phase is Phase.BROKEN:
            raise CommunicationError(
                f"rank {self.channel.rank}: an earlier step of this model failed partway, so the ranks are out of "
                "step; start again from the last checkpoint"
            )
        if abort.unfinished:
            abort.resync_all()
            abort.read_all()

    # -- checks -----------------------------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Raise if a backward pass has not ended."""
        abort.notice_exception(self)
        if self.backward is not None and self.backward.phase is not Phase.UNREAD:
            raise UsageError(f"rank {self.channel.rank}: the backward pass has not ended: {self.backward.phase.value}")

    def check_equal(self) -> None:
        self.resync_aborted()
        self.check_idle()
        check_equal_gradients(self.trained.names, self.trained.parameters, self.channel)

    def local_gradient(self) -> str | None:
        """Return the name of a parameter whose gradient the wrapper has not averaged; None if there is none."""
        return self.averages.local_gradient()
