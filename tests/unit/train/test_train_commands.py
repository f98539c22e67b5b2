"""Trainings with callbacks under ``paceline run``: mistakes are one line, and a killed rank costs no bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import paceline, script

SCRIPT = """
import os, signal, sys, torch, paceline
from paceline.core.state.digests import weights_sha256
from paceline.data import DataLoader
from paceline.train import *
from trainings import Points, Run, net, squared_error, squared_loss

how = {how!r}
if how == "mlflow":
    sys.modules["mlflow"] = None
world = paceline.init()
model = paceline.DistributedDataParallel(net(Run(TrainConfig(1), dropout=0.3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
data = Points(45, torch.float64)

class Strikes:
    def on_step(self, run):
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if how == "raises" and run.step == 3 and world.rank == 1:
            raise KeyError("labels")
        if how == "killed" and run.step == 8 and world.rank == 1 and first:
            os.kill(os.getpid(), signal.SIGKILL)

loggers = [MLflow("digits") if how == "mlflow" else JsonLines("metrics.jsonl")]
config = TrainConfig(max_steps=12, evaluate_every=3, log_every=2, show_progress=False)
evaluation = Evaluation(DataLoader(data, 16), squared_error, ("error",))
ema = ExponentialMovingAverage(model, 0.9)
stopping = EarlyStopping("accuracy" if how == "monitor" else "error", patience=9)
trainer = Trainer(
    model, optimizer, squared_loss, DataLoader(data, 8, shuffle=True), config, evaluation,
    loggers=loggers, callbacks=[ema, stopping, Strikes()],
)
result = trainer.fit()
world.print(result.steps, weights_sha256(model), ema.updates, stopping.best, stopping.wait)
"""


def run(folder: Path, how: str, *options: str) -> tuple[int, str, str]:
    folder.mkdir(exist_ok=True)
    tests = str(Path(__file__).parents[2])
    done = paceline(
        folder, "run", "--nproc", "2", *options, script(folder, SCRIPT.format(how=how)), fork="all", PYTHONPATH=tests
    )
    return done.returncode, done.stdout, done.stderr


MISTAKES = {
    "monitor": "error: the monitor of EarlyStopping is 'accuracy', but the evaluation has 'error'; name one of them (",
    "mlflow": "error: logging to MLflow needs the package 'mlflow', which is not installed; ",
}


@pytest.mark.parametrize(("how", "line"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path, how: str, line: str) -> None:
    code, out, said = run(tmp_path, how)
    assert (code, out) == (2, ""), said
    # What rank 0 alone can find out, the others say of it.
    assert said.splitlines()[-1].replace("error: rank 0: ", "error: ").startswith(line)
    assert "Traceback" not in said


def test_a_callback_that_raises_is_named_with_its_class_and_rank_by_the_launcher(tmp_path: Path) -> None:
    code, _, said = run(tmp_path, "raises", "--max-restarts", "0")
    assert code == 1
    assert "CallbackError: rank 1: Strikes.on_step() raised KeyError: 'labels'" in said.splitlines()[-1]


@pytest.mark.slow
def test_a_rank_that_is_killed_in_a_callback_costs_no_bit_of_model_average_and_log(tmp_path: Path) -> None:
    code, whole, said = run(tmp_path / "whole", "undisturbed")
    assert code == 0, said
    assert whole.startswith("12 ")
    code, again, said = run(tmp_path / "killed", "killed")
    assert code == 0, said
    assert "starting all ranks again" in said
    assert again == whole
    logs = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "killed")]
    assert logs[0] == logs[1]
