"""Ray Train runs the wrapper, loader and Checkpointer on Paceline's process group, and receives Trainer metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from processes import paceline, script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'paceline[ray]'"),
]

LOOP = '''
import os, signal, sys
from pathlib import Path

import torch
from torch import nn

import paceline
from paceline.core.digests import weights_sha256
from paceline.data import DataLoader


def parts():
    with paceline.set_seed(0):
        data = torch.utils.data.TensorDataset(torch.randn(60, 8), torch.randn(60, 4))
        net = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 4))
    model = paceline.DistributedDataParallel(net)
    return data, model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loop(settings):
    """A plain loop, in which rank 1 is killed once if the settings say so."""
    folder = Path(settings["folder"])
    world = paceline.init()
    assert torch.distributed.get_backend() == "paceline" and torch.distributed.group.WORLD.native
    data, model, optimizer = parts()
    checkpointer = paceline.Checkpointer(folder / "checkpoints", every=3)
    checkpointer.register("model", model)
    checkpointer.register("optimizer", optimizer)
    loader = checkpointer.register("loader", DataLoader(data, batch_size=10, shuffle=True))
    step = checkpointer.restore() if checkpointer.steps() else 0
    while step < 12:
        for x, y in loader:
            if settings["kill"] and (world.rank, step) == (1, 7) and not (folder / "struck").exists():
                (folder / "struck").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            with model.weight(len(x)):
                nn.functional.mse_loss(model(x), y, reduction="sum").backward()
            optimizer.step()
            optimizer.zero_grad()
            step = checkpointer.step()
    checkpointer.close()
    (folder / f"digest-{world.rank}").write_text(weights_sha256(model))


if __name__ == "__main__":
    loop({"folder": sys.argv[1], "kill": False})
'''

DRIVER = """
import json, sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

sys.path.insert(0, str(Path(__file__).parent))
import loop
from paceline.integrations.ray import Report, TorchConfig

here = Path(__file__).parent
environment = {"PYTHONPATH": str(here), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
ray.init(
    num_cpus=2, include_dashboard=False, object_store_memory=200 * 2**20, runtime_env={"env_vars": environment}
)


def run(function, name, **settings):
    return TorchTrainer(
        function,
        train_loop_config={"folder": str(here / name), **settings},
        torch_config=TorchConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=name, storage_path=str(here / "storage"), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()


def trainer(settings):
    import paceline
    from paceline.data import DataLoader
    from paceline.train import Evaluation, TrainConfig, Trainer
    from torch import nn

    paceline.init()
    data, model, optimizer = loop.parts()

    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[0])

    def error(module, batch):
        return {"error": nn.functional.mse_loss(module(batch[0]), batch[1], reduction="sum")}, len(batch[0])

    config = TrainConfig(epochs=2)
    checkpointer = paceline.Checkpointer(settings["folder"])
    callbacks = [Report(settings["folder"])]
    evaluation = Evaluation(DataLoader(data, 10), error, ("error",))
    loader = DataLoader(data, 10, shuffle=True)
    objects = {"callbacks": callbacks, "checkpointer": checkpointer}
    Trainer(model, optimizer, loss, loader, config, evaluation, **objects).fit()


for name in ("loop", "trainer"):
    (here / name).mkdir()
run(loop.loop, "loop", kill=True)
result = run(trainer, "trainer")
note = {"metrics": result.metrics, "checkpoint": result.checkpoint.path, "kept": len(result.best_checkpoints)}
(here / "result.json").write_text(json.dumps(note))
ray.shutdown()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of Ray running the plain loop, with a killed worker, and the Trainer."""
    made = tmp_path_factory.mktemp("ray")
    script(made, LOOP, "loop.py")
    script(made, DRIVER, "driver.py")
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1", "OMP_NUM_THREADS": "1"}
    # `made` has a long path, but socket paths are limited to 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as sessions:
        done = subprocess.run(
            [sys.executable, "driver.py"],
            cwd=made,
            env=environment | {"RAY_TMPDIR": sessions},
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return made


def test_killed_worker_restarts_and_the_run_matches_one_without_ray_bitwise(folder: Path, tmp_path: Path) -> None:
    done = paceline(tmp_path, "run", "--nproc", "2", str(folder / "loop.py"), str(tmp_path), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert (folder / "loop" / "struck").exists()
    [without_ray] = {(tmp_path / f"digest-{rank}").read_text() for rank in range(2)}
    assert {(folder / "loop" / f"digest-{rank}").read_text() for rank in range(2)} == {without_ray}


def test_trainer_metrics_and_checkpoints_reach_ray(folder: Path) -> None:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert result["metrics"]["step"] == 12
    assert {"train/loss", "eval/error"} <= set(result["metrics"])
    saved = folder / "trainer" / "step-00000012"
    copied = Path(result["checkpoint"])
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == {
        file.name: file.read_bytes() for file in copied.iterdir()
    }
