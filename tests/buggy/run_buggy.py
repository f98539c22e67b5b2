"""Runs the buggy trainings on two ranks, each as a test that must fail and name the mistake in pytest's summary.

python -m pytest tests/buggy/run_buggy.py --tb=no -rfp
BUGGY_UNDER=torch python -m pytest …            torch DDP on Gloo, without assertions: shows what torch reports
"""

from __future__ import annotations

import os
from typing import Any

import mistakes
import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline
from paceline import World, testing

UNDER_TORCH = os.environ.get("BUGGY_UNDER") == "torch"
DDP = TorchDDP if UNDER_TORCH else paceline.DistributedDataParallel
MISTAKES = [*mistakes.TRAININGS, *mistakes.STEPS_ALONE, *mistakes.LOADERS]


@pytest.mark.ranks(2, timeout=20 if UNDER_TORCH else 6, backend="gloo" if UNDER_TORCH else "paceline")
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_finds(mistake: Any, world: World) -> None:
    if mistake in mistakes.STEPS_ALONE:
        model = mistakes.train_by(mistake, DDP(mistakes.net()))
    elif mistake in mistakes.LOADERS:
        model = mistakes.train_on(mistake, DDP(mistakes.net()))
    else:
        model = mistake(DDP)
    if UNDER_TORCH:
        return
    testing.assert_replicas_equal(model)
    if mistake in mistakes.LOADERS:
        testing.assert_data_is_split(mistake)
    if mistake in mistakes.STEPS_ALONE:
        testing.assert_equals_one_process(mistakes.net, mistakes.global_batch, 2, step=mistake)
