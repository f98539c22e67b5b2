"""The settings that determine a run's results, which are compared when the run is resumed."""

from __future__ import annotations

from typing import Any

from paceline.core.processes import consensus
from paceline.core.telemetry.users_code import warn
from paceline.errors import CheckpointMismatch, CheckpointWarning
from paceline.train.config import TrainConfig

_DECISIVE = ("accumulate", "clip_norm", "precision")
"""The length is not included, because a run may be made longer, unless its schedule depends on the length."""
_FIXED = ("batch_size", "scheduler", "virtual_ranks")
"""Settings that must stay the same: the data position or sums of losses depend on them, or schedulers restore them."""


class Settings:
    """Raises an error if a checkpoint was written with different settings, unless the config allows changes."""

    state_is_constant = True

    def __init__(self, config: TrainConfig, **more: Any) -> None:
        self._allow_changed = config.allow_changed_settings
        self._values: dict[str, Any] = {name: getattr(config, name) for name in _DECISIVE} | more

    def state_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def check_state_dict(self, saved: dict[str, Any]) -> None:
        for name, saved_value, value in self._changed(saved):
            if self._allow_changed and name not in _FIXED:
                continue
            allow = "accept the change with allow_changed_settings=True (--allow-changed-settings), "
            raise CheckpointMismatch(
                f"the checkpoint was written with {name}={saved_value!r}, but this run has {name}={value!r}; "
                f"resume with the same settings, {'' if name in _FIXED else allow}or start again in another folder"
            )

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        changed = [f"{name}={value!r} instead of {saved_value!r}" for name, saved_value, value in self._changed(saved)]
        if changed and consensus.here().rank == 0:
            warn(f"the run continues with changed settings: {', '.join(changed)}", CheckpointWarning)

    def _changed(self, saved: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        """Return the name, the saved value and this run's value of each setting that differs."""
        rows = [(name, saved.get(name), self._values.get(name)) for name in sorted(saved.keys() | self._values.keys())]
        return [(name, saved_value, value) for name, saved_value, value in rows if saved_value != value]
