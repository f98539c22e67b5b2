"""What a training run is told, checked where it is made."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.train.schedule import Decay, LrScaling


@dataclass(frozen=True)
class TrainConfig:
    """How long to train, with which schedule, and what to keep.

    The global batch of a step is ``accumulate`` times the loader's. Steps are optimizer steps.

    Raises:
        UsageError: for values out of range, or that need one another.
    """

    epochs: int
    """Passes over the training data."""
    accumulate: int = 1
    """Micro-batches per step."""
    lr_scaling: LrScaling = "none"
    """How the optimizer's learning rate, meant for ``base_batch_size``, follows the global batch."""
    base_batch_size: int | None = None
    """The global batch for which the learning rate was chosen, in samples."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises linearly."""
    decay: Decay = "none"
    """Whether the learning rate falls after the warm-up."""
    clip_norm: float | None = None
    """Largest norm of the gradient; None for no clipping."""
    check_finite: bool = True
    """Whether a gradient that holds NaN or Inf ends training on every rank, before the optimizer steps. On a GPU
    the CPU waits for that in every step."""
    checkpoint_dir: str | None = None
    """Folder of checkpoints; None to keep none."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; None to write one at the end of every epoch."""
    keep: int = 3
    """How many checkpoints stay."""
    resume: bool = False
    """Go on from the newest checkpoint in ``checkpoint_dir``."""
    metrics_file: str | None = None
    """JSON Lines file to which rank 0 writes a line for every ``log_every`` steps and every evaluation."""
    tensorboard_dir: str | None = None
    """Folder to which rank 0 writes the same for TensorBoard."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    show_progress: bool = True
    """A progress bar on rank 0, or a line for every epoch where output is no terminal."""

    def __post_init__(self) -> None:
        for name in ("epochs", "accumulate", "keep", "log_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.warmup_steps < 0:
            raise UsageError(f"warmup_steps must be at least 0, not {self.warmup_steps}")
        if self.decay not in ("none", "linear"):
            raise UsageError(f"decay must be none or linear, not {self.decay!r}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError(f"clip_norm must be greater than 0, not {self.clip_norm}")
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise UsageError(f"checkpoint_every must be at least 1, not {self.checkpoint_every}")
        if self.checkpoint_dir is None and (self.resume or self.checkpoint_every):
            raise UsageError("resume and checkpoint_every need checkpoint_dir, the folder of the checkpoints")
