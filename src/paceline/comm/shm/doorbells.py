"""Signals between the ranks of one host: eventfds that ring, and pidfds that tell of an end.

Decision 0006 says why.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.comm.shm.introduction import Peer

_DONE = 32
"""The value of a ring has the number of operations done from this bit on, and the number of those posted below."""


@dataclass(slots=True)
class Progress:
    """How far a peer has come, as of its last ring."""

    posted: int = 0
    done: int = 0


class Signals:
    """This rank's bells: those that it rings for its peers, and those that they ring for it."""

    progress: dict[int, Progress]
    """Progress of each peer, by its rank."""
    ended: set[int]
    """Ranks whose process is known to have ended; all that they rang before has been heard."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers = list(peers)
        self.progress = {peer.rank: Progress() for peer in peers}
        self.ended = set()
        self._untold = 0
        """The value of the next ring; 0: there is nothing to tell."""
        self._interrupt = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        for descriptor in self._alarms():
            self._poll.register(descriptor, select.POLLIN)

    def announce(self, posted: int = 0, done: int = 0) -> None:
        """Let the next ring tell of so many more operations posted and done."""
        self._untold += posted + (done << _DONE)

    def ring(self) -> None:
        """Tell everybody what there is to tell, if anything."""
        if self._untold:
            value, self._untold = self._untold, 0
            for peer in self._peers:
                os.eventfd_write(peer.bell, value)

    def listen(self) -> None:
        """Note how far those peers are that rang."""
        for peer in self._peers:
            try:
                value = os.eventfd_read(peer.ringing)
            except BlockingIOError:
                continue
            progress = self.progress[peer.rank]
            progress.posted += value & ((1 << _DONE) - 1)
            progress.done += value >> _DONE

    def posted(self, ours: int) -> int:
        """Return how many operations all peers have posted; `ours`, this rank's number, if there are none."""
        return min((peer.posted for peer in self.progress.values()), default=ours)

    def done(self, ours: int) -> int:
        """Return how many operations all peers are done with; `ours`, this rank's number, if there are none."""
        return min((peer.done for peer in self.progress.values()), default=ours)

    def sleep(self, seconds: float, others: Sequence[Signals]) -> bool:
        """Sleep until somebody rings here or for one of `others`, or ends; returns whether that was so."""
        ready = {descriptor for descriptor, _ in self._poll_with(others).poll(seconds * 1000)}
        self.listen()
        for peer in self._peers:
            if peer.alive in ready:  # its rings before it ended count, and have been heard now
                self._poll.unregister(peer.alive)
                self.ended.add(peer.rank)
        return bool(ready)

    def _poll_with(self, others: Sequence[Signals]) -> select.poll:
        """Return the poll that wakes us while `others` have operations under way, too.

        Ranks may wait for two groups in different order; then each has to do its part of the one it does not wait for.
        """
        if not others:
            return self._poll
        poll = select.poll()
        rung = [peer.ringing for other in others for peer in other._peers]
        for descriptor in (*self._alarms(), *rung):
            poll.register(descriptor, select.POLLIN)
        return poll

    def _alarms(self) -> list[int]:
        """Return the descriptors that concern us: those that ring, and those of peers not yet known to have ended."""
        alive = [peer.alive for peer in self._peers if peer.rank not in self.ended]
        return [self._interrupt, *(peer.ringing for peer in self._peers), *alive]

    def interrupt(self) -> None:
        """Wake whoever sleeps."""
        os.eventfd_write(self._interrupt, 1)

    def close(self) -> None:
        """Give the descriptors back."""
        for descriptor in (self._interrupt, *(held for peer in self._peers for held in peer.descriptors())):
            os.close(descriptor)
        self._peers = []
