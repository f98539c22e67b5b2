"""Buffer synchronization: keeps a module's buffers equal on all ranks.

The broadcast for a counted forward comes after it: with the next synchronized backward (:mod:`.buffers_at_rest`), or
before the next counted forward, whichever is first. Inside ``join`` every broadcast is announced to the ranks without
data and runs before the forward.

Decision 0024 says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from paceline.core.torch_internals.compile import class_never_compiled
from paceline.ddp.agreement.join_events import Event, JoinEvents
from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.consistency.buffers import Buffers
from paceline.ddp.consistency.buffers_at_rest import BuffersAtRest
from paceline.ddp.transport.channel import Channel


class Statistics(Protocol):
    """Adds up buffers that need a separate exchange to be the same on every rank."""

    def launch(self) -> None:
        """Launch the exchange at the end of a synchronized backward."""

    def wait(self, *, are_rank_0s: bool) -> None:
        """Wait for the exchange, and update the buffers; `are_rank_0s` if rank 0's buffers were just broadcast."""


@class_never_compiled
class BufferSync:
    """Synchronizes the buffers of one wrapper that has peers.

    Args:
        buffers: the module's buffers.
        channel: reaches all ranks.
        join_events: announces each broadcast to ranks without data.
        ledger: counts forwards, for comparison with other ranks.
        is_wanted: returns whether training forwards synchronize buffers now.
        may_differ: whether the buffers may differ between ranks now.
    """

    _forwards: int
    """Counted forwards since buffers were last equal; the same number on every rank. Forwards under ``no_sync`` do not
    count, because ranks may run different numbers of them."""
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
        self._forwards = int(may_differ)
        self._buffers, self._channel, self._at_rest = buffers, channel, BuffersAtRest(buffers, channel)
        self._join_events, self._ledger, self._is_wanted = join_events, ledger, is_wanted

    # -- with a forward -----------------------------------------------------------------------------------------

    @property
    def is_wanted(self) -> bool:
        return bool(self._is_wanted())

    def each_ranks_own(self) -> dict[str, Tensor]:
        """Return the buffers, by name, that training forwards do not synchronize now: the ignored ones, or all."""
        return self._buffers.ignored() | ({} if self._is_wanted() else self._buffers.named())

    def begin_step(self) -> None:
        """Make the buffers equal, unless they already are; called by all ranks before a forward or a step of slices."""
        if self._forwards:
            self.synchronize()

    def restored(self) -> None:
        """Note that the buffers have been reset to their values from before the step, which are equal on all ranks."""
        self._forwards = 0

    def forward_begins(self) -> bool:
        """Count a forward that all ranks run, and return whether buffers are broadcast for it.

        If so, make the buffers equal first, unless they already are.
        """
        travels = bool(self._is_wanted())
        self._ledger.forward(broadcasts=travels)
        # A second forward before the backward starts from rank 0's buffers, as with torch DDP; with virtual ranks it
        # continues with the buffers of its slice, because rank 0 may be in another one.
        if travels and self.statistics is None:
            self.begin_step()
        self._forwards += 1
        return travels

    def synchronize(self) -> bool:
        """Make the buffers equal now; returns whether there are any to synchronize."""
        if not self._is_wanted():
            return False
        if self._join_events.enabled:
            self._join_events.announce(Event.BUFFERS)
        self.exchange()
        self._forwards = 0
        return True

    # -- with a backward ----------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Launch the broadcast at the end of a synchronized backward, if forwards have run; the same on all ranks."""
        if self.statistics is not None:
            self.statistics.launch()
        # Inside join() every forward announces a separate broadcast.
        if not self._buffers.places or self._join_events.enabled:
            return
        if self._forwards and self._is_wanted():
            self._forwards = 0
            self._at_rest.launch()

    def wait(self) -> None:
        """Wait for the broadcast, if one was launched, and copy its values into the buffers."""
        if is_broadcast := self._at_rest.is_under_way:
            self._at_rest.wait()
        if self.statistics is not None:  # after the broadcast of rank 0's buffers, which are as before the step
            self.statistics.wait(are_rank_0s=is_broadcast)

    # -- inside join --------------------------------------------------------------------------------------------

    def exchange(self) -> None:
        """Collective: copy the buffers of the first rank that has data."""
        self._buffers.broadcast(self._channel, self._join_events.source)

    def taken_along(self) -> list[Tensor]:
        """Return the buffers for the broadcast at the end of ``join``, and count them as equal."""
        self._forwards = 0
        return [buffer.data for buffer in self._buffers.named().values()]
