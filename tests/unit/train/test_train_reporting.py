"""Metrics files and progress."""

from __future__ import annotations

import io
import json
import os
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from forked import call
from insides import Loggers, LossAverage, ProgressDisplay
from paceline import World
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.errors import installing
from paceline.train import Evaluation, JsonLines, TensorBoard, TrainConfig, Trainer, WeightsAndBiases
from ranks import TIMEOUT_S
from trainings import Points, Run, net, optimizer_of, refusal, squared_error, squared_loss
from twins import Pools


def at(step: int, *, evaluates: bool = False) -> Any:
    """Return a run that begins at `step`."""
    return SimpleNamespace(step=step, is_evaluation_due=evaluates, settings={"epochs": 3})


def opened(logger: Any, run: Any = None) -> Any:
    logger.open(run or at(0))
    return logger


def write(file: Path, step: int, *steps: int) -> None:
    log = opened(JsonLines(file), at(step))
    for number in steps:
        log.write(number, {"loss": number / 2})
    log.close()


def steps_of(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


RESUMED: list[tuple[list[list[int]], int, list[int]]] = [
    ([[2, 4, 6], [2, 4, 6]], 4, [2, 4, 6, 2, 4]),
    ([[2, 4, 6], [2]], 4, [2, 4, 6, 2]),
    ([[2, 4, 6], [2, 4]], 1, [2, 4, 6]),
    ([[6], [6, 6], [2, 2, 4]], 2, [6, 6, 6, 2, 2]),
    ([[2, 4]], 1, []),
]


@pytest.mark.parametrize(("runs", "step", "kept"), RESUMED)
def test_resume_drops_only_its_own_lines(tmp_path: Path, runs: list[list[int]], step: int, kept: list[int]) -> None:
    # The file was truncated: a repeated script, or a second one with the same name, lost the earlier metrics.
    for run in runs:
        write(tmp_path / "m", 0, *run)
    write(tmp_path / "m", step, 9)
    assert steps_of(tmp_path / "m") == [*kept, 9]


@pytest.mark.parametrize("half", ['{"step": 4, "lo', '{"step": 4, "loss": 1.0}', "\0\0\0"])
def test_line_truncated_by_a_kill_is_dropped(tmp_path: Path, half: str) -> None:
    write(tmp_path / "m", 0, 2)
    with (tmp_path / "m").open("a") as file:
        file.write(half)
    write(tmp_path / "m", 4, 6)
    assert steps_of(tmp_path / "m") == [2, 6]


@pytest.mark.parametrize("has_line", [False, True])
def test_resumed_run_drops_the_evaluation_that_it_repeats(tmp_path: Path, has_line: bool) -> None:
    # If the step had no training line, its evaluation line stayed and appeared twice.
    log = opened(JsonLines(tmp_path / "m"))
    log.write(2, {"train/loss": 1.0})
    if has_line:
        log.write(3, {"train/loss": 0.5})
    log.write(3, {"eval/loss": 0.25})
    log.close()
    again = opened(JsonLines(tmp_path / "m"), at(3, evaluates=True))
    again.write(3, {"eval/loss": 0.25})
    again.close()
    assert steps_of(tmp_path / "m") == ([2, 3, 3] if has_line else [2, 3])


def test_tensorboard_gets_the_same_values(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = opened(TensorBoard(tmp_path))
    log.write(1, {"loss": 0.5, "lr": 0.25})
    log.write(2, {"loss": 0.25})
    log.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
    assert [(event.step, event.value) for event in events.Scalars("lr")] == [(1, 0.25)]


def refused_without(world: World, package: str, loggers: list[Any]) -> str:
    with patch.dict(sys.modules, {package: None}):
        return refusal(Loggers(loggers).open, at(0))


@pytest.mark.parametrize(
    ("package", "extra", "kind"),
    [
        ("torch.utils.tensorboard", "tensorboard", TensorBoard),
        ("wandb", "wandb", WeightsAndBiases),
    ],
)
def test_missing_logger_names_the_command(pools: Pools, tmp_path: Path, package: str, extra: str, kind: Any) -> None:
    loggers = [kind(str(tmp_path / "board")), JsonLines(tmp_path / "m")]
    for said in pools.run(2, refused_without, package, loggers):
        assert installing(extra) in said
    assert list(tmp_path.iterdir()) == []


class Notes:
    """A user-defined logger."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def write(self, step: int, values: Any) -> None:
        self.lines.append((step, dict(values)))


def train_with_notes(world: World, config: TrainConfig, *loggers: Any) -> list[tuple[int, dict[str, float]]]:
    notes = Notes()
    model = DistributedDataParallel(net(Run(config)))
    data = Points(20, torch.float64)
    evaluation = Evaluation(DataLoader(data, 8), squared_error, ("error",))
    optimizer = optimizer_of(Run(config), model)
    Trainer(model, optimizer, squared_loss, DataLoader(data, 8), config, evaluation, loggers=[notes, *loggers]).fit()
    return notes.lines


def test_user_logger_on_rank_0_gets_the_mean_values_in_the_files(pools: Pools, tmp_path: Path) -> None:
    config = TrainConfig(2, log_every=1)
    alone = pools.run(1, train_with_notes, config)[0]
    first, second = pools.run(2, train_with_notes, config, JsonLines(tmp_path / "m"))
    assert second == []
    assert [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()] == [
        {"step": step, **values} for step, values in first
    ]
    assert [step for step, _ in first] == [1, 2, 3, 3, 4, 5, 6, 6]
    # A shared name for training and evaluation loss gave TensorBoard two values of one curve at a step.
    names = [sorted(values) for step, values in first if step == 3]
    assert names[0] == ["lr", "train/loss"]
    assert all(name.startswith("eval/") for name in names[1])
    for (_, ours), (_, theirs) in zip(first, alone, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)


def log_to_wandb(folder: str) -> tuple[str, int]:
    """Train with a Weights & Biases run that writes only to `folder`; read the run back."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": folder, "WANDB_CACHE_DIR": folder, "WANDB_CONFIG_DIR": folder}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from wandb
        logger = opened(WeightsAndBiases("project"))
        logger.write(1, {"loss": 0.5})
        logger.write(1, {"accuracy": 0.75})
        logger.close()
    [run] = Path(folder).glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + TIMEOUT_S
    while b"accuracy" not in (record := run.read_bytes()) and time.monotonic() < end:
        time.sleep(0.1)  # written by a separate W&B process
    return record.decode("latin-1"), len(list(Path(folder).glob("wandb/offline-run-*")))


@pytest.mark.slow
def test_weights_and_biases_gets_the_same_values(tmp_path: Path) -> None:
    record, runs = call(log_to_wandb, str(tmp_path))
    assert runs == 1
    for text in ("project", "epochs", "loss", "0.5", "accuracy", "0.75", "step"):
        assert text in record


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: Any, on: bool = True) -> str:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", stream)
    with ProgressDisplay(4, 0, on=on) as display:
        for epoch in range(2):
            display.advance(epoch)
            display.advance(epoch)
            display.epoch_ended(epoch, 2, {"loss": 1 / 3, "accuracy": 0.97})
    return str(stream.getvalue())


