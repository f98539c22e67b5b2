"""The result of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.checkpoint.recovery.recovery import History


@dataclass
class Result:
    """The outcome of a training run."""

    steps: int = 0
    """Optimizer steps since the beginning of the run, including those before a resume."""
    resumed_from_step: int | None = None
    seconds: float = 0.0
    """Time spent on training in this process, excluding evaluations."""
    samples: int = 0
    """Samples that all ranks together have trained on since this process started."""
    weight: float = 0.0
    """Sum of the weights that the loss function has returned on all ranks since this process started."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates of the latest step, one per parameter group."""
    exposed_seconds: float = 0.0
    """Part of ``seconds`` that this rank spent waiting for communication at the end of backward passes."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last evaluation, or of the best checkpoint with ``load_best_at_end``."""
    best_step: int | None = None
    """Step of the best checkpoint according to ``keep_best``; set when the training ends."""
    history: History | None = None
    """Restarts after failures, and repeated steps; None without a Checkpointer."""
    failed_saves: list[int] = field(default_factory=list)
    """Steps whose checkpoint could not be written, for example because of a full disk."""

    @property
    def samples_per_second(self) -> float:
        """Samples per second, over all ranks."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def exposed_share(self) -> float:
        """Share of the training time spent waiting for communication, from 0 to 1."""
        return self.exposed_seconds / self.seconds if self.seconds else 0.0
