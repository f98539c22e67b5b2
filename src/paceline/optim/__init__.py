"""Optimizers whose state and work are divided among the ranks."""

from paceline.optim.sharded_optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
