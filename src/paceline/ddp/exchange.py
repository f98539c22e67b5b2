"""The exchange of control blocks, which ends a backward pass if ranks have more to report than a digest.

    6. launch the block ──► 7. wait, and read it ──► 8. extensions act on the ranks' reports
                                                  ──► 9. averages are published, and errors are raised

All ranks exchange blocks in the same backward passes: if digests do not agree, in the first steps, for some steps after
a surprise, and if buckets carry no digest.

With gradients on GPUs, ranks exchange blocks in every step and read them late, so that no rank waits for them during
backward. Averages are published as soon as buckets are reduced. The blocks are read the next time gradients are
accessed, usually by the optimizer step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

from torch import Tensor

from paceline.core.spans import CONTROL, WAIT, recorder
from paceline.core.torch_internals import class_never_compiled
from paceline.ddp.arrivals import Arrivals
from paceline.ddp.averages import Averages, EarlyAverages
from paceline.ddp.backward import Backward, Phase
from paceline.ddp.buckets import BucketSet, arrival_order
from paceline.ddp.buffers import BufferSync
from paceline.ddp.channel import TEST_HOST_CHANNEL, Channel, ExposedTime, Launched, Pausing
from paceline.ddp.control_block import ControlBlock, Status
from paceline.ddp.digest import StatusDigest
from paceline.ddp.extension_points import Exchanged, Extensions
from paceline.ddp.finisher import CONTROL_EXCHANGE, Finisher
from paceline.ddp.ledger import Ledger
from paceline.ddp.module_changes import ModuleWatch, Trained, find_refusal
from paceline.ddp.weights import UNWEIGHTED, compute_scale

logger = logging.getLogger(__name__)
USUAL_STEPS = 16
"""Number of blocks without a surprise that must follow a block with one before blocks are read late again."""
_NOTHING: Mapping[int, Tensor] = MappingProxyType({})


def patience() -> int:
    """Return the number of unsurprising blocks required before late reading; 0 in tests that always read late."""
    return 0 if os.environ.get(TEST_HOST_CHANNEL) == "always" else USUAL_STEPS


class LateReading:
    """Decides from earlier blocks whether the next one may be read late; the decision is the same on all ranks.

    A block with a surprise (a late delta, a sparse gradient, an exception on another rank) requires more collectives.
    If one rank ran them at the end of its backward pass and another at its optimizer step, the two could wait for each
    other forever if the training loop has a collective in between. So the decision depends only on blocks of earlier
    steps, which every rank has read.

    Args:
        is_wanted: whether blocks use a separate channel from the gradients, so that reading late is worthwhile.
        patience: number of blocks without a surprise required after one with a surprise; 0 to always read late.
    """

    is_quiet: bool
    """Whether the latest blocks had no surprise, so that none is expected in the next one."""

    def __init__(self, *, is_wanted: bool, patience: int = USUAL_STEPS) -> None:
        self._is_wanted, self._patience = is_wanted, patience
        # Number of unsurprising blocks still required. The first block is read immediately, to get the order of
        # arrival.
        self._missing = min(1, patience)
        self.is_quiet = self._missing == 0

    @property
    def is_allowed(self) -> bool:
        """Whether the next block may be read late, on every rank."""
        return self._is_wanted and self.is_quiet

    def note(self, *, is_usual: bool) -> None:
        """Record that a block was read; `is_usual` if it had no surprise."""
        self._missing = max(0, self._missing - 1) if is_usual else self._patience
        self.is_quiet = self._missing == 0


@class_never_compiled
class Exchange:
    """The part of the reducer that exchanges control blocks; the attributes below are provided by the reducer."""

    trained: Trained
    """The averaged parameters."""
    watch: ModuleWatch
    """Detects changes of the module's parameters."""
    buckets: BucketSet
    """The buckets with the parameters' gradients."""
    arrivals: Arrivals
    """Tracks which gradients have arrived."""
    averages: Averages
    """The averages published in ``p.grad``."""
    extensions: Extensions
    """The rare cases."""
    channel: Channel
    """The connection to the other ranks."""
    ledger: Ledger
    """Counts this rank's backward passes and weights."""
    buffers: BufferSync
    """Broadcasts buffers at the end of backward passes."""
    finisher: Finisher
    """Averages buckets over the ranks."""
    digest: StatusDigest
    """The digest in the tail of the last bucket, which determines whether control blocks must be exchanged."""
    control: ControlBlock
    """The control block of this rank."""
    late_reading: LateReading
    """Decides from earlier steps whether blocks are launched regardless of digests, and whether they are read late."""
    exposed_time: ExposedTime
    """The total time that backward passes have waited for communication."""
    launches_at_end: bool
    """Whether buckets are launched after backward has ended rather than as they fill."""
    overlapped_buckets: int
    """The number of buckets that may be launched before backward has ended: all except the digest's bucket."""
    digest_in: int | None
    """Number of the bucket that carries the digest, which is the last one; None if no digests are sent."""

    # -- 6. launch ----------------------------------------------------------------------------------------------

    def _launch_block(self, backward: Backward, *, has_new_parameters: bool = False) -> None:
        """Launch the control block with this rank's report. All ranks call this."""
        observed, cut_short = self.arrivals.observed, backward.is_cut_short
        # Rank 0 reports its order of arrival while the order is unknown.
        is_asked = self.channel.rank == 0 and not self.arrivals.order_known and not cut_short
        order = arrival_order(observed, len(self.trained.parameters)) if is_asked and observed else []
        status = self.ledger.report(self.channel.size, aborted=cut_short, has_new_parameters=has_new_parameters)
        with recorder.span(CONTROL):
            block = self.control.fill(
                backward.absent, backward.non_finite, backward.late, status, backward.sparse, order
            )
            backward.block = self.channel.host.all_reduce(block)

    # -- 7. wait, and read --------------------------------------------------------------------------------------

    def _exchange(self, backward: Backward) -> Pausing[None]:
        """Wait for the control blocks (launching this rank's if needed), act on them, and publish the averages."""
        if self._is_read_late(backward):
            yield from self._read_late(backward)
            return
        if backward.sends_block:
            self._wait_for(backward, backward.block)
            backward.block = None
        else:
            # Digests did not agree. Every rank has read the same digests, so every rank launches its block now.
            self._launch_block(backward)
            yield True
        statuses = self._read_block(backward)
        self.ledger.notes = [status.note for status in statuses]
        self.finisher.scale(self.buckets.buckets, self.ledger.notes)
        self.buffers.wait()
        yield from self._act_on(backward, statuses)

    def _is_read_late(self, backward: Backward) -> bool:
        """Return whether backward ends before blocks are read; all ranks that have not failed agree on this."""
        return (
            self.late_reading.is_allowed
            and backward.task is not None  # not in sync_gradients()
            and not (backward.is_cut_short or backward.is_resyncing)
            and self.arrivals.order_known
            and not (backward.is_shared or backward.reads_in_backward)
            and not self.ledger.is_weight_pending  # blocks contain the scale of a weighted step
            and (self.ledger.synchronizations < self.ledger.compare_at or self.ledger.compares_out_of_turn)
        )

    def _read_late(self, backward: Backward) -> Pausing[None]:
        self._wait_for(backward, None)
        self.buffers.wait()
        self.ledger.notes = [(0.0, UNWEIGHTED)] * self.channel.size
        self.finisher.scale(self.buckets.buckets, self.ledger.notes)
        averages = self.buckets.averages(backward.saved_gradients)
        # If no rank used a parameter, its gradient must be None, so a rank without the gradient reads the blocks now to
        # see whether any other rank has it. The other ranks need not take part, because every rank already receives the
        # sum of the blocks.
        if backward.absent:
            self._wait_for_block(backward)
        self._publish(backward, averages, _NOTHING, self.control.absent_everywhere() if backward.absent else [])
        early = EarlyAverages(self.channel.rank, self.trained, self.buckets, averages)
        # The rest runs outside autograd, whose threads may drop the graph task while blocks are being read. If `task`
        # were still set, this would be mistaken for an exception.
        backward.task = None
        backward.enter(Phase.UNREAD)
        yield False
        backward.enter(Phase.WAITING)
        statuses = self._read_block(backward)
        if backward.has_report or not self.control.is_settled(statuses):
            yield from self._act_on(backward, statuses, early)
        else:  # most steps: the averages are final as published, and no rank has anything to report
            self.ledger.stop_agreed = False

    def _wait_for(self, backward: Backward, block: Launched | None) -> None:
        """Wait for the buckets, and for the control block unless it is read later."""
        with recorder.span(WAIT, group=self.channel.name), self.exposed_time:
            self.finisher.wait(backward.launched, block)

    def _wait_for_block(self, backward: Backward) -> None:
        """Wait for the other ranks' control blocks, if this has not been done yet."""
        if backward.block is not None:
            with recorder.span(WAIT, group=self.channel.name), self.exposed_time.of_host:
                self.channel.wait(backward.block, CONTROL_EXCHANGE)
            backward.block = None

    def _read_block(self, backward: Backward) -> list[Status]:
        """Wait for the other ranks' control blocks if needed, and return every rank's status."""
        self._wait_for_block(backward)
        return self.control.statuses()

    # -- 8. act on the ranks' reports, 9. averages are published ----------------------------------------------------

    def _act_on(self, backward: Backward, statuses: list[Status], early: EarlyAverages | None = None) -> Pausing[None]:
        """Act on the control blocks; then publish the averages, or complete `early` ones."""
        if any(status.has_new_parameters for status in statuses):
            self._refuse_change(backward)
            return
        sparse, late = self.control.second_pass()
        # Raise errors only after the collectives below, because the other ranks wait for this rank in them.
        backward.defer(partial(self.control.check, statuses))
        if early is not None and (used := early.find_used([*sparse, *late])) is not None:
            backward.defer_error(used)
        exchanged = Exchanged(self.control, statuses, compute_scale([status.note for status in statuses]))
        for after_averages in self.extensions.after_averages:
            yield from after_averages(backward, exchanged)
        self.ledger.stop_agreed = any(status.asks_to_stop for status in statuses)
        # Do this before adopting the order of arrival, which gives the buckets new memory without the digest.
        self.late_reading.note(is_usual=self._is_usual(statuses))
        if early is None:
            self._publish_whole(backward)
            self._adopt_order()
        elif sparse or late:
            early.complete(late, backward.out_of_bucket_averages)
            self.averages.remember(backward.out_of_bucket_averages)

    def _refuse_change(self, backward: Backward) -> None:
        """Abandon a step because another rank's module has different parameters; every rank raises."""
        refusal = find_refusal(self.watch.unchanged(), self.channel, self.finisher, self.exposed_time.device)
        assert refusal is not None, "another rank reported changed parameters, but the ranks' parameters agree"
        for parameter in self.trained.parameters:
            parameter.grad = None
        self.ledger.forget_local()
        self.extensions.abort(backward)
        backward.defer_error(refusal)

    def _publish_whole(self, backward: Backward) -> None:
        # A separate function, so that its list of views is gone when _adopt_order() frees the old buckets' memory. A
        # view in that list would count as a user's reference to the memory.
        averages = self.buckets.averages(backward.saved_gradients)
        self._publish(backward, averages, backward.out_of_bucket_averages, self.control.absent_everywhere())

    def _is_usual(self, statuses: Sequence[Status]) -> bool:
        """Return whether this backward pass could have done without a control block."""
        if self.digest_in is None:
            return self.control.is_without_surprise(statuses)
        if any(status.compares for status in statuses):  # a scheduled comparison does not count as a surprise
            return True
        return self.digest.read(self.buckets.buckets[self.digest_in].tail, UNWEIGHTED) is not None

    def _publish(
        self,
        backward: Backward,
        averages: Sequence[Tensor],
        out_of_bucket: Mapping[int, Tensor],
        absent: Sequence[int],
    ) -> None:
        """Set ``p.grad`` to the average: a bucket view, a tensor in `out_of_bucket`, or None if `absent`."""
        if self.extensions.show or self.buckets.unbucketed or out_of_bucket:
            shown: list[Tensor | None] = [*averages]
            for index in self.buckets.unbucketed:
                shown[index] = None
            for index, average in out_of_bucket.items():
                shown[index] = average
            for index in absent:
                shown[index] = None
            for show in self.extensions.show:
                show(backward, shown)
            self.averages.publish(shown)
            self.averages.remember({index: mean for index in out_of_bucket if (mean := shown[index]) is not None})
        else:
            self.averages.publish(averages, absent)
        if not self.ledger.status.joined:  # a rank without data sends zeros, which do not count as arrivals
            self.arrivals.end(backward.absent)
        self.ledger.synchronized()
        # Works hold references to the buckets' memory, which _adopt_order() is about to free.
        backward.launched.clear()
        backward.saved_gradients = {}

    def _adopt_order(self) -> None:
        """Rebuild the buckets in rank 0's order of arrival, after our references to the old buckets are gone.

        An empty order means that rank 0 had no data. The next control block then requests the order again.
        """
        if not self.arrivals.order_known and (order := self.control.order()):
            self.buckets.assign_in(order)
            self._follow_layout()
            sizes = ", ".join(f"{bucket.flat.nbytes:,}" for bucket in self.buckets.buckets)
            logger.info("rank %d: buckets are in rank 0's order of arrival; bytes: %s", self.channel.rank, sizes)

    def _follow_layout(self) -> None:
        """Use the current buckets from now on, and stop requesting the order of arrival."""
        self.control.forget_order()
        self.arrivals.use_layout(self.buckets.layout, order_known=True)
        self._place_digest()

    def _place_digest(self) -> None:
        """Decide for the current buckets and finisher which bucket carries the digest, and when to launch buckets."""
        for bucket in self.buckets.buckets:
            bucket.prescale = self.finisher.prescale(bucket.flat)
        self.launches_at_end = self.finisher.launches_at_end(shadowed=False)
        carries = self.buckets.has_tail and self.finisher.carries_tail
        self.overlapped_buckets = len(self.buckets) - int(carries)
        self.digest_in = self.overlapped_buckets if carries else None
