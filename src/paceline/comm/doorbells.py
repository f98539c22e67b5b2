"""Signals between the ranks of one host: eventfds for progress, pidfds for the end of a process. See decision 0006."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.comm.handshake import Peer

_DONE = 32
"""Lowest bit of the count of done operations in a ring's value; the bits below it count posted operations."""


@dataclass(slots=True)
class Progress:
    """How many operations a peer had posted and done at its last ring."""

    posted: int = 0
    done: int = 0


class Signals:
    """The eventfds between this rank and its peers, in both directions."""

    progress: dict[int, Progress]
    """Progress of each peer, by rank."""
    ended: set[int]
    """Ranks whose process is known to have ended. Their last ring has already been read."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers = list(peers)
        self.progress = {peer.rank: Progress() for peer in peers}
        self.ended = set()
        self._unannounced = 0
        """Value of the next ring: the operations posted and done since the previous ring."""
        self._interrupt = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._by_eventfd = {peer.ringing: self.progress[peer.rank] for peer in peers}
        """Progress of each peer, by the eventfd that it rings."""
        self._rings = _poll_for(self._by_eventfd)
        self._poll = _poll_for(self._alarms())

    def announce(self, posted: int = 0, done: int = 0) -> None:
        """Add to the numbers of posted and done operations that the next ring announces."""
        self._unannounced += posted + (done << _DONE)

    @property
    def unannounced_done(self) -> int:
        """Number of finished operations that the next ring will announce."""
        return self._unannounced >> _DONE

    def ring(self) -> None:
        """Ring every peer if this rank has posted or done an operation since the last ring."""
        if self._unannounced:
            value, self._unannounced = self._unannounced, 0
            for peer in self._peers:
                os.eventfd_write(peer.bell, value)

    def listen(self) -> bool:
        """Read the peers' rings and update their progress; return whether any peer has rung."""
        # Poll first, because reading an eventfd that has not rung raises, which is slower.
        rung = self._rings.poll(0)
        for descriptor, _ in rung:
            value = os.eventfd_read(descriptor)
            progress = self._by_eventfd[descriptor]
            progress.posted += value & ((1 << _DONE) - 1)
            progress.done += value >> _DONE
        return bool(rung)

    def posted(self, local: int) -> int:
        """Return how many operations all peers have posted; without peers, this rank's number, `local`."""
        return min((peer.posted for peer in self.progress.values()), default=local)

    def done(self, local: int) -> int:
        """Return how many operations all peers have done; without peers, this rank's number, `local`."""
        return min((peer.done for peer in self.progress.values()), default=local)

    def sleep(self, seconds: float, others: Sequence[Signals]) -> bool:
        """Sleep until a peer rings (here or in one of `others`) or ends; return whether that happened."""
        ready = {descriptor for descriptor, _ in self._poll_with(others).poll(seconds * 1000)}
        self.listen()
        for peer in self._peers:
            if peer.alive in ready:  # after listen(), because earlier rings still count
                self._poll.unregister(peer.alive)  # a pidfd stays readable, so every later sleep would return at once
                self.ended.add(peer.rank)
        return bool(ready)

    def _poll_with(self, others: Sequence[Signals]) -> select.poll:
        """Return a poll that also wakes this rank for `others`, which have operations under way.

        If two ranks wait for two groups in opposite orders, each must keep computing for the other group meanwhile.
        """
        if not others:
            return self._poll
        rung = [peer.ringing for other in others for peer in other._peers]
        return _poll_for([*self._alarms(), *rung])

    def _alarms(self) -> list[int]:
        """Return the descriptors to watch: our eventfds, and the pidfds of peers not known to have ended."""
        alive = [peer.alive for peer in self._peers if peer.rank not in self.ended]
        return [self._interrupt, *(peer.ringing for peer in self._peers), *alive]

    def interrupt(self) -> None:
        """Wake a sleeping thread."""
        os.eventfd_write(self._interrupt, 1)

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in (self._interrupt, *(held for peer in self._peers for held in peer.descriptors())):
            os.close(descriptor)
        self._peers, self._rings = [], select.poll()


def _poll_for(descriptors: Iterable[int]) -> select.poll:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return poll
