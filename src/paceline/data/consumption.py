"""Counts the batches that the script has consumed in a pass, that is, batches handed over before the latest step.

A step is an optimizer step or a synchronized backward pass of any model. A batch is not consumed if the script only
looked at it, or if ``zip`` fetched it before finding that another iterator had ended.
"""

from __future__ import annotations

from paceline.core.state import data_position


class Consumption:
    """Counts the steps between the batches of one pass."""

    consumed: int
    """Position after the last batch that was followed by a step; before the first step, the start of the pass."""
    handed: int
    """Position after the last batch that a loader handed over; -1 if the position was set by other means."""
    window: int
    """Largest number of batches per step in this pass."""
    has_stepped: bool
    """Whether a step followed a batch of this pass."""
    sees_steps: bool
    """Whether a step followed any batch of any pass."""

    def __init__(self) -> None:
        self.sees_steps = False
        self.begin(-1)
        self._open = False

    def begin(self, position: int) -> None:
        """Begin a pass at `position`."""
        self.consumed = self.handed = position
        self.window, self.has_stepped = 0, False
        self._steps = data_position.steps()
        self._open = True  # the script may still step with the batches handed over

    def hand_over(self, position: int) -> None:
        """Record that the batch at `position` is about to be handed over."""
        self.account()
        self._steps = data_position.steps()

    def account(self) -> None:
        """Mark batches as consumed if there was a step since the last one was handed over."""
        if self._open and self.handed > self.consumed and data_position.steps() != self._steps:
            self.window = max(self.window, self.handed - self.consumed)
            self.consumed = self.handed
            self.has_stepped = self.sees_steps = True

    def leave(self) -> None:
        """End the pass: later steps do not belong to its batches."""
        self.account()
        self._open = False

    def position(self) -> int:
        """Return the position to save. If there was never a step, all batches handed over count as consumed."""
        self.account()
        return self.consumed if self.sees_steps else self.handed

    def left_over(self, position: int, length: int | None) -> int | None:
        """Return where to resume a pass that stopped at `position`; None if it continues there or is complete."""
        # A pass that was read to the end without any step, such as an evaluation, is complete.
        is_current = position == self.handed > self.consumed
        return self.consumed if is_current and (position != length or self.has_stepped) else None

    def moved(self) -> None:
        """Record that the position was changed from outside."""
        self.handed, self._open = -1, False
