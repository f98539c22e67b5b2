"""Optimizers whose state and work are divided among the ranks, and optimizers for slow networks."""

from paceline.optim.local_sgd import DiLoCo, LocalSGD
from paceline.optim.sharded_optimizer import ShardedOptimizer

__all__ = ["DiLoCo", "LocalSGD", "ShardedOptimizer"]
