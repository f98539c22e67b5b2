"""The epoch and the position in it that the next pass over the data begins at, and their saved state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.state import data_position
from paceline.core.state.rng import derive_seed
from paceline.data.arguments import at_least
from paceline.errors import CheckpointMismatch


class EpochPosition:
    """Base class of the sources that split data among ranks and count the consumed part of an epoch.

    Attributes:
        epoch: the pass over the data that the next sample belongs to, from 0.
        position: how much of this epoch the next pass skips at its beginning.
    """

    epoch: int
    position: int
    rank: int
    world_size: int
    seed: int
    drop_last: bool
    key: int
    """Index of this source in the script, the same on every rank; -1 if there is only one rank."""
    _started: tuple[int, int]
    """Epoch and position at which the latest pass began."""

    def _begin_at_the_start(self) -> None:
        """Set the position of a new source, whose `world_size` is set already."""
        self.epoch, self.position = 0, 0
        self._started = (0, 0)
        self.key = data_position.key_of_caller() if self.world_size > 1 else -1

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that comes next; the current one keeps its position, another begins at its start."""
        if at_least("epoch", epoch, 0) != self.epoch:
            self._move(epoch, 0)

    def _state(self, consumed: int | None) -> dict[str, Any]:
        """Return epoch and position with the settings that they are relative to.

        `consumed` counts from where the latest pass began; None takes the position that is known.
        """
        if consumed is None:
            epoch, position = self.epoch, self._known_position()
        else:
            epoch, position = self._started[0], self._started[1] + at_least("consumed", consumed, 0)
        return {"epoch": epoch, "position": position, **self._identity()}

    def _known_position(self) -> int:
        """Return the position to save where the script does not name it."""
        return self.position

    def _check_settings(self, state: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Check that the `settings` are equal in the saved `state`.

        Raises:
            CheckpointMismatch: if they differ; names the first difference.
        """
        for name, ours in settings.items():
            if (theirs := state.get(name)) != ours:
                raise CheckpointMismatch(
                    f"rank {self.rank}: {name} was {theirs!r} when the checkpoint was written but is "
                    f"{ours!r} now; {self._remedy(name, theirs)}"
                )

    def _describe_origin(self, **fields: int) -> data_position.Origin:
        """Describe the data for the other ranks, with the `fields` that differ by the kind of source."""
        seed = self.seed if self.seed < data_position.LIMIT else data_position.short(derive_seed(self.seed))
        return data_position.Origin(source=self.key, drop_last=bool(self.drop_last), seed=seed, **fields)

    def _identity(self) -> dict[str, Any]:
        """Return the settings that a position is relative to; they must be equal when it is loaded."""
        raise NotImplementedError

    def _remedy(self, name: str, theirs: Any) -> str:
        """Return the advice for a setting `name` that was `theirs` when the state was saved."""
        raise NotImplementedError

    def _move(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
