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
    """Time spent training in this process: forward, backward, optimizer, data and checkpoints, not evaluation."""
    samples: int = 0
    """Samples that all ranks trained on in this process; one that an order names twice counts twice."""
    weight: float = 0.0
    """Sum of the weights that the loss function returned on all ranks in this process."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates that the latest step used, one for each parameter group."""
    exposed_seconds: float = 0.0
    """Part of ``seconds`` in which this rank waited for communication at the end of backwards."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last evaluation; with ``load_best_at_end`` that of the best checkpoint."""
    best_step: int | None = None
    """Step of the best checkpoint, with ``keep_best``, once training has ended."""
    history: History | None = None
    """Restarts after failures, and steps that were computed again; None where there was no Checkpointer."""
    failed_saves: list[int] = field(default_factory=list)
    """Steps whose checkpoint could not be written, for example because of a full disk; rank 0 has warned."""

    @property
    def samples_per_second(self) -> float:
        """Samples per second, over all ranks."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def exposed_share(self) -> float:
        """Share of the training time spent waiting for communication, 0..1."""
        return self.exposed_seconds / self.seconds if self.seconds else 0.0
