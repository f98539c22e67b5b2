"""The wrapper, its reducer, and functions for plain training loops."""

from paceline.ddp.metrics import gather_for_metrics, mean_over_ranks
from paceline.ddp.training_loop import accumulate
from paceline.ddp.wrapper import DistributedDataParallel

__all__ = [
    "DistributedDataParallel",
    "accumulate",
    "gather_for_metrics",
    "mean_over_ranks",
]
