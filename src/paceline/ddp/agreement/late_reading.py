"""Whether ranks may go on before they have read each other's control blocks: the same decision on all of them.

A block that holds a surprise (a late delta, a sparse gradient, an exception on another rank) asks for more collectives.
If one rank ran them at the end of its backward and another at its optimizer step, they could wait for each other for
ever where the training loop has a collective of its own in between. So the decision rests on nothing but blocks of
earlier steps, which every rank has read.
"""

from __future__ import annotations

import os

TEST_HOST_CHANNEL = "PACELINE_TEST_HOST_CHANNEL"
"""Variable in the environment of tests, with which ranks on CPUs open a host channel and read control blocks late, as
beside GPUs; with the value ``always`` also after surprises."""
USUAL_STEPS = 16
"""Number of blocks without a surprise that must follow one with a surprise before blocks are read late again."""


def patience() -> int:
    """Return the number of usual blocks after which one is read late; tests may ask for every block."""
    return 0 if os.environ.get(TEST_HOST_CHANNEL) == "always" else USUAL_STEPS


class LateReading:
    """Decides from the blocks so far whether the next one may be read late.

    Args:
        is_wanted: whether blocks travel beside the gradients, so that there is something to gain.
        patience: number of usual blocks after a surprise; 0 to read late whatever earlier blocks held.
    """

    is_quiet: bool
    """Whether the latest blocks had no surprise, so that none is expected in the next."""

    def __init__(self, *, is_wanted: bool, patience: int = USUAL_STEPS) -> None:
        self._is_wanted, self._patience = is_wanted, patience
        # Blocks without a surprise that are still to come. The first block is always read: it has the order of arrival.
        self._missing = min(1, patience)
        self.is_quiet = self._missing == 0

    @property
    def is_allowed(self) -> bool:
        """Whether the next block may be read late, on every rank."""
        return self._is_wanted and self.is_quiet

    def note(self, *, is_usual: bool) -> None:
        """Count a block that was read; it had no surprise if it `is_usual`."""
        self._missing = max(0, self._missing - 1) if is_usual else self._patience
        self.is_quiet = self._missing == 0
