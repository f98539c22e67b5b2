"""Values that TrainConfig refuses, and settings that must match a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import CheckpointMismatch, UsageError
from paceline.train import TrainConfig
from paceline.train.checkpoints import Settings

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"epochs": 0}, "epochs must be at least 1, not 0"),
    ({"max_steps": 9}, "epochs 1 and max_steps 9 both set the length; give one of them"),
    ({"accumulate": 0}, "accumulate must be at least 1, not 0"),
    ({"log_every": 0}, "log_every must be at least 1, not 0"),
    # These were accepted unchanged: 1.5 epochs trained 2.
    ({"epochs": 1.5}, "epochs must be a whole number, not 1.5"),
    ({"epochs": True}, "epochs must be a whole number, not True"),
    ({"epochs": None}, "the length of the training is missing; give epochs or max_steps"),
    ({"clip_norm": "1"}, "clip_norm must be a number, not '1'"),
    ({"resume": "false"}, "resume must be True or False, not 'false'"),
    ({"allow_changed_settings": True}, "needs resume"),
    ({"clip_norm": 0.0}, "clip_norm must be a finite number greater than 0, not 0.0"),
    ({"clip_norm": float("nan")}, "clip_norm must be a finite number greater than 0, not nan"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_out_of_range_value_is_refused_when_the_config_is_built(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainConfig(**{"epochs": 1, **options})


OTHER: list[tuple[str, dict[str, Any], str]] = [
    ("accumulate", {"accumulate": 2}, "accumulate=1, but this run has accumulate=2"),
    ("clip_norm", {"clip_norm": 1.0}, "clip_norm=None, but this run has clip_norm=1.0"),
    ("precision", {"precision": "bf16"}, "precision='fp32', but this run has precision='bf16'"),
]


@pytest.mark.parametrize(("name", "options", "message"), OTHER, ids=[name for name, *_ in OTHER])
def test_checkpoint_with_different_settings_is_refused_by_name(
    name: str, options: dict[str, Any], message: str
) -> None:
    saved = Settings(TrainConfig(epochs=2), batch_size=8).state_dict()
    with pytest.raises(CheckpointMismatch, match=message):
        Settings(TrainConfig(epochs=2, **options), batch_size=8).check_state_dict(saved)


def test_run_may_be_extended_and_change_its_logging() -> None:
    saved = Settings(TrainConfig(epochs=2, log_every=1)).state_dict()
    Settings(TrainConfig(epochs=9, resume=True)).check_state_dict(saved)


def test_batch_size_can_never_change() -> None:
    saved = Settings(TrainConfig(epochs=2), batch_size=1).state_dict()
    allowed = TrainConfig(epochs=2, resume=True, allow_changed_settings=True)
    with pytest.raises(CheckpointMismatch, match="batch_size=1, but this run has batch_size=2; resume with the same"):
        Settings(allowed, batch_size=2).check_state_dict(saved)
