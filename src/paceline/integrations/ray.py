"""Ray Train integration: runs Ray's workers as ranks with the ``"paceline"`` backend, and reports to Ray.

    from paceline.integrations.ray import Report, TorchConfig
    TorchTrainer(train, torch_config=TorchConfig(), scaling_config=ScalingConfig(num_workers=2)).fit()

In ``train``, ``paceline.init()`` uses the process group that Ray created; everything else works as without Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.step_names import newest_step, step_name
from paceline.core.failure_callbacks import show_mistakes_in_one_line
from paceline.errors import MissingExtra
from paceline.train import Run

try:
    from ray import train
    from ray.train import torch as ray_torch
except ImportError:
    show_mistakes_in_one_line()  # normally done by paceline.init(), which a Ray driver does not call
    raise MissingExtra("ray", "ray", "paceline.integrations.ray") from None


def _import_paceline() -> None:
    """Register the backend in a worker: unpickling this function there imports Paceline."""


class _Backend(ray_torch.TorchConfig().backend_cls):  # type: ignore[misc]
    """Ray's backend, which registers the name "paceline" before the workers create their process group."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(_import_paceline)
        super().on_start(worker_group, backend_config)


@dataclass
class TorchConfig(ray_torch.TorchConfig):  # type: ignore[misc]
    """Ray's ``TorchConfig`` with ``"paceline"`` as the default backend. It has the same arguments."""

    backend: str | None = "paceline"

    @property
    def backend_cls(self) -> type[Any]:
        """The backend class that Ray instantiates."""
        return _Backend


class Report:
    """A Trainer callback that reports metrics and checkpoints to Ray.

    Metrics are reported after each evaluation, after each save and at the end, but not after every step, because
    ``ray.train.report`` waits for all workers.

    Args:
        checkpoint_dir: the absolute path of the Trainer's checkpoint folder. Each complete checkpoint in this folder is
            reported, and Ray copies it to Ray's storage. With None, only metrics are reported. A restarted worker
            resumes from this folder and not from Ray's copy, so all hosts must share the folder.
    """

    def __init__(self, checkpoint_dir: str | None = None) -> None:
        self._folder = None if checkpoint_dir is None else Path(checkpoint_dir)
        self._reported = -1
        """Step of the newest reported checkpoint."""

    def on_evaluation(self, run: Run) -> None:
        """Report the metrics and the newest complete checkpoint; one that is still being written is reported later."""
        folder, is_main = self._folder, train.get_context().get_world_rank() == 0
        newest, checkpoint = newest_step(folder) if is_main else None, None
        if folder is not None and newest is not None and newest > self._reported:
            self._reported, checkpoint = newest, train.Checkpoint.from_directory(folder / step_name(newest))
        train.report({"step": run.step, **run.metrics}, checkpoint=checkpoint)

    on_save = on_end = on_evaluation
