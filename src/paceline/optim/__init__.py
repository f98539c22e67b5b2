"""Optimizers of which every rank holds and computes its own part.

Rooms, each above those that it imports:

    sharded_optimizer
    sharding · states
    owned_shard
    segments · trained_parameters
    arguments · elementwise · sharding_plan
"""

from paceline.optim.sharded_optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
