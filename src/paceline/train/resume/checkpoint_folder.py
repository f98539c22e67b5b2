"""Opens the Trainer's checkpoint folder, checks it against the config, and registers the objects to save."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.checkpoint import Checkpointer
from paceline.checkpoint.objects.registered import Registered
from paceline.core.processes import consensus
from paceline.core.telemetry.step_progress import RESTARTS, job_folder
from paceline.errors import NoCheckpoint, UsageError
from paceline.train.config import TrainConfig

logger = logging.getLogger(__name__)
_numbers = itertools.count()
"""Numbers of the Trainers of this process that save nothing on disk."""


def is_restart() -> bool:
    """Return whether the launcher has started the ranks again after a failure."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def open_memory(config: TrainConfig, shared: Mapping[str, Any], own: Mapping[str, Any]) -> Checkpointer | None:
    """Return a Checkpointer used only for a rescue, in the memory of a job whose ranks are restarted; otherwise None.

    Also return None for objects that cannot be saved, because the user did not ask for checkpoints.
    """
    job = job_folder()
    if job is None or not int(os.environ.get(RESTARTS, "0")):
        return None
    folder = job / "checkpoints" / str(next(_numbers))
    try:
        return open_folder(replace(config, checkpoint_dir=str(folder), resume=False), shared, own)
    except UsageError as error:
        logger.info("a failure would cost all steps of this training: %s", error)
        return None


def open_folder(config: TrainConfig, shared: Mapping[str, Any], own: Mapping[str, Any]) -> Checkpointer:
    """Return a Checkpointer of the config's folder, with `shared` objects and those that are each rank's `own`.

    Raises:
        NoCheckpoint: if there is no folder to resume from; it is not created.
        UsageError: if the folder is in use, or holds checkpoints that the config does not ask to resume.
    """
    assert config.checkpoint_dir is not None
    # A restarted job may have failed before it made its folder, which the user's --resume must not forbid.
    if config.resume and not is_restart():
        consensus.decide(consensus.here(), lambda: _check_folder(config.checkpoint_dir))
    checkpointer = Checkpointer(
        config.checkpoint_dir, config.keep, config.keep_best, config.best or "max", async_save=config.async_save
    )
    try:
        if (steps := checkpointer.steps()) and not (config.resume or is_restart()):
            raise UsageError(
                f"{config.checkpoint_dir} already holds checkpoints up to step {steps[-1]}; continue them with "
                "--resume (resume=True), or choose another folder"
            )
        for name, each in shared.items():
            checkpointer.register(name, each)
        for name, each in own.items():
            checkpointer.register(name, each, per_rank=True)
    except BaseException:
        checkpointer.close()  # or the folder would stay locked until it is collected
        raise
    return checkpointer


def go_on(checkpointer: Checkpointer, config: TrainConfig) -> int | None:
    """Restore the newest checkpoint if the config says so, or the launcher has started the ranks again after a failure.

    Returns:
        its step; None for a fresh start, also after a failure before there was one.
    """
    step = None
    if checkpointer.steps() if is_restart() else config.resume:
        step = checkpointer.restore(allow_changed_settings=config.allow_changed_settings)
    checkpointer.step()  # before the first optimizer step, so that no later step is lost
    return step


def validate_stateful(name: str, stateful: Any, per_rank: bool) -> None:
    """Check that an object could be registered for checkpoints, of which this run has none.

    Raises:
        UsageError: if it lacks a method, or the name is malformed.
    """
    Registered.of(name, stateful, per_rank, {})


def _check_folder(folder: Any) -> None:
    if not Path(folder).is_dir():
        raise NoCheckpoint(f"there is no folder {folder} to resume from; check the path, or start without resuming")
