"""The exchange of control blocks, which ends a backward pass if ranks have more to report than a digest.

    6. launch the block ──► 7. wait, and read it ──► 8. extensions act on the ranks' reports
                                                  ──► 9. averages are published, and errors are raised

All ranks exchange blocks in the same backward passes: if their digests do not agree, in the first steps, for some steps
after a surprise, and if there are no digests.

With gradients on GPUs, digests are on a board, and ranks read it late, so that no rank waits for another during
backward: averages are published as soon as buckets are reduced, and the board is read the next time gradients are
accessed, usually by the optimizer step. If digests differ then, blocks are exchanged then. Usually they do not affect
the averages. If a rank reports a gradient outside the buckets, however, its average is complete only after the blocks
are read. Code that used the average earlier used a wrong value.
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
"""Number of blocks without a surprise that must follow a block with one before a step does without blocks again."""
CONTROL_EXCHANGE = "exchange of control blocks"
_NOTHING: Mapping[int, Tensor] = MappingProxyType({})
version_of: Callable[[Tensor], int] = attrgetter("_version")
NO_COPIES: Mapping[int, int] = MappingProxyType({})


def patience() -> int:
    """Return the number of unsurprising blocks required after a surprise; 0 in tests that always read late."""
    return 0 if os.environ.get(TEST_HOST_CHANNEL) == "always" else USUAL_STEPS


class QuietSteps:
    """Decides from earlier steps whether the next one may do without control blocks; the same on all ranks.

    A step with a surprise (a late delta, a sparse gradient, an exception on another rank) requires more collectives.
    With a board, one rank could run them at the end of its backward pass and another at its optimizer step, and the two
    would wait for each other forever if the training loop has a collective in between. So after a surprise, blocks are
    exchanged at the end of each backward pass for a while. The decision depends only on reports of earlier steps, which
    every rank has read.

    Args:
        patience: number of blocks without a surprise required after one with a surprise; 0 for none.
    """

    is_quiet: bool
    """Whether the latest blocks had no surprise, so that none is expected in the next one."""

    def __init__(self, patience: int = USUAL_STEPS) -> None:
        self._patience = patience
        # Number of unsurprising blocks still required. The first block is read immediately, to get the order of
        # arrival.
        self._missing = min(1, patience)
        self.is_quiet = self._missing == 0

    def note(self, *, is_usual: bool) -> None:
        """Record that a block was read; `is_usual` if it had no surprise."""
        self._missing = max(0, self._missing - 1) if is_usual else self._patience
        self.is_quiet = self._missing == 0


class EarlyAverages:
    """Averages as published before reports were read, and a check of whether they have been changed or used since.

    Args:
        rank: this rank.
        trained: the parameters, whose ``grad`` is set.
        buckets: their buckets.
    """

    def __init__(self, rank: int, trained: Trained, buckets: BucketSet) -> None:
        self._rank, self._trained, self._buckets = rank, trained, buckets
        self.versions: list[int] = []
        """Versions of :meth:`marks` when the averages were published."""
        self.copies: Mapping[int, int] = NO_COPIES
        """Versions of the averages outside the buckets: they have another dtype, or a user kept an earlier gradient."""

    def marks(self) -> list[Tensor]:
        """Return the memory of each bucket's views and a parameter of each bucket, whose versions show a change.

        All views of a bucket have the version of their memory. A hand-written update increments the versions of all
        parameters, so one of each bucket is enough.
        """
        return [part.memory for part in self._buckets.bucket_views] + [owned[0] for owned in self._buckets.owned]

    def note(self, shown: Sequence[Tensor]) -> None:
        """Record that the averages `shown` have been published; keeps no reference to them."""
        self.versions = list(map(version_of, self.marks()))
        views = self._buckets.views
        outside = (index for index in range(len(shown)) if shown is not views and shown[index] is not views[index])
        self.copies = {index: shown[index]._version for index in outside}

    def find_used(self, unfinished: Collection[int]) -> UsageError | None:
        """Return an error if one of the `unfinished` averages was used or changed before it was final."""
        if not unfinished:
            return None
        now = list(map(version_of, self.marks()))
        # A GradScaler unscales gradients without incrementing their versions, so afterwards all gradients count as
        # used.
        all_used = now[len(self._buckets) :] != self.versions[len(self._buckets) :] or have_unscaled()
        used = [index for index in sorted(unfinished) if all_used or self._was_changed(index)]
        if not used:
            return None
        return UsageError(
            f"rank {self._rank}: the gradient of {self._trained.names[used[0]]!r} was changed or used before its "
            "last part was added, which arrived after its bucket was reduced; call model.parameters() on "
            "the wrapper before changing them, as in clip_grad_norm_(model.parameters(), 1.0): this waits for all parts"
        )

    def complete(self, late: Collection[int], out_of_bucket: Mapping[int, Tensor]) -> None:
        """Publish the final averages of `late` and `out_of_bucket` gradients.

        A gradient that the user has dropped since stays None.
        """
        for index in {*late, *out_of_bucket}:
            parameter = self._trained.parameters[index]
            # An unbucketed parameter's gradient is None until now, so None does not mean that the user dropped it.
            if parameter.grad is None and index not in self._buckets.unbucketed:
                continue
            if index in out_of_bucket:
                parameter.grad = out_of_bucket[index]
            elif index in self.copies and (shown := self._shown(index)) is not None:
                shown.copy_(self._buckets.views[index])

    def _was_changed(self, index: int) -> bool:
        gradient = self._trained.parameters[index].grad
        if index in self._buckets.unbucketed or gradient is None:
            return False
        return gradient is not self._shown(index) or gradient._version != self._version_of(index)

    def _shown(self, index: int) -> Tensor | None:
        return self._buckets.copies[index][0]() if index in self.copies else self._buckets.views[index]

    def _version_of(self, index: int) -> int:
        if index in self.copies:
            return self.copies[index]
        pairs = zip(self._buckets.buckets, self.versions, strict=False)
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
        quiet: decides from earlier steps whether blocks are launched regardless of digests.
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
        quiet: QuietSteps,
        exposed_time: ExposedTime,
    ) -> None:
        self._trained, self._buckets, self._arrivals, self._channel = trained, buckets, arrivals, channel
        self._ledger, self._buffers, self._extensions = ledger, buffers, extensions
        self._quiet, self._exposed_time = quiet, exposed_time
        self.early = EarlyAverages(channel.rank, trained, buckets)
        """The averages of a step whose reports are read late."""
        self.control = ControlBlock(trained.names, channel.rank, channel.size, channel.host.allocate)
        """This rank's control block."""

    # -- 6. launch ----------------------------------------------------------------------------------------------

    def launch(self, backward: Backward, *, has_new_parameters: bool = False) -> None:
        """Launch the control block with this rank's report. All ranks call this."""
        observed, cut_short = self._arrivals.observed, backward.is_cut_short
        # Rank 0 reports its order of arrival while the order is unknown.
        is_asked = self._channel.rank == 0 and not self._arrivals.order_known and not cut_short
        order = arrival_order(observed, len(self._trained.parameters)) if is_asked and observed else []
        status = backward.status
        if status is None and backward.is_early:  # the ledger has counted on since
            assert backward.position is not None, "else the status was kept"
            status = self._ledger.status_at(backward.position)
        elif status is None:
            size = self._channel.size
            status = self._ledger.report(size, aborted=cut_short, has_new_parameters=has_new_parameters)
        with recorder.span(CONTROL):
            block = self.control.fill(
                backward.absent, backward.non_finite, backward.late, status, backward.sparse, order
            )
            backward.block = self._channel.host.all_reduce(block)

    # -- 7. wait, and read --------------------------------------------------------------------------------------

    def run(self, backward: Backward, finisher: Finisher) -> Pausing[None]:
        """Act on the control blocks, and publish the averages; called once the `finisher` has reduced the buckets."""
        if not backward.sends_block:
            # Reports did not agree. Every rank has read the same ones, so every rank launches its block now.
            self.launch(backward)
            yield True
        if backward.block is not None:
            with recorder.span(WAIT, group=self._channel.name), self._exposed_time.of_host:
                self._channel.wait(backward.block, CONTROL_EXCHANGE)
            backward.block = None
        statuses = self.control.statuses()
        if not backward.is_early:
            self._scale([status.note for status in statuses], finisher)
        yield from self._act_on(backward, statuses)

    def publish_early(self, backward: Backward, finisher: Finisher) -> None:
        """Publish the averages of an unweighted step, and end the backward pass; reports are read later."""
        self._scale([(0.0, UNWEIGHTED)] * self._channel.size, finisher)
        averages = self._buckets.averages(backward.saved_gradients)
        # At least one rank has all gradients: either this one, or one whose report does not wait.
        self._publish(backward, averages, _NOTHING, [])
        self.early.note(averages)
        # The rest runs outside autograd, whose threads may drop the graph task while reports are being read. If `task`
        # were still set, this would be mistaken for an exception.
        backward.is_early, backward.task = True, None
        backward.enter(Phase.UNREAD)

    def _scale(self, notes: Notes, finisher: Finisher) -> None:
        """Turn the sums in the buckets into averages, given each rank's weight, and wait for the buffers."""
        self._ledger.notes = notes
        finisher.scale(self._buckets.buckets, notes)
        self._buffers.wait()

    # -- 8. act on the ranks' reports, 9. averages are published ----------------------------------------------------

    def _act_on(self, backward: Backward, statuses: list[Status]) -> Pausing[None]:
        """Act on the control blocks; then publish the averages, or complete `early` ones."""
        if any(status.has_new_parameters for status in statuses):
            backward.is_abandoned = True
            return
        sparse, late = self.control.second_pass()
        early = self.early if backward.is_early else None
        # Raise errors only after the collectives below, because the other ranks wait for this rank in them.
        backward.defer(partial(self.control.check, statuses))
        if early is not None and (used := early.find_used([*sparse, *late])) is not None:
            backward.defer_error(used)
        exchanged = Exchanged(self.control, statuses, compute_scale([status.note for status in statuses]))
        for after_averages in self._extensions.after_averages:
            yield from after_averages(backward, exchanged)
        self._ledger.stop_agreed = any(status.asks_to_stop for status in statuses)
        self._quiet.note(is_usual=self._is_usual(backward, statuses))
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
        if backward.sends_block and backward.digests_agree is None:
            return self.control.is_without_surprise(statuses)
        # A scheduled comparison does not count as a surprise.
        return backward.digests_agree or any(status.compares for status in statuses)

    def _publish(
        self, backward: Backward, averages: Sequence[Tensor], out_of_bucket: Mapping[int, Tensor], absent: Sequence[int]
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
