"""The end of one synchronized backward: from the last launch to the averages, and what control blocks ask for.

Beside gradients on GPUs control blocks are read late, so that no rank waits for others in backward: averages are shown
as soon as buckets are reduced, and the rest follows when somebody looks, at the optimizer step as a rule.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from paceline.core.telemetry.spans import WAIT
from paceline.ddp.agreement.control_block import Status
from paceline.ddp.agreement.join_events import Event
from paceline.ddp.agreement.weighting import UNWEIGHTED, compute_scale
from paceline.ddp.engine.backward.backward import Backward
from paceline.ddp.engine.backward.phase import AGREED, Outcome, Phase
from paceline.ddp.engine.backward.second_pass import run_second_pass
from paceline.ddp.engine.gradients.provisional_averages import EarlyAverages
from paceline.ddp.transport.channel import Pausing
from paceline.ddp.transport.finisher import CONTROL, Notes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ending:
    """Carries `backward` from its last gradient to its end."""

    backward: Backward

    # -- 6. backward ends ---------------------------------------------------------------------------------------

    def run(self) -> Pausing[Outcome]:
        """Launch the rest, wait, average gradients outside the buckets, check, and publish the averages.

        Where control blocks are read late, it yields False in between, and is run on when somebody looks.
        """
        backward, parts = self.backward, self.backward.parts
        if parts.join.is_active:
            parts.join.announce(Event.END)
        parts.ledger.status.changed = parts.new_parameters.have_gradients()
        mine = backward.launch_rest()
        parts.buffers.launch()
        if backward.always_exchanges:
            backward.launch_block()
        parts.sharing.launched(backward.absent)
        backward.enter(Phase.WAITING)
        yield True
        if not self._is_read_late():
            self._wait()
            if not backward.always_exchanges:
                if parts.digest.all_agree(parts.storage.buckets[-1].tail):
                    return self._agreed()
                return (yield from self.exchange(mine))
            return (yield from self._scale_and_conclude(mine))
        early = self._show_early()
        # The rest does not run in autograd: a thread of its may drop the graph task while blocks are being read.
        backward.forget_task()
        backward.enter(Phase.UNREAD)
        yield False
        backward.enter(Phase.WAITING)
        return (yield from self._conclude(self._read_blocks(), mine, early))

    def exchange(self, mine: dict[int, Tensor]) -> Pausing[Outcome]:
        """Exchange control blocks, as digests differ; `mine` are this rank's gradients that are in no bucket."""
        self.backward.launch_block()
        yield True
        return (yield from self._scale_and_conclude(mine))

    def _scale_and_conclude(self, mine: dict[int, Tensor]) -> Pausing[Outcome]:
        statuses = self._read_blocks()
        self._scale([status.note for status in statuses])
        self.backward.parts.buffers.wait()
        return (yield from self._conclude(statuses, mine, None))

    def _is_read_late(self) -> bool:
        """Whether backward ends before control blocks are read; the same on every rank that has not failed."""
        backward, parts = self.backward, self.backward.parts
        return (
            parts.late_reading.is_allowed
            and backward.is_followed
            and not (backward.is_cut_short or backward.is_settling)
            and parts.arrivals.order_known
            and parts.finisher.reads_late
            and not (parts.sharing or parts.join.is_active)
            and not (parts.ledger.is_weight_pending or parts.ledger.status.changed)
        )

    # -- 7. wait and scale --------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for everything launched.

        Raises:
            CommunicationError: if a rank ended or did not come.
            HookError: if a communication hook failed here.
            DesyncError: if one failed on another rank.
        """
        backward, parts = self.backward, self.backward.parts
        with self._waiting():
            parts.finisher.wait(backward.launched, backward.block, parts.control)
        backward.block = None

    def _agreed(self) -> Outcome:
        """Publish the averages of a step in which no rank has anything to report."""
        parts = self.backward.parts
        self._scale([(0.0, UNWEIGHTED)] * parts.channel.size)
        parts.buffers.wait()
        self._show({}, [])
        return AGREED

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Surround a wait for communication."""
        parts = self.backward.parts
        with parts.recorder.span(WAIT, group=parts.channel.name), parts.exposed_time.measured():
            yield

    def _scale(self, notes: Notes) -> None:
        parts = self.backward.parts
        parts.finisher.scale(parts.storage.buckets, notes)
        if (watch := parts.recorder.bucket_watch) is not None and parts.finisher.is_whole:
            for bucket in parts.storage.buckets:
                watch.averaged(bucket.flat)

    def _show_early(self) -> EarlyAverages:
        """Wait for the buckets, and show what are the averages in a step without weights and surprises."""
        backward, parts = self.backward, self.backward.parts
        with self._waiting():
            parts.finisher.wait(backward.launched, None, parts.control)
        parts.buffers.wait()
        self._scale([(0.0, UNWEIGHTED)] * parts.channel.size)
        if backward.absent:  # only who lacks a gradient has to ask whether all do, and needs no one's help for it
            self._read_blocks()
        averages = self._show({}, parts.control.absent_everywhere() if backward.absent else [])
        parts.sharing.end()
        return EarlyAverages(parts.channel.rank, parts.names, parts.parameters, parts.storage, averages)

    def _read_blocks(self) -> list[Status]:
        """Wait for the other ranks' control blocks, unless they were read before; returns what every rank reported."""
        backward, parts = self.backward, self.backward.parts
        if backward.block is not None:
            with self._waiting():
                parts.channel.wait(backward.block, CONTROL)
            backward.block = None
        return parts.control.statuses()

    # -- 8. the second pass, and checks -------------------------------------------------------------------------

    def _conclude(
        self, statuses: list[Status], mine: dict[int, Tensor], early: EarlyAverages | None
    ) -> Pausing[Outcome]:
        """Act on the control blocks; then publish the averages, or complete those that were shown `early`."""
        parts = self.backward.parts
        sparse, late = parts.control.second_pass()
        used = early.find_used([*sparse, *late]) if early is not None else None
        scale = compute_scale([status.note for status in statuses])
        apart = yield from run_second_pass(parts, mine, scale)
        new = yield from parts.new_parameters.agree(statuses, scale, parts)
        unused = yield from parts.unused.find(parts.control.missing_somewhere(statuses), self.backward.absent)
        drift = None
        if parts.replica_check is not None:
            drift = yield from parts.replica_check.run(statuses)
        parts.late_reading.note(is_usual=parts.control.is_without_surprise(statuses))
        if early is None:
            self._show(apart, parts.control.absent_everywhere())
            self._adopt_order()
        elif sparse or late:
            early.complete(late, apart)
            parts.published.remember(apart)
        return Outcome(statuses, new, unused, drift, used)

    # -- 9. averages are published ------------------------------------------------------------------------------

    def _show(self, apart: dict[int, Tensor], absent: list[int]) -> Sequence[Tensor]:
        """Show the averages in ``p.grad``: the bucket's view, the one that came `apart`, or None if no rank had any."""
        backward, parts = self.backward, self.backward.parts
        averages = parts.storage.averages(backward.held, parts.finisher.stand_ins(parts.storage.buckets))
        parts.published.publish(averages, apart, absent, backward.share)
        if not parts.ledger.status.joined:  # else nothing was to be expected
            parts.arrivals.end(backward.absent)
        parts.ledger.synchronized()
        backward.launched.clear()
        backward.held.clear()
        return averages

    def _adopt_order(self) -> None:
        """Rebuild the buckets in rank 0's order of arrival, once nothing of ours refers to the old ones' memory.

        An order that is empty says that rank 0 had no data, so it is asked for again next time.
        """
        parts = self.backward.parts
        if not parts.arrivals.order_known and (order := parts.control.order()):
            parts.storage.assign_in(order)
            parts.follow_layout()
            sizes = ", ".join(f"{bucket.flat.nbytes:,}" for bucket in parts.storage.buckets)
            logger.info("rank %d: buckets are in rank 0's order of arrival; bytes: %s", parts.channel.rank, sizes)
