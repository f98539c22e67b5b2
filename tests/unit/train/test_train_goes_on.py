"""After Ctrl-C or an error, fit() resumes behind the last optimizer step, as in a notebook."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from insides import DueSaves, Interrupts, checkpointer, rng_state, run_folder, saving
from insides import restore as restoring
from paceline import World, set_seed
from paceline.checkpoint import Checkpointer
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.train import Evaluation, TrainConfig, Trainer
from trainings import Points, Run, Settings, digest, net, random_squared_error, refusal, squared
from twins import Pools


@dataclass
class Cell:
    """A Trainer as built in a notebook cell, with a fault in call number `hit` of the part named `where`."""

    folder: str | None = None
    where: str = ""
    hit: int = 0
    error: type[Exception] | None = None  # the exception to raise; None for Ctrl-C
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = DistributedDataParallel(net(Run(TrainConfig(1), dropout=0.3)))
        set_seed(5)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.optimizer.register_step_post_hook(lambda *_: self._strike("step"))
        data = Points(45, torch.float64)
        given = {"epochs": 2, "accumulate": 2, "log_every": 2, **self.config}
        if self.folder is not None:
            given |= {"checkpoint_dir": self.folder, "metrics_file": f"{self.folder}/metrics.jsonl"}
        evaluation = Evaluation(DataLoader(data, 16), self._sums, ("error",))
        loader = DataLoader(data, 8, shuffle=True, seed=3)
        config = Settings(**given)
        objects = config.objects(self.optimizer)
        self.checkpointer: Any = objects.get("checkpointer")
        self.trainer = Trainer(self.model, self.optimizer, self._loss, loader, config, evaluation, **objects)

    def fit_until_fault(self) -> None:
        try:
            self.trainer.fit()
        except (KeyboardInterrupt, ArithmeticError):
            return
        raise AssertionError("no fault occurred")

    def bits(self) -> tuple[Any, ...]:
        result = self.trainer.result
        states = (self.model.state_dict(), self.optimizer.state_dict(), rng_state())
        return *map(digest, states), result.steps, result.samples, result.metrics

    def log(self) -> str:
        return Path(f"{self.folder}/metrics.jsonl").read_text()

    def _strike(self, where: str) -> None:
        self.hit -= where == self.where
        if where == self.where and self.hit == 0:
            if self.error is not None:
                raise self.error
            os.kill(os.getpid(), signal.SIGINT)

    def _loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        x, y, _ = batch
        loss = squared(model(x), y)
        self._strike("loss")
        return loss, len(x)

    def _sums(self, module: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
        self._strike("evaluation")
        return random_squared_error(module, batch)


def interrupted(world: World, folder: str) -> dict[str, bool]:
    whole = Cell(f"{folder}/whole")
    whole.trainer.fit()
    equal = {}
    for where, hits in {"loss": (1, 6, 12), "step": (6,), "evaluation": (1, 6)}.items():
        for hit in hits:
            cell = Cell(f"{folder}/{where}-{hit}", where, hit)
            cell.fit_until_fault()
            assert cell.hit == 0 or where != "evaluation", "the evaluation continued after the batch"
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            cell.trainer.fit()
            equal[f"{where} {hit}"] = cell.bits() == whole.bits() and cell.log() == whole.log()
    return equal


@pytest.mark.slow
def test_fit_after_ctrl_c_at_any_moment_matches_an_undisturbed_run_bitwise(pools: Pools, tmp_path: Path) -> None:
    # The current window was lost with its position in the epoch, or fit() failed with "the Checkpointer is closed".
    [equal] = pools.run(1, interrupted, str(tmp_path))
    assert len(equal) == 6
    assert [moment for moment, same in equal.items() if not same] == []


@pytest.mark.ranks(2)
def test_fit_after_an_error_repeats_the_batches_of_the_window(world: World) -> None:
    cell = Cell(where="loss", hit=4, error=ArithmeticError)
    cell.fit_until_fault()
    assert (cell.trainer.result.steps, cell.trainer.loader.progress.position, cell.trainer.result.samples) == (1, 2, 16)
    result = cell.trainer.fit()
    assert (result.steps, result.samples) == (6, 90)
    assert cell.trainer.fit().steps == 6, "a finished run does not continue"


@pytest.mark.ranks(1)
def test_second_trainer_on_the_folder_says_to_close_the_first(world: World, tmp_path: Path) -> None:
    first = Cell(str(tmp_path), "loss", 8)
    first.fit_until_fault()
    assert "close() its Checkpointer in this process" in refusal(Cell, str(tmp_path), config={"resume": True})
    first.checkpointer.close()
    assert re.match("the Checkpointer of .* is closed", refusal(first.trainer.fit))
    assert Cell(str(tmp_path), config={"resume": True}).trainer.fit().resumed_from_step == 3


def sigint(world: World, how: str) -> list[Any]:
    """Send SIGINT once or twice to this rank, which is a separate process; return its effects."""
    heard: list[int] = []
    if how == "own handler":
        signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
        with Interrupts():
            os.kill(os.getpid(), signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the process runs other tests afterward
        return heard
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupt_within(OSError() if how == "then an error" else None)
    return [type(caught.value.__cause__), signal.getsignal(signal.SIGINT) is signal.default_int_handler]


def interrupt_within(then: Exception | None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler, "the first one waits"
        if then is not None:
            raise then
        os.kill(os.getpid(), signal.SIGINT)
        raise OSError("the second one also waited")


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("twice", [type(None), True]),  # the second one does not wait for the step
        # Terminals also signal the workers, whose exit was reported instead of the error.
        ("then an error", [OSError, True]),
        ("own handler", [signal.SIGINT]),  # a handler installed by the user is left alone
    ],
)
def test_effects_of_ctrl_c(pools: Pools, how: str, expected: list[Any]) -> None:
    assert pools.run(1, sigint, how) == [expected]


def struck(owner: Any, name: str, hit: int, times: int, function: Callable[[], Any]) -> None:
    """Call `function` and raise Ctrl-C at the start of call number `hit` of `name`; repeat `times` times."""
    real, calls = getattr(owner, name), 0

    def strike(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        for _ in range(times if calls == hit else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments, **named)

    with patch.object(owner, name, strike), pytest.raises(KeyboardInterrupt):
        function()
    assert calls >= hit
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


FIT = {
    "restore": (restoring.Loading, "load", 2),
    "first save": (DueSaves, "save", 1),
    "last save": (DueSaves, "finish", 7),
    "close": (checkpointer.Checkpointer, "close", 1),
    "close of the folder": (run_folder.RunFolder, "close", 1),
}
"""Functions interrupted within fit(), and the number of the call."""


@pytest.mark.ranks(1)
def test_fit_continues_after_ctrl_c_during_restore_save_or_close(world: World, tmp_path: Path) -> None:
    # At the start, the Trainer was closed and required a new one.
    config = {"checkpoint_every": 1, "async_save": True}
    whole = Cell(str(tmp_path / "whole"), config=config)
    whole.trainer.fit()
    for moment, strike in FIT.items():
        place = str(tmp_path / moment)
        if moment == "restore":
            begun = Cell(place, "loss", 5, config=config)
            begun.fit_until_fault()
            begun.checkpointer.close()
        cell = Cell(place, config={**config, "resume": moment == "restore"})
        struck(*strike, 1, cell.trainer.fit)
        cell.trainer.fit()
        step = Cell(place, config={**config, "resume": True}).trainer.fit().resumed_from_step
        assert (cell.bits()[:4], cell.log(), step) == (whole.bits()[:4], whole.log(), 6), moment


@pytest.mark.ranks(1)
def test_checkpointer_is_intact_after_ctrl_c_in_any_operation(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    layer = nn.Linear(2, 2)
    checkpoints = Checkpointer(folder, async_save=True)
    checkpoints.register("layer", layer)
    weights = layer.weight.detach().clone()
    struck(saving.Writer, "save", 1, 1, lambda: checkpoints.save(1))
    checkpoints.save(2)
    struck(saving.Writer, "join", 1, 2, checkpoints.wait)
    checkpoints.save(3)  # formerly a failed assertion, because the previous save was never awaited
    nn.init.zeros_(layer.weight)
    struck(restoring.Loading, "load", 1, 1, checkpoints.restore)
    assert torch.equal(layer.weight, weights)
    checkpoints.save(4)
    struck(saving.Writer, "join", 2, 2, checkpoints.close)
    with pytest.raises(UsageError, match="another run is using"):  # released only after all writes
        Checkpointer(folder)
    checkpoints.close()
    with Checkpointer(folder) as again:
        assert again.steps() == [2, 3, 4]
        assert again.latest() == folder / "step-00000004"