def resumed_line(_world: World, sums: list[list[float]]) -> float:
    average = LossAverage(DistributedDataParallel(torch.nn.Linear(1, 1)))
    average.load_rank_states([{"own": rank_sums, "epoch": [0.0, 0.0], "line_at": 0, "lr": 0.1} for rank_sums in sums])
    average.add(torch.tensor(3.0), 1.0)
    return average.line(2)


@pytest.mark.parametrize("sums", [[[10.0, 2.0]], [[4.0, 1.0], [6.0, 0.5], [0.0, 0.5]]])
def test_losses_from_another_number_of_ranks_count_once(pools: Pools, sums: list[list[float]]) -> None:
    # Every rank adopted the sums of a single-rank run as if it had saved them itself.
    assert pools.run(2, resumed_line, sums) == [(10.0 + 3.0 + 3.0) / (2.0 + 1.0 + 1.0)] * 2


def test_epoch_without_a_terminal_is_one_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO()) == (
        "epoch 1/2  loss 0.3333  accuracy 0.97\nepoch 2/2  loss 0.3333  accuracy 0.97\n"
    )


def test_terminal_shows_a_bar_and_restores_the_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, Terminal())
    assert "4/4" in text
    assert "epoch 2/2  loss 0.3333  accuracy 0.97" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_other_ranks_print_nothing(monkeypatch: pytest.MonkeyPatch, stream: Any) -> None:
    assert shown(monkeypatch, stream(), on=False) == ""
