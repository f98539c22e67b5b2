"""The phases of one synchronized backward, and the findings with which it comes to its end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from paceline.ddp.agreement.control_block import Status
from paceline.ddp.engine.backward.new_parameters import AgreedChange
from paceline.errors import PacelineError


class Phase(Enum):
    """The phase of a backward; :data:`NEXT` lists those that may follow each."""

    IDLE = "no synchronized backward is under way"
    LAUNCHING = "gradients arrive, complete buckets are launched"
    WAITING = "everything is launched, results are waited for"
    UNREAD = "averages are shown, the other ranks' control blocks are not read yet"
    ABORTED = "an exception ended backward; what the other ranks count on is still owed"
    BROKEN = "a collective failed"


NEXT = {
    Phase.IDLE: {Phase.LAUNCHING, Phase.BROKEN},  # broken where new parameters could not be taken in
    Phase.LAUNCHING: {Phase.WAITING, Phase.ABORTED, Phase.BROKEN},
    Phase.WAITING: {Phase.IDLE, Phase.UNREAD, Phase.ABORTED, Phase.BROKEN},
    Phase.UNREAD: {Phase.WAITING, Phase.BROKEN},
    Phase.ABORTED: {Phase.LAUNCHING, Phase.WAITING},  # when what is owed is carried out
    Phase.BROKEN: set[Phase](),
}


@dataclass(frozen=True)
class Outcome:
    """The findings of a backward that has come to its end."""

    statuses: list[Status]
    """Statuses that the ranks reported."""
    new: AgreedChange | None
    """Parameters that the module got later, as all ranks found them."""
    unused: str | None
    """Message about unused parameters."""
    drift: str | None
    """Message about replicas that differ."""
    used: PacelineError | None
    """The error of averages that were used on this rank before they were whole."""


AGREED = Outcome([], None, None, None, None)
"""No rank had anything to report."""
