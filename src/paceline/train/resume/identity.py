"""Facts that must be equal when a run is resumed: the settings that decide its numbers, and its data."""

from __future__ import annotations

from typing import Any

from paceline.core.processes import consensus
from paceline.core.telemetry.users_code import warn
from paceline.data import DataLoader
from paceline.errors import CheckpointMismatch, CheckpointWarning
from paceline.train.config import TrainConfig
from paceline.train.resume.data_fingerprint import changes, fingerprint

_DECISIVE = ("accumulate", "clip_norm", "precision")
"""Not the length: a run may be made longer, unless its schedule, which is compared too, depends on it."""
_FIXED = ("batch_size", "seed", "scheduler")
"""Without the first two a position in the data has no meaning; a scheduler brings its settings with its state."""


class Settings:
    """The settings that decide a run's numbers; a checkpoint written under other settings is refused."""

    state_is_constant = True
    """Constant, so no step needs to copy it."""

    def __init__(self, config: TrainConfig, **more: Any) -> None:
        self._allow_changed = config.allow_changed_settings
        self._values: dict[str, Any] = {name: getattr(config, name) for name in _DECISIVE} | more

    def state_dict(self) -> dict[str, Any]:
        """Return the settings by name."""
        return dict(self._values)

    def check_state_dict(self, saved: dict[str, Any]) -> None:
        """Compare with the saved settings."""
        for name, before, now in self._changed(saved):
            if self._allow_changed and name not in _FIXED:
                continue
            take_over = "take over this run's with allow_changed_settings=True (--allow-changed-settings), "
            raise CheckpointMismatch(
                f"the checkpoint was written with {name}={before!r}, this run has {name}={now!r}; "
                f"resume with the same settings, {'' if name in _FIXED else take_over}or start anew in another folder"
            )

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Compare with the saved settings; rank 0 logs the accepted differences."""
        self.check_state_dict(saved)
        changed = [f"{name}={now!r} instead of {before!r}" for name, before, now in self._changed(saved)]
        if changed and consensus.here().rank == 0:
            warn(f"this run's settings are taken over: {', '.join(changed)}", CheckpointWarning)

    def _changed(self, saved: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        """Return name, saved value and own value of the settings that differ."""
        both = [(name, saved.get(name), self._values.get(name)) for name in sorted(saved.keys() | self._values.keys())]
        return [(name, before, now) for name, before, now in both if before != now]


class DataIdentity:
    """The data that a run trains on; a checkpoint written on other data is refused, unless `allow_changed`.

    A difference is detected if :mod:`paceline.train.resume.data_fingerprint` covers it.
    """

    state_is_constant = True
    """As for :class:`Settings`."""

    def __init__(self, dataset: Any, allow_changed: bool = False) -> None:
        self._dataset = dataset
        self._allow_changed = allow_changed
        self._fingerprint = fingerprint(dataset)

    def state_dict(self) -> dict[str, Any]:
        """Return the data set's fingerprint."""
        return {"fingerprint": self._fingerprint}

    def check_state_dict(self, saved: dict[str, Any]) -> None:
        """Compare with the saved fingerprint."""
        if not self._allow_changed and (changed := self._changes(saved)):
            raise CheckpointMismatch(
                f"the training data are not those that the checkpoint was written with: {'; '.join(changed)}; resume "
                "on the same data, go on with these with allow_changed_data=True (--allow-changed-data), or start "
                "anew in another folder"
            )

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Compare with the saved fingerprint; rank 0 logs the accepted changes."""
        self.check_state_dict(saved)
        if (changed := self._changes(saved)) and consensus.here().rank == 0:
            warn(
                f"the run goes on with training data that have changed: {'; '.join(changed)}",
                CheckpointWarning,
            )

    def _changes(self, saved: dict[str, Any]) -> list[str]:
        return [] if saved["fingerprint"] == self._fingerprint else changes(self._dataset, saved["fingerprint"])


class ChangedDataLoader:
    """A loader that can resume although its data set has another length. The current epoch then begins again."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self.progress = loader.progress

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, or at the start of its epoch."""
        size = self._loader.state_dict().get("size")
        if state.get("size") != size:
            if state.get("position") and consensus.here().rank == 0:
                warn(
                    f"epoch {state.get('epoch')} begins again, because its order is another one with {size} samples",
                    CheckpointWarning,
                )
            # Position 0 of the epoch, because the old position means other samples in the new order.
            state = {**state, "size": size, "position": 0, "order": None}
        self._loader.load_state_dict(state)
