"""What a TrainConfig refuses, and which settings a checkpoint insists on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from paceline.errors import CheckpointMismatch, UsageError
from paceline.train import TrainConfig
from paceline.train.resume.run_identity import Settings

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"epochs": 0}, "epochs must be at least 1, not 0"),
    ({"accumulate": 0}, "accumulate must be at least 1, not 0"),
    ({"keep": 0}, "keep must be at least 1, not 0"),
    ({"log_every": 0}, "log_every must be at least 1, not 0"),
    ({"warmup_steps": -1}, "warmup_steps must be at least 0, not -1"),
    ({"decay": "step"}, "decay must be none, linear, cosine or wsd, not 'step'"),
    ({"decay_to": 0.1}, "decay_to is where a decay ends and needs decay linear"),
    ({"decay": "cosine", "decay_to": 1.5}, "decay_to must be from 0 to 1, not 1.5"),
    ({"decay": "cosine", "decay_to": "0"}, "decay_to must be a number, not '0'"),
    ({"decay": "wsd", "decay_steps": 0}, "decay_steps must be at least 1, not 0"),
    ({"decay": "cosine", "decay_steps": 5}, "decay_steps needs decay wsd, not cosine"),
    ({"wandb_project": ""}, "wandb_project must not be empty"),
    ({"wandb_project": 3}, "wandb_project must be a text, not 3"),
    ({"decay": ["linear"]}, "decay must be none, linear, cosine or wsd, not "),
    ({"lr_scaling": "cubic"}, "lr_scaling must be none, linear or sqrt, not 'cubic'"),
    # These were taken as they came: 1.5 epochs trained 2, resume=True without a folder began anew and wrote nothing.
    ({"epochs": 1.5}, "epochs must be a whole number, not 1.5"),
    ({"epochs": "3"}, "epochs must be a whole number, not '3'"),
    ({"epochs": True}, "epochs must be a whole number, not True"),
    ({"epochs": None}, "epochs or max_steps must say how long to train; give one"),
    ({"accumulate": 2.0}, "accumulate must be a whole number, not 2.0"),
    ({"keep": "3"}, "keep must be a whole number, not '3'"),
    ({"log_every": 1.0}, "log_every must be a whole number"),
    ({"warmup_steps": 0.1}, "warmup_steps must be a whole number"),
    ({"base_batch_size": 32.0}, "base_batch_size must be a whole number"),
    ({"base_batch_size": 0}, "base_batch_size must be at least 1, not 0"),
    ({"checkpoint_dir": "d", "checkpoint_every": 1.0}, "checkpoint_every must be a whole number"),
    ({"clip_norm": "1"}, "clip_norm must be a number, not '1'"),
    ({"clip_norm": True}, "clip_norm must be a number, not True"),
    ({"checkpoint_dir": ""}, "checkpoint_dir must not be empty"),
    ({"checkpoint_dir": "", "resume": True}, "checkpoint_dir must not be empty"),
    ({"checkpoint_dir": 3}, "checkpoint_dir must be a path, not 3"),
    ({"checkpoint_dir": b"runs"}, "checkpoint_dir must be a path, not b'runs'"),
    ({"metrics_file": ""}, "metrics_file must not be empty"),
    ({"tensorboard_dir": ""}, "tensorboard_dir must not be empty"),
    ({"checkpoint_dir": "d", "resume": "false"}, "resume must be True or False, not 'false'"),
    ({"checkpoint_dir": "d", "resume": 1}, "resume must be True or False, not 1"),
    ({"show_progress": None}, "show_progress must be True or False"),
    ({"checkpoint_dir": "d", "allow_changed_settings": True}, "needs resume, as it is about"),
    ({"clip_norm": 0.0}, "clip_norm must be a finite number greater than 0, not 0.0"),
    ({"clip_norm": float("nan")}, "clip_norm must be a finite number greater than 0, not nan"),
    ({"checkpoint_dir": "d", "checkpoint_every": 0}, "checkpoint_every must be at least 1, not 0"),
    ({"checkpoint_every": 5}, "checkpoint_every needs checkpoint_dir"),
    ({"allow_changed_data": True}, "allow_changed_data needs resume, as it is about a checkpoint's data"),
    ({"async_save": True}, "async_save needs checkpoint_dir"),
    ({"checkpoint_dir": "d", "async_save": 1}, "async_save must be True or False"),
    ({"resume": True}, "resume needs checkpoint_dir"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_a_value_out_of_range_is_refused_where_the_config_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainConfig(**{"epochs": 1, **options})


def test_whole_numbers_of_numpy_and_paths_are_taken() -> None:
    config = TrainConfig(epochs=numpy.int64(3), clip_norm=numpy.float32(0.5), checkpoint_dir=Path("runs"))  # type: ignore[arg-type]
    assert (config.epochs, config.clip_norm, config.checkpoint_dir) == (3, 0.5, "runs")
    assert (type(config.epochs), type(config.clip_norm)) == (int, float)


OTHER: list[tuple[str, dict[str, Any], str]] = [
    ("accumulate", {"accumulate": 2}, "accumulate=1, this run has accumulate=2"),
    ("clip_norm", {"clip_norm": 1.0}, "clip_norm=None, this run has clip_norm=1.0"),
    ("decay", {"decay": "linear"}, "decay='none', this run has decay='linear'"),
    ("warmup_steps", {"warmup_steps": 3}, "warmup_steps=0, this run has warmup_steps=3"),
    ("base_batch_size", {"base_batch_size": 8}, "base_batch_size=None, this run has base_batch_size=8"),
]


@pytest.mark.parametrize(("name", "options", "message"), OTHER, ids=[name for name, *_ in OTHER])
def test_a_checkpoint_of_other_settings_is_refused_by_name(name: str, options: dict[str, Any], message: str) -> None:
    saved = Settings(TrainConfig(epochs=2), lr=[0.1]).state_dict()
    with pytest.raises(CheckpointMismatch, match=message):
        Settings(TrainConfig(epochs=2, **options), lr=[0.1]).load_state_dict(saved)


def test_settings_given_beside_the_config_count() -> None:
    saved = Settings(TrainConfig(epochs=2), lr=[0.1]).state_dict()
    with pytest.raises(CheckpointMismatch, match=r"lr=\[0.1\], this run has lr=\[0.2\]"):
        Settings(TrainConfig(epochs=2), lr=[0.2]).load_state_dict(saved)


def test_a_run_may_be_made_longer_unless_its_schedule_depends_on_its_length() -> None:
    Settings(TrainConfig(epochs=9)).load_state_dict(Settings(TrainConfig(epochs=2)).state_dict())
    saved = Settings(TrainConfig(epochs=2, decay="linear")).state_dict()
    with pytest.raises(CheckpointMismatch, match="epochs=2, this run has epochs=9"):
        Settings(TrainConfig(epochs=9, decay="linear")).load_state_dict(saved)


def test_where_and_how_often_to_write_may_change() -> None:
    saved = Settings(TrainConfig(epochs=2, checkpoint_dir="a", checkpoint_every=3, keep=1, log_every=1)).state_dict()
    other = TrainConfig(epochs=2, checkpoint_dir="b", keep=9, resume=True, metrics_file="m", show_progress=False)
    Settings(other).load_state_dict(saved)


@pytest.mark.parametrize("name", ["batch_size", "seed"])
def test_what_the_position_in_the_data_depends_on_never_changes(name: str) -> None:
    saved = Settings(TrainConfig(epochs=2), **{name: 1}).state_dict()
    allowed = TrainConfig(epochs=2, checkpoint_dir="d", resume=True, allow_changed_settings=True)
    with pytest.raises(CheckpointMismatch, match=f"{name}=1, this run has {name}=2; resume with the same settings, or"):
        Settings(allowed, **{name: 2}).load_state_dict(saved)
