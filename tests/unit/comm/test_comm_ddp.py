"""Our wrapper gives what one process gives on Gloo, too; the other tests of it use shared memory."""

from __future__ import annotations

import torch.distributed as dist

from paceline.comm.c10d.process_group import PacelineProcessGroup
from paceline.core.processes.world import World
from ranks import run_ranks
from twins import PATTERNS, Case, Mixed, Tied, train_beside_twin

TINY = 1e-4
CASES = [
    Case(),
    Case(batches=(1, 5, 2), micros=2, window="accumulate", options={"bucket_cap_mb": TINY}),
    Case(build=Tied, micros=2, window="backward", set_to_none=False, optimizer="adamw", rtol=1e-8),
    Case(build=Mixed, batches=(12, 4), rtol=5e-2),
    Case(window="sync_gradients", micros=2),
    *(Case(pattern=pattern, batches=(12, 7), options={"bucket_cap_mb": TINY}) for pattern in PATTERNS),
]


def train(world: World) -> None:
    assert not isinstance(dist.group.WORLD, PacelineProcessGroup)
    for case in CASES:
        try:
            train_beside_twin(world, case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


def test_training_equals_one_process_on_gloo() -> None:
    run_ranks(2, train, backend="gloo")
