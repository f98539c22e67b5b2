"""The settings that decide a run's numbers, compared when it is resumed."""

from __future__ import annotations

from typing import Any

from paceline.core.processes import consensus
from paceline.core.telemetry.users_code import warn
from paceline.errors import CheckpointMismatch, CheckpointWarning
from paceline.train.config import TrainConfig

_DECISIVE = ("accumulate", "clip_norm", "precision")
"""Not the length: a run may be made longer, unless its schedule, which is compared too, depends on it."""
_FIXED = ("batch_size", "seed", "scheduler")
"""Without the first two a position in the data has no meaning; a scheduler brings its settings with its state."""


class Settings:
    """Refuses a checkpoint that was written under other settings, unless the config allows changed ones."""

    state_is_constant = True

    def __init__(self, config: TrainConfig, **more: Any) -> None:
        self._allow_changed = config.allow_changed_settings
        self._values: dict[str, Any] = {name: getattr(config, name) for name in _DECISIVE} | more

    def state_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def check_state_dict(self, saved: dict[str, Any]) -> None:
        for name, before, now in self._changed(saved):
            if self._allow_changed and name not in _FIXED:
                continue
            take_over = "take over this run's with allow_changed_settings=True (--allow-changed-settings), "
            raise CheckpointMismatch(
                f"the checkpoint was written with {name}={before!r}, this run has {name}={now!r}; "
                f"resume with the same settings, {'' if name in _FIXED else take_over}or start anew in another folder"
            )

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        changed = [f"{name}={now!r} instead of {before!r}" for name, before, now in self._changed(saved)]
        if changed and consensus.here().rank == 0:
            warn(f"this run's settings are taken over: {', '.join(changed)}", CheckpointWarning)

    def _changed(self, saved: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        """Return name, saved value and own value of the settings that differ."""
        both = [(name, saved.get(name), self._values.get(name)) for name in sorted(saved.keys() | self._values.keys())]
        return [(name, before, now) for name, before, now in both if before != now]
