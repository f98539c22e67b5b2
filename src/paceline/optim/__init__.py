"""Optimizers of which every rank holds and computes its own part."""

from paceline.optim.sharded_optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
