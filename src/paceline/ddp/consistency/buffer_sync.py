"""Buffer synchronization: keeps a module's buffers equal on all ranks.

Buffers are broadcast with the synchronized backward pass that follows a counted forward pass
(:mod:`.buffers_at_rest`). If they may differ when a step begins, they are also broadcast before its first counted
forward pass. Inside ``join``, every broadcast is announced to the ranks without data, and runs before that forward.

Decision 0024 says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from paceline.core.torch_internals.compile import class_never_compiled
from paceline.core.torch_internals.distributed.dtensor import local_of
from paceline.ddp.agreement.join_events import Event, JoinEvents
from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.consistency.buffers import Buffers
from paceline.ddp.consistency.buffers_at_rest import BuffersAtRest
from paceline.ddp.transport.channel import Channel


class Statistics(Protocol):
    """Buffers that need an exchange other than a broadcast to become equal on every rank."""

    def launch(self) -> None:
        """Launch the exchange at the end of a synchronized backward pass."""

    def wait(self, *, are_rank_0s: bool) -> None:
        """Wait for the exchange, and update the buffers; `are_rank_0s` if rank 0's buffers were just broadcast."""


@class_never_compiled
class BufferSync:
    """Synchronizes the buffers of one wrapper that has peers.

    Args:
        buffers: the module's buffers.
        channel: connects all ranks.
        join_events: announces each broadcast to ranks without data.
        ledger: counts forward passes, for comparison with other ranks.
        is_wanted: returns whether forward passes in training mode currently synchronize buffers.
        may_differ: whether the buffers may differ between ranks at first.
    """

    _may_differ: bool
    """Whether there was a counted forward pass since the buffers were last equal. When a step begins, the value is the
    same on every rank. Passes under ``no_sync`` do not count."""
    statistics: Statistics | None = None
    """Adds up BatchNorm's statistics over the slices of virtual ranks; None without them."""

    def __init__(
        self,
        buffers: Buffers,
        channel: Channel,
        join_events: JoinEvents,
        ledger: Ledger,
        is_wanted: Callable[[], bool | None],
        *,
        may_differ: bool,
    ) -> None:
        self._may_differ = may_differ
        self._buffers, self._channel, self._at_rest = buffers, channel, BuffersAtRest(buffers, channel)
        self._join_events, self._ledger, self._is_wanted = join_events, ledger, is_wanted

    # -- with a forward -----------------------------------------------------------------------------------------

    @property
    def is_wanted(self) -> bool:
        return bool(self._is_wanted())

    def each_ranks_own(self) -> dict[str, Tensor]:
        """Return, by name, the buffers that forward passes in training mode do not currently synchronize."""
        return self._buffers.ignored() | ({} if self._is_wanted() else self._buffers.named())

    def begin_step(self) -> None:
        """Make the buffers equal unless they already are; called on all ranks before a forward pass or sliced step."""
        if self._may_differ:
            self.synchronize()

    def restored(self) -> None:
        """Record that the buffers have been reset to their values before the step, which are equal on all ranks."""
        self._may_differ = False

    def forward_begins(self) -> bool:
        """Count a forward pass, and return whether it synchronizes buffers.

        If so, and if it is the first one of its step, first make the buffers equal unless they already are.
        """
        travels = bool(self._is_wanted())
        # Not before later forward passes of the step, because a rank without data does not know their number.
        broadcasts = travels and self._ledger.forwards_since_sync == 0
        self._ledger.forward(broadcasts=broadcasts)
        # With virtual ranks, rank 0 may be working on another slice, so each slice keeps its own buffers.
        if broadcasts and self.statistics is None:
            self.begin_step()
        self._may_differ = True
        return travels

    def synchronize(self) -> bool:
        """Make the buffers equal now; returns whether there are any to synchronize."""
        if not self._is_wanted():
            return False
        if self._join_events.enabled:
            self._join_events.announce(Event.BUFFERS)
        self.exchange()
        self._may_differ = False
        return True

    # -- with a backward ----------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Launch the broadcast at the end of a synchronized backward pass, if any forward pass was counted before it.

        All ranks make the same decision.
        """
        if self.statistics is not None:
            self.statistics.launch()
        # Inside join(), a separate broadcast is announced before the next step's first forward pass.
        if not self._buffers.places or self._join_events.enabled:
            return
        if self._may_differ and self._is_wanted():
            self._may_differ = False
            self._at_rest.launch()

    def wait(self) -> None:
        """Wait for the broadcast, if one was launched, and copy its values into the buffers."""
        if is_broadcast := self._at_rest.is_under_way:
            self._at_rest.wait()
        if self.statistics is not None:  # after the broadcast, which restores the values from before the step
            self.statistics.wait(are_rank_0s=is_broadcast)

    # -- inside join --------------------------------------------------------------------------------------------

    def exchange(self) -> None:
        """Copy the buffers of the first rank that has data to all ranks; collective."""
        # Through .data, so that autograd's version counters do not change: two forwards may precede a backward pass.
        tensors = [local_of(buffer.data) for buffer in self._buffers.named().values()]
        self._channel.broadcast(tensors, self._join_events.source)

    def taken_along(self) -> list[Tensor]:
        """Return the buffers for the broadcast at the end of ``join``, and count them as equal."""
        self._may_differ = False
        return [buffer.data for buffer in self._buffers.named().values()]
