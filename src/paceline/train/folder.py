"""Opens the Trainer's checkpoint folder, refuses one that contradicts the config, and registers what is saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline import rank_consensus
from paceline.checkpoint import Checkpointer
from paceline.errors import NoCheckpoint, UsageError
from paceline.train.train_config import TrainConfig


def open_folder(config: TrainConfig, shared: Mapping[str, Any], own: Mapping[str, Any]) -> Checkpointer:
    """Return a Checkpointer of the config's folder, with `shared` objects and those that are each rank's `own`.

    Raises:
        NoCheckpoint: if there is no folder to resume from; it is not made.
        UsageError: if the folder is in use, or holds checkpoints that the config does not ask to resume.
    """
    assert config.checkpoint_dir is not None
    if config.resume:
        rank_consensus.decide(rank_consensus.here(), lambda: _expect_folder(config.checkpoint_dir))
    checkpointer = Checkpointer(config.checkpoint_dir, config.keep, async_save=config.async_save)
    try:
        if (steps := checkpointer.steps()) and not config.resume:
            raise UsageError(
                f"{config.checkpoint_dir} already holds checkpoints up to step {steps[-1]}; continue them with "
                "--resume (resume=True), or choose another folder"
            )
        for name, each in shared.items():
            checkpointer.register(name, each)
        for name, each in own.items():
            checkpointer.register(name, each, per_rank=True)
    except BaseException:
        checkpointer.close()
        raise
    return checkpointer


def _expect_folder(folder: Any) -> None:
    if not Path(folder).is_dir():
        raise NoCheckpoint(f"there is no folder {folder} to resume from; check the path, or start without resuming")
