"""Optimizers whose state and work are divided among the ranks.

Rooms, each above those that it imports:

    sharded_optimizer
    sharding · states
    owned_shard
    segments · trained_parameters
    arguments · elementwise · sharding_plan
"""

from paceline.optim.sharded_optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
