"""fit() after Ctrl-C or an error goes on behind the last optimizer step, as in a notebook."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.rng import rng_state, set_seed
from paceline.train import Evaluation, TrainConfig, Trainer
from paceline.train.interrupts import Interrupts
from paceline.world import World
from trainings import Points, Run, digest, net, random_squared_error, squared
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
        given = {"epochs": 2, "accumulate": 2, "log_every": 2, "show_progress": False, **self.config}
        if self.folder is not None:
            given |= {"checkpoint_dir": self.folder, "metrics_file": f"{self.folder}/metrics.jsonl"}
        evaluation = Evaluation(DataLoader(data, 16), self._sums, ("error",))
        loader = DataLoader(data, 8, shuffle=True, seed=3)
        self.trainer = Trainer(self.model, self.optimizer, self._loss, loader, TrainConfig(**given), evaluation)

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
    for where, hits in {"loss": (1, 2, 5, 6, 12), "step": (1, 3, 6), "evaluation": (1, 2, 6)}.items():
        for hit in hits:
            cell = Cell(f"{folder}/{where}-{hit}", where, hit)
            cell.fit_in_vain()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            cell.trainer.fit()
            equal[f"{where} {hit}"] = cell.bits() == whole.bits() and cell.log() == whole.log()
    return equal


@pytest.mark.slow
def test_fit_after_ctrl_c_at_any_moment_ends_with_the_bits_of_an_undisturbed_run(pools: Pools, tmp_path: Path) -> None:
    # The window in progress was lost, with its place in the epoch, or "the Checkpointer is closed".
    [equal] = pools.run(1, interrupted, str(tmp_path))
    assert len(equal) == 11
    assert [moment for moment, same in equal.items() if not same] == []


def interrupted_at_its_edges(world: World, folder: str) -> dict[str, bool]:
    whole = Cell(f"{folder}/whole")
    whole.trainer.fit()
    equal = {}
    for call in ("restore", "wait", "close"):
        for async_save in (False, True):
            name, config = f"{folder}/{call}-{async_save}", {"async_save": async_save}
            first = Cell(name, "loss", 8, config=config)
            first.fit_in_vain()
            first.trainer.close()
            cell = Cell(name, config={**config, "resume": True})
            strike_within(cell.trainer._checkpointer, call)
            cell.fit_in_vain()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            cell.trainer.fit()
            equal[f"{call}, async_save={async_save}"] = (
                cell.bits()[:2] == whole.bits()[:2] and cell.log() == whole.log()
            )
    return equal


def strike_within(checkpointer: Any, call: str) -> None:
    """Have the next `call` send this rank Ctrl-C, before it does its work."""
    original = getattr(checkpointer, call)

    def struck(*arguments: Any, **options: Any) -> Any:
        delattr(checkpointer, call)
        os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments, **options)

    setattr(checkpointer, call, struck)


def test_fit_goes_on_after_ctrl_c_in_the_restore_the_last_save_and_the_end(pools: Pools, tmp_path: Path) -> None:
    # After one in the restore it said "this Trainer was closed at step 0".
    [equal] = pools.run(1, interrupted_at_its_edges, str(tmp_path))
    assert len(equal) == 6
    assert [moment for moment, same in equal.items() if not same] == []


def failed(world: World) -> list[Any]:
    cell = Cell(where="loss", hit=4, error=ArithmeticError)
    cell.fit_in_vain()
    before = [cell.trainer.result.steps, cell.trainer.loader.progress.position, cell.trainer.result.samples]
    result = cell.trainer.fit()
    after = [result.steps, result.samples]
    return [before, after, cell.trainer.fit().steps]


@pytest.mark.parametrize("size", [1, 2])
def test_fit_after_an_error_takes_the_batches_of_the_window_again(pools: Pools, size: int) -> None:
    for before, after, again in pools.run(size, failed):
        assert before == [1, 2, 16]
        assert after == [6, 90]
        assert again == 6, "a training that has ended does not go on"


def refused(world: World, folder: str) -> list[str]:
    messages = []
    first = Cell(folder, "loss", 8)
    first.fit_in_vain()
    for attempt in (
        lambda: Cell(folder, config={"resume": True}),
        lambda: (first.trainer.close(), first.trainer.close(), first.trainer.fit()),
    ):
        try:
            attempt()
            messages.append("")
        except UsageError as error:
            messages.append(str(error))
    second = Cell(folder, config={"resume": True})
    return [*messages, str(second.trainer.fit().resumed_from_step)]


def test_a_second_trainer_on_the_folder_says_to_close_the_first(pools: Pools, tmp_path: Path) -> None:
    [(in_use, closed, resumed)] = pools.run(1, refused, str(tmp_path))
    assert "if it is in this process (a notebook), call close() on its Trainer or Checkpointer" in in_use
    assert closed.startswith("this Trainer was closed at step 4; make a new one, with resume=True")
    assert resumed == "3"


def sigint(world: World, how: str) -> list[Any]:
    """Send this rank, which is a process of its own, SIGINT, once or twice; what came of it."""
    heard: list[int] = []
    if how == "own handler":
        before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
        with Interrupts(on=True):
            os.kill(os.getpid(), signal.SIGINT)
        signal.signal(signal.SIGINT, before)  # of a rank that runs other tests, too
        return heard
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupt_within(OSError() if how == "then an error" else None)
    return [type(caught.value.__cause__), signal.getsignal(signal.SIGINT) is signal.default_int_handler]


def interrupt_within(then: Exception | None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Interrupts(on=True) as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == interrupts._note, "the first waits"
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
