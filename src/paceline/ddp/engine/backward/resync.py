"""Comes back to a backward that is over, because peers still wait for it, or their reports are not read yet."""

from __future__ import annotations

from collections.abc import Generator

from paceline.ddp.engine.backward.backward import Backward
from paceline.ddp.engine.backward.concurrent_wrappers import read_all, resync_all
from paceline.ddp.engine.backward.phase import Phase
from paceline.ddp.engine.backward.restore import resync
from paceline.ddp.engine.interface import GradientEngine
from paceline.ddp.engine.parts import EngineParts
from paceline.errors import CommunicationError, UsageError


class Settling(GradientEngine):
    """The part of the reducer that comes back to its last backward."""

    _parts: EngineParts
    """Replaced between two backwards only; a backward keeps those that it began with."""
    _backward: Backward
    """The backward under way, or one that is not settled; an idle one between two."""

    @property
    def is_aborted(self) -> bool:
        """Whether an exception ended a backward while peers still wait for this rank's part."""
        self._backward.notice_exception()
        return self._backward.phase is Phase.ABORTED

    def resync(self) -> Generator[None, None, None]:
        """Carry the backward that an exception ended to its end."""
        return resync(self._backward)

    def read_blocks(self) -> None:
        """Carry the backward to its end that has shown averages before it read control blocks, if there is one."""
        if self._backward.phase is Phase.UNREAD:
            self.complete()

    def complete(self) -> None:
        """Carry a synchronization to its end."""
        while self._backward.advance():
            pass

    def read_late(self) -> None:
        """Read what other ranks reported of the last backward, as do all wrappers that have not done so."""
        read_all()

    def resync_aborted(self) -> None:
        """Take part in collectives that other ranks wait for since an exception; in all wrappers."""
        if self._backward.phase is Phase.BROKEN:
            raise CommunicationError(
                f"rank {self._parts.channel.rank}: a step of this model has failed in the middle before, so ranks no "
                "longer agree on where they are; start again from the last checkpoint"
            )
        resync_all()
        read_all()

    def check_idle(self) -> None:
        """Refuse to go on where a backward has not come to its end."""
        self._backward.notice_exception()
        if (phase := self._backward.phase) not in (Phase.IDLE, Phase.UNREAD):
            raise UsageError(f"rank {self._parts.channel.rank}: the last backward has not ended: {phase.value}")
