"""Training with callbacks under ``paceline run``: mistakes are one line, and errors name the callback."""

from __future__ import annotations

from pathlib import Path

from processes import paceline, script

SCRIPT = """
import sys, torch, paceline
from paceline.data import DataLoader
from paceline.train import *
from trainings import Points, Run, net, squared_loss

how = {how!r}
if how == "mlflow":
    sys.modules["mlflow"] = None
world = paceline.init()
model = paceline.DistributedDataParallel(net(Run(TrainConfig(1))))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
data = Points(45, torch.float64)

class Strikes:
    def on_step(self, run):
        if run.step == 3 and world.rank == 1:
            raise KeyError("labels")

loggers = [MLflow("digits") if how == "mlflow" else JsonLines("metrics.jsonl")]
config = TrainConfig(max_steps=12)
Trainer(model, optimizer, squared_loss, DataLoader(data, 8), config, loggers=loggers, callbacks=[Strikes()]).fit()
"""


def run(folder: Path, how: str, *options: str) -> tuple[int, str, str]:
    tests = str(Path(__file__).parents[2])
    done = paceline(
        folder, "run", "--nproc", "2", *options, script(folder, SCRIPT.format(how=how)), fork="all", PYTHONPATH=tests
    )
    return done.returncode, done.stdout, done.stderr


def test_mistake_is_one_line_with_exit_code_2(tmp_path: Path) -> None:
    code, out, said = run(tmp_path, "mlflow")
    assert (code, out) == (2, ""), said
    # The others repeat an error that only rank 0 can detect.
    line = "error: logging to MLflow needs the package 'mlflow', which is not installed; "
    assert said.splitlines()[-1].replace("error: rank 0: ", "error: ").startswith(line)
    assert "Traceback" not in said


def test_launcher_names_the_failing_callback_with_its_class_and_rank(tmp_path: Path) -> None:
    code, _, said = run(tmp_path, "raises", "--max-restarts", "0")
    assert code == 1
    assert "CallbackError: rank 1: Strikes.on_step() raised KeyError: 'labels'" in said.splitlines()[-1]
