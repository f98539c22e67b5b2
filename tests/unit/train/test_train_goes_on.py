"""fit() after Ctrl-C or an error goes on behind the last optimizer step, as in a notebook."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from paceline.checkpoint import Checkpointer, checkpointer, run_folder, saving
from paceline.checkpoint import restore as restoring
from paceline.checkpoint.due_saves import DueSaves
from paceline.checkpoint.signals import Interrupts
from paceline.core.rng import rng_state, set_seed
from paceline.core.world import World
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.train import Evaluation, TrainConfig, Trainer
from trainings import Points, Run, Settings, digest, net, random_squared_error, refusal, squared
from twins import Pools


@dataclass
class Cell:
    """A Trainer as a notebook's cell makes it; something happens in the `hit`-th call of the part named `where`."""

    folder: str | None = None
    where: str = ""
    hit: int = 0
    error: type[Exception] | None = None  # what is raised; None for Ctrl-C
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

    def fit_in_vain(self) -> None:
        try:
            self.trainer.fit()
        except (KeyboardInterrupt, ArithmeticError):
            return
        raise AssertionError("nothing happened")

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
            cell.fit_in_vain()
            assert cell.hit == 0 or where != "evaluation", "the evaluation went on after the batch"
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            cell.trainer.fit()
            equal[f"{where} {hit}"] = cell.bits() == whole.bits() and cell.log() == whole.log()
    return equal


@pytest.mark.slow
def test_fit_after_ctrl_c_at_any_moment_ends_with_the_bits_of_an_undisturbed_run(pools: Pools, tmp_path: Path) -> None:
    # The window in progress was lost, with its place in the epoch, or "the Checkpointer is closed".
    [equal] = pools.run(1, interrupted, str(tmp_path))
    assert len(equal) == 6
    assert [moment for moment, same in equal.items() if not same] == []


def failed(world: World) -> list[Any]:
    cell = Cell(where="loss", hit=4, error=ArithmeticError)
    cell.fit_in_vain()
    before = [cell.trainer.result.steps, cell.trainer.loader.progress.position, cell.trainer.result.samples]
    result = cell.trainer.fit()
    after = [result.steps, result.samples]
    return [before, after, cell.trainer.fit().steps]


def test_fit_after_an_error_takes_the_batches_of_the_window_again(pools: Pools) -> None:
    for before, after, again in pools.run(2, failed):
        assert before == [1, 2, 16]
        assert after == [6, 90]
        assert again == 6, "a training that has ended does not go on"


def refused(world: World, folder: str) -> list[str]:
    first = Cell(folder, "loss", 8)
    first.fit_in_vain()
    messages = [refusal(Cell, folder, config={"resume": True})]
    first.checkpointer.close()
    messages.append(refusal(first.trainer.fit))
    second = Cell(folder, config={"resume": True})
    return [*messages, str(second.trainer.fit().resumed_from_step)]


def test_a_second_trainer_on_the_folder_says_to_close_the_first(pools: Pools, tmp_path: Path) -> None:
    [(in_use, closed, resumed)] = pools.run(1, refused, str(tmp_path))
    assert "close() its Checkpointer if it is in this process" in in_use
    assert closed.startswith("the Checkpointer of ")
    assert "is closed" in closed
    assert resumed == "3"


def sigint(world: World, how: str) -> list[Any]:
    """Send this rank, which is a process of its own, SIGINT, once or twice; what came of it."""
    heard: list[int] = []
    if how == "own handler":
        signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
        with Interrupts():
            os.kill(os.getpid(), signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the process has other tests to run
        return heard
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupt_within(OSError() if how == "then an error" else None)
    return [type(caught.value.__cause__), signal.getsignal(signal.SIGINT) is signal.default_int_handler]


def interrupt_within(then: Exception | None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler, "the first waits"
        if then is not None:
            raise then
        os.kill(os.getpid(), signal.SIGINT)
        raise OSError("the second waited, too")


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("twice", [type(None), True]),  # the second does not wait for the step
        ("then an error", [OSError, True]),  # a terminal sends it to workers as well, whose end was reported instead
        ("own handler", [signal.SIGINT]),  # it is somebody else's, and left alone
    ],
)
def test_what_ctrl_c_does(pools: Pools, how: str, expected: list[Any]) -> None:
    assert pools.run(1, sigint, how) == [expected]


def struck(owner: Any, name: str, hit: int, times: int, function: Callable[[], Any]) -> None:
    """Call `function`, which a Ctrl-C ends that comes, so many times, as the `hit`-th call of `name` begins."""
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
"""Where a Ctrl-C comes in fit(): a function, and which of its calls."""


def fit_is_struck(world: World, folder: str) -> dict[str, list[bool]]:
    config = {"checkpoint_every": 1, "async_save": True}
    whole = Cell(f"{folder}/whole", config=config)
    whole.trainer.fit()
    found = {}
    for moment, strike in FIT.items():
        place = f"{folder}/{moment}"
        if moment == "restore":
            begun = Cell(place, "loss", 5, config=config)
            begun.fit_in_vain()
            begun.checkpointer.close()
        cell = Cell(place, config={**config, "resume": moment == "restore"})
        struck(*strike, 1, cell.trainer.fit)
        cell.trainer.fit()
        resumed = Cell(place, config={**config, "resume": True}).trainer.fit()
        found[moment] = [cell.bits()[:4] == whole.bits()[:4], cell.log() == whole.log(), resumed.resumed_from_step == 6]
    return found


def test_fit_goes_on_after_ctrl_c_while_it_restores_saves_or_closes(pools: Pools, tmp_path: Path) -> None:
    # At the start the Trainer was closed, and said that a new one must be made.
    [found] = pools.run(1, fit_is_struck, str(tmp_path))
    assert found == {moment: [True, True, True] for moment in FIT}


def checkpointer_is_struck(world: World, folder: str) -> list[Any]:
    steps: list[Any] = []
    layer = nn.Linear(2, 2)
    checkpoints = Checkpointer(folder, async_save=True)
    checkpoints.register("layer", layer)
    weights = layer.weight.detach().clone()
    struck(saving.Writer, "save", 1, 1, lambda: checkpoints.save(1))
    checkpoints.save(2)
    struck(saving.Writer, "join", 1, 2, checkpoints.wait)
    checkpoints.save(3)  # an assertion failed, as nobody had waited for the one before
    nn.init.zeros_(layer.weight)
    struck(restoring.Loading, "load", 1, 1, checkpoints.restore)
    steps.append(torch.equal(layer.weight, weights))
    checkpoints.save(4)
    struck(saving.Writer, "join", 2, 2, checkpoints.close)
    with pytest.raises(UsageError, match="another run is using"):  # not released before all is written
        Checkpointer(folder)
    checkpoints.close()
    with Checkpointer(folder) as again:
        return [*steps, again.steps(), again.latest()]


def test_a_checkpointer_is_whole_after_ctrl_c_while_it_saves_waits_restores_or_closes(
    pools: Pools, tmp_path: Path
) -> None:
    [(restored, steps, latest)] = pools.run(1, checkpointer_is_struck, str(tmp_path / "run"))
    assert restored
    assert steps == [2, 3, 4]
    assert latest == tmp_path / "run" / "step-00000004"
