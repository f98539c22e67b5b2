"""The state of a rank at the time of a failure, read from its black box, and its description in words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.output.wording import duration
from paceline.core.processes.missing_ranks import named_ranks, ranks_by_value
from paceline.core.telemetry.black_box import Snapshot

UNWINDING_S = 5.0
"""Maximum time between an exception in a phase and the rank's failure."""
_DOING = {
    "loop": "in the script's own code",
    "data wait": "waiting for data",
    "wait": "waiting for gradients",
    "bucket wait": "waiting for gradients",
    "checkpoint": "saving a checkpoint",
    "collective": "in a collective",
    "optimizer": "in the optimizer",
}


@dataclass(frozen=True)
class State:
    """The step and phase of a rank at a given time."""

    completed: int | None
    """The job's last completed step; None if unknown."""
    phase: str | None = None
    """One of :data:`paceline.core.telemetry.black_box.PHASES`; None before the first step."""
    seconds: float = 0.0
    """Seconds in the phase."""
    bucket: int | None = None
    """The awaited bucket."""

    @property
    def step(self) -> int | None:
        """The job's current step; the first is 1."""
        return None if self.completed is None else self.completed + 1

    @property
    def _step(self) -> str:
        return "an unknown step" if self.step is None else f"step {self.step}"

    @property
    def moment(self) -> str:
        """Description for the rank that failed, such as "in step 41, backward, for 300 ms"."""
        if self.phase is None:
            return "before its first step"
        phase = _DOING["loop"] if self.phase == "loop" else self.phase
        bucket = "" if self.bucket is None else f" {self.bucket}"
        return f"in {self._step}, {phase}{bucket}, for {duration(self.seconds)}"

    @property
    def doing(self) -> str:
        """Description for the other ranks. Ranks with the same activity have the same description."""
        if self.phase is None:
            return "had not begun the first step"
        return f"{_DOING.get(self.phase, f'in {self.phase}')} in {self._step}"


NOT_BEGUN = State(None)


def state_of(snapshot: Snapshot | None, moment: float, raised: bool = True) -> State:
    """Return the state of a rank at `moment`.

    Args:
        snapshot: the rank's box; None if it was never opened.
        moment: time of the failure or the check, on ``time.monotonic``.
        raised: whether the rank may have raised an exception; if it did, its state is that of the exception's phase.
    """
    if snapshot is None:
        return NOT_BEGUN
    origin = snapshot.raised
    if raised and origin is not None and moment - origin.until <= UNWINDING_S:
        return State(snapshot.completed, origin.phase, max(origin.until - origin.since, 0.0), origin.bucket)
    return State(snapshot.completed, snapshot.phase, max(moment - snapshot.since, 0.0), snapshot.bucket)


def doings(ranks: Iterable[tuple[int, str]]) -> list[str]:
    """Return one line per activity, such as "ranks 0, 2: waiting for gradients in step 41"."""
    return [f"{named_ranks(numbers)}: {text}" for text, numbers in ranks_by_value(ranks).items()]
