"""Runs the buggy trainings on two ranks, each as a test that fails; pytest's line names the mistake.

python -m pytest tests/buggy/run_buggy.py --tb=no -rfp
BUGGY_UNDER=torch python -m pytest …            torch DDP on Gloo, without the assertions: what it says by itself
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline
from paceline import testing
from paceline.core.processes.world import World

FOLDER = Path(__file__).parent
SCRIPTS = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem not in ("usual", "run_buggy"))
UNDER_TORCH = os.environ.get("BUGGY_UNDER") == "torch"
sys.path.insert(0, str(FOLDER))


@pytest.mark.ranks(2, timeout=20 if UNDER_TORCH else 6, backend="gloo" if UNDER_TORCH else "paceline")
@pytest.mark.parametrize("name", SCRIPTS)
def test_finds(name: str, world: World) -> None:
    script = importlib.import_module(name)
    if UNDER_TORCH:
        script.train(TorchDDP)
        return
    model = script.train(paceline.DistributedDataParallel)
    testing.assert_no_desync(2)
    testing.assert_replicas_equal(model)
    if hasattr(script, "data"):
        testing.assert_data_is_split(script.data)
    if hasattr(script, "one_step"):
        usual = importlib.import_module("usual")
        testing.assert_equals_one_process(usual.net, usual.global_batch, 2, step=script.one_step)
