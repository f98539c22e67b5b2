"""The exchange of control blocks, which ends a backward pass if ranks have more to report than a digest.

    6. launch the block ──► 7. wait, and read it ──► 8. extensions act on the ranks' reports
                                                  ──► 9. averages are published, and errors are raised

All ranks exchange blocks in the same backward passes: if digests do not agree, in the first steps, for some steps after
a surprise, and if buckets carry no digest.

With gradients on GPUs, ranks exchange blocks in every step and read them late, so that no rank waits for them during
backward. Averages are published as soon as buckets are reduced. The blocks are read the next time gradients are
accessed, usually by the optimizer step. Usually they do not affect the averages. If a rank reports a gradient outside
the buckets, however, its average is complete only after the blocks are read. Code that used the average earlier used a
wrong value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter
from types import MappingProxyType

from torch import Tensor

from paceline.core.spans import CONTROL, WAIT, recorder
from paceline.core.torch_internals import class_never_compiled, have_unscaled
from paceline.ddp.arrivals import Arrivals
from paceline.ddp.backward import Backward, Phase
from paceline.ddp.buckets import BucketSet, arrival_order
from paceline.ddp.buffers import BufferSync
from paceline.ddp.channel import TEST_HOST_CHANNEL, Channel, ExposedTime, Pausing
from paceline.ddp.control_block import ControlBlock, Notes, Status
from paceline.ddp.extension_points import Exchanged, Extensions
from paceline.ddp.finisher import Finisher
from paceline.ddp.ledger import Ledger
from paceline.ddp.module_changes import Trained
from paceline.ddp.weights import UNWEIGHTED, compute_scale
from paceline.errors import UsageError

USUAL_STEPS = 16
"""Number of blocks without a surprise that must follow a block with one before blocks are read late again."""
CONTROL_EXCHANGE = "exchange of control blocks"
_NOTHING: Mapping[int, Tensor] = MappingProxyType({})
_version_of: Callable[[Tensor], int] = attrgetter("_version")


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


class EarlyAverages:
    """Averages as first published in ``p.grad``, with a check of whether they have been changed or used since.

    Args:
        rank: this rank.
        trained: the parameters, whose ``grad`` has been set.
        buckets: their buckets.
        shown: the averages as first published, one for each parameter.
    """

    def __init__(self, rank: int, trained: Trained, buckets: BucketSet, shown: Sequence[Tensor]) -> None:
        self._rank, self._names, self._parameters = rank, trained.names, trained.parameters
        self._buckets, self._shown = buckets, shown
        # The views of a bucket share one version counter, because they are views of one tensor.
        self._versions = [bucket.views[0]._version for bucket in buckets.buckets]
        # Averages outside the buckets: they have another dtype, or a user kept an earlier gradient.
        self._copies = {
            index: shown[index]._version
            for index in (range(len(shown)) if shown is not buckets.views else ())
            if shown[index] is not buckets.views[index]
        }
        # An optimizer step increments the versions of parameters, but not of gradients.
        self._updates = sum(map(_version_of, self._parameters))

    def find_used(self, unfinished: Collection[int]) -> UsageError | None:
        """Return an error if one of the `unfinished` averages was used or changed before it was final."""
        if not unfinished:
            return None
        # A GradScaler unscales gradients without incrementing their versions, so afterwards all gradients count as
        # used.
        all_used = sum(map(_version_of, self._parameters)) != self._updates or have_unscaled()
        used = [index for index in sorted(unfinished) if all_used or self._was_changed(index)]
        if not used:
            return None
        return UsageError(
            f"rank {self._rank}: the gradient of {self._names[used[0]]!r} was changed or used before its "
            "last part was added, which arrived after its bucket was reduced; call model.parameters() on "
            "the wrapper before changing them, as in clip_grad_norm_(model.parameters(), 1.0): this waits for all parts"
        )

    def complete(self, late: Collection[int], out_of_bucket: Mapping[int, Tensor]) -> None:
        """Publish the final averages of `late` and `out_of_bucket` gradients.

        A gradient that the user has dropped since stays None.
        """
        for index in {*late, *out_of_bucket}:
            parameter = self._parameters[index]
            # An unbucketed parameter's gradient is None until now, so None does not mean that the user dropped it.
            if parameter.grad is None and index not in self._buckets.unbucketed:
                continue
            if index in out_of_bucket:
                parameter.grad = out_of_bucket[index]
            elif index in self._copies:
                self._shown[index].copy_(self._buckets.views[index])

    def _was_changed(self, index: int) -> bool:
        gradient = self._parameters[index].grad
        if index in self._buckets.unbucketed or gradient is None:
            return False
        return gradient is not self._shown[index] or gradient._version != self._version_of(index)

    def _version_of(self, index: int) -> int:
        if index in self._copies:
            return self._copies[index]
        pairs = zip(self._buckets.buckets, self._versions, strict=True)
        return next(version for bucket, version in pairs if index in bucket.indices)


@class_never_compiled
class Exchange:
    """Exchanges the control blocks of one wrapper's ranks, acts on them, and publishes the averages.

    Args:
        trained: the averaged parameters.
        buckets: the buckets with their gradients.
        arrivals: tracks which gradients have arrived.
        channel: the connection to the other ranks.
        ledger: counts this rank's backward passes and weights.
        buffers: broadcasts buffers at the end of backward passes.
        extensions: the rare cases.
        late_reading: decides from earlier steps whether blocks are launched regardless of digests, and read late.
        exposed_time: the total time that backward passes have waited for communication.
    """

    def __init__(
        self,
        trained: Trained,
        buckets: BucketSet,
        arrivals: Arrivals,
        channel: Channel,
        ledger: Ledger,
        buffers: BufferSync,
        extensions: Extensions,
        late_reading: LateReading,
        exposed_time: ExposedTime,
    ) -> None:
        self._trained, self._buckets, self._arrivals, self._channel = trained, buckets, arrivals, channel
        self._ledger, self._buffers, self._extensions = ledger, buffers, extensions
        self._late_reading, self._exposed_time = late_reading, exposed_time
        self.control = ControlBlock(trained.names, channel.rank, channel.size, channel.host.allocate)
        """This rank's control block."""

    # -- 6. launch ----------------------------------------------------------------------------------------------

    def launch(self, backward: Backward, *, has_new_parameters: bool = False) -> None:
        """Launch the control block with this rank's report. All ranks call this."""
        observed, cut_short = self._arrivals.observed, backward.is_cut_short
        # Rank 0 reports its order of arrival while the order is unknown.
        is_asked = self._channel.rank == 0 and not self._arrivals.order_known and not cut_short
        order = arrival_order(observed, len(self._trained.parameters)) if is_asked and observed else []
        status = self._ledger.report(self._channel.size, aborted=cut_short, has_new_parameters=has_new_parameters)
        with recorder.span(CONTROL):
            block = self.control.fill(
                backward.absent, backward.non_finite, backward.late, status, backward.sparse, order
            )
            backward.block = self._channel.host.all_reduce(block)

    # -- 7. wait, and read --------------------------------------------------------------------------------------

    def run(self, backward: Backward, finisher: Finisher) -> Pausing[None]:
        """Act on the control blocks, and publish the averages; called once the `finisher` has reduced the buckets."""
        if backward.is_read_late:
            yield from self._read_late(backward, finisher)
            return
        if not backward.sends_block:
            # Digests did not agree. Every rank has read the same digests, so every rank launches its block now.
            self.launch(backward)
            yield True
        statuses = self._read(backward)
        self._scale([status.note for status in statuses], finisher)
        yield from self._act_on(backward, statuses)

    def may_be_read_late(self, backward: Backward) -> bool:
        """Return whether backward ends before blocks are read; all ranks that have not failed agree on this."""
        return (
            self._late_reading.is_allowed
            and backward.task is not None  # not in sync_gradients()
            and not (backward.is_cut_short or backward.is_resyncing)
            and self._arrivals.order_known
            and not (backward.is_shared or backward.reads_in_backward)
            and not self._ledger.is_weight_pending  # blocks contain the scale of a weighted step
            and (self._ledger.synchronizations < self._ledger.compare_at or self._ledger.compares_out_of_turn)
        )

    def _read_late(self, backward: Backward, finisher: Finisher) -> Pausing[None]:
        self._scale([(0.0, UNWEIGHTED)] * self._channel.size, finisher)
        averages = self._buckets.averages(backward.saved_gradients)
        # If no rank used a parameter, its gradient must be None, so a rank without the gradient reads the blocks now to
        # see whether any other rank has it. The other ranks need not take part, because every rank already receives the
        # sum of the blocks.
        if backward.absent:
            self._wait(backward)
        self._publish(backward, averages, _NOTHING, self.control.absent_everywhere() if backward.absent else [])
        early = EarlyAverages(self._channel.rank, self._trained, self._buckets, averages)
        # The rest runs outside autograd, whose threads may drop the graph task while blocks are being read. If `task`
        # were still set, this would be mistaken for an exception.
        backward.task = None
        backward.enter(Phase.UNREAD)
        yield False
        backward.enter(Phase.WAITING)
        statuses = self._read(backward)
        if backward.has_report or not self.control.is_settled(statuses):
            yield from self._act_on(backward, statuses, early)
        else:  # most steps: the averages are final as published, and no rank has anything to report
            self._ledger.stop_agreed = False

    def _wait(self, backward: Backward) -> None:
        """Wait for the other ranks' control blocks, if this has not been done yet."""
        if backward.block is not None:
            with recorder.span(WAIT, group=self._channel.name), self._exposed_time.of_host:
                self._channel.wait(backward.block, CONTROL_EXCHANGE)
            backward.block = None

    def _read(self, backward: Backward) -> list[Status]:
        """Wait for the other ranks' control blocks if needed, and return every rank's status."""
        self._wait(backward)
        return self.control.statuses()

    def _scale(self, notes: Notes, finisher: Finisher) -> None:
        """Turn the sums in the buckets into averages, given each rank's weight, and wait for the buffers."""
        self._ledger.notes = notes
        finisher.scale(self._buckets.buckets, notes)
        self._buffers.wait()

    # -- 8. act on the ranks' reports, 9. averages are published ----------------------------------------------------

    def _act_on(self, backward: Backward, statuses: list[Status], early: EarlyAverages | None = None) -> Pausing[None]:
        """Act on the control blocks; then publish the averages, or complete `early` ones."""
        if any(status.has_new_parameters for status in statuses):
            backward.is_abandoned = True
            return
        sparse, late = self.control.second_pass()
        # Raise errors only after the collectives below, because the other ranks wait for this rank in them.
        backward.defer(partial(self.control.check, statuses))
        if early is not None and (used := early.find_used([*sparse, *late])) is not None:
            backward.defer_error(used)
        exchanged = Exchanged(self.control, statuses, compute_scale([status.note for status in statuses]))
        for after_averages in self._extensions.after_averages:
            yield from after_averages(backward, exchanged)
        self._ledger.stop_agreed = any(status.asks_to_stop for status in statuses)
        self._late_reading.note(is_usual=self._is_usual(backward, statuses))
        if early is None:
            averages = self._buckets.averages(backward.saved_gradients)
            self._publish(backward, averages, backward.out_of_bucket_averages, self.control.absent_everywhere())
            # An empty order means that rank 0 had no data. The next control block then requests the order again.
            backward.new_order = [] if self._arrivals.order_known else self.control.order()
        elif sparse or late:
            early.complete(late, backward.out_of_bucket_averages)
            self._buckets.remember(backward.out_of_bucket_averages)

    def _is_usual(self, backward: Backward, statuses: Sequence[Status]) -> bool:
        """Return whether this backward pass could have done without a control block."""
        if backward.digests_agree is None:
            return self.control.is_without_surprise(statuses)
        # A scheduled comparison does not count as a surprise.
        return backward.digests_agree or any(status.compares for status in statuses)

    def _publish(
        self,
        backward: Backward,
        averages: Sequence[Tensor],
        out_of_bucket: Mapping[int, Tensor],
        absent: Sequence[int],
    ) -> None:
        """Set ``p.grad`` to the average: a bucket view, a tensor in `out_of_bucket`, or None if `absent`."""
        if self._extensions.show or self._buckets.unbucketed or out_of_bucket:
            shown: list[Tensor | None] = [*averages]
            for index in self._buckets.unbucketed:
                shown[index] = None
            for index, average in out_of_bucket.items():
                shown[index] = average
            for index in absent:
                shown[index] = None
            for show in self._extensions.show:
                show(backward, shown)
            self._buckets.publish(shown)
            self._buckets.remember({index: mean for index in out_of_bucket if (mean := shown[index]) is not None})
        else:
            self._buckets.publish(averages, absent)
        if not self._ledger.status.joined:  # a rank without data sends zeros, which do not count as arrivals
            self._arrivals.end(backward.absent)
        self._ledger.synchronized()
        # Works hold references to the buckets' memory, which the reducer is about to free if the order is new.
        backward.launched.clear()
        backward.saved_gradients = {}
