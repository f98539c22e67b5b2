"""Callbacks: order of calls, view of the run, requests, and the callbacks included in the package."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from insides import ControlBlock
from paceline import World
from paceline.data import DataLoader, GlobalBatchSampler
from paceline.ddp import DistributedDataParallel
from paceline.errors import CallbackError, UsageError
from paceline.train import EarlyStopping, Evaluation, ExponentialMovingAverage, TrainConfig, Trainer
from trainings import (
    LR,
    Points,
    Run,
    Settings,
    digest,
    net,
    plain_loop,
    refusal,
    relative_difference,
    squared,
    squared_error,
    squared_loss,
    weights_of,
)
from twins import Pools

RUN = Run(TrainConfig(1), samples=45)


def trainer(
    callbacks: Any,
    config: dict[str, Any],
    model: DistributedDataParallel | None = None,
    evaluates: bool = True,
    groups: bool = False,
    sums: Any = squared_error,
) -> Trainer:
    model = model or DistributedDataParallel(net(RUN))
    parameters: Any = model.parameters()
    if groups:
        weights = [{"params": list(model.module[0].parameters())}, {"params": list(model.module[2].parameters())}]
        parameters = [*weights, {"params": list(model.module[5].parameters()), "lr": LR / 10}]
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=0.9)
    data = Points(RUN.samples, RUN.dtype)

    evaluation = Evaluation(DataLoader(data, 16), sums, ("error",)) if evaluates else None
    loader = DataLoader(data, RUN.batch_size, shuffle=True, seed=RUN.seed)
    given = Settings(**config)
    objects = given.objects(optimizer)
    return Trainer(model, optimizer, squared_loss, loader, given, evaluation, callbacks=callbacks, **objects)


@dataclass
class Diary:
    """Records every call and requests a stop at some of them."""

    stop_at: tuple[str, int] | None = None
    """A callback method and a step."""
    notes: list[tuple[Any, ...]] = field(default_factory=list)

    def _note(self, moment: str, run: Any) -> None:
        self.notes.append((moment, run.step, run.epoch, sorted(run.metrics)))
        if self.stop_at == (moment, run.step):
            run.stop()

    def on_start(self, run: Any) -> None:
        self._note("on_start", run)

    def on_step(self, run: Any) -> None:
        self._note("on_step", run)

    def on_evaluation(self, run: Any) -> None:
        self._note("on_evaluation", run)

    def on_save(self, run: Any) -> None:
        self._note("on_save", run)

    def on_end(self, run: Any) -> None:
        self._note("on_end", run)


def noted(
    world: World, config: dict[str, Any], stop_at: tuple[str, int] | None = None, stoppers: Sequence[int] = ()
) -> list[Any]:
    """Train; the callbacks of ranks in `stoppers` request a stop. Return the steps, records, and weights digest."""
    notes = Diary(stop_at if world.rank in stoppers else None)
    run = trainer([notes], config)
    return [run.fit().steps, notes.notes, digest(run.model.state_dict())]


def test_callbacks_run_in_order_with_the_current_state(pools: Pools, tmp_path: Path) -> None:
    config = {"max_steps": 4, "evaluate_every": 2, "checkpoint_dir": str(tmp_path), "checkpoint_every": 2}
    config |= {"log_every": 3}
    both = ["eval/error", "lr", "train/loss"]
    for _, notes, _ in pools.run(2, noted, config):
        assert notes == [
            ("on_start", 0, 0, []),
            ("on_step", 1, 0, []),
            ("on_step", 2, 0, []),
            ("on_save", 2, 0, []),
            ("on_evaluation", 2, 0, ["eval/error"]),
            ("on_step", 3, 0, ["eval/error"]),  # before the metrics line of step 3
            ("on_step", 4, 0, both),
            ("on_save", 4, 0, both),
            ("on_evaluation", 4, 0, both),
            ("on_end", 4, 0, both),
        ]


STOPS = [
    # place of the stop request -> the last step
    ("on_start", 0, 0),
    ("on_step", 4, 5),
    ("on_step", 10, 10),
    ("on_evaluation", 3, 3),
    ("on_save", 4, 4),
]


@pytest.mark.parametrize(("moment", "step", "last"), STOPS)
def test_stop_request_of_one_rank_ends_all_ranks_after_the_same_step(
    pools: Pools, tmp_path: Path, moment: str, step: int, last: int
) -> None:
    config: dict[str, Any] = {"max_steps": 10, "evaluate_every": 3}
    if moment == "on_save":
        config |= {"checkpoint_dir": str(tmp_path), "checkpoint_every": 4}
    outcomes = pools.run(2, noted, config, (moment, step), [1])
    assert [(steps, notes[-1][0]) for steps, notes, _ in outcomes] == [(last, "on_end")] * 2
    assert len({sha256 for *_, sha256 in outcomes}) == 1


@pytest.mark.ranks(2)
def test_stopped_run_stays_stopped_on_resume_unless_allowed_to_continue(world: World, tmp_path: Path) -> None:
    config = {"max_steps": 10, "evaluate_every": 3, "checkpoint_dir": str(tmp_path)}
    first = trainer([Diary(("on_step", 4))], config)
    assert first.fit().steps == 5
    initial = digest(first.model.state_dict())
    for more, steps in (({}, 5), ({"allow_changed_settings": True}, 10)):
        again = trainer([Diary()], {**config, "resume": True, **more})
        assert again.fit().steps == steps
        assert (digest(again.model.state_dict()) == initial) is (steps == 5)  # type: ignore[arg-type]


def collectives(world: World, steps: int, with_callbacks: bool) -> int:
    """Return the number of collectives in a training run, including rank reports within its steps."""
    count = 0

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            return function(*arguments, **options)

        return call

    model = DistributedDataParallel(net(RUN))
    callbacks = [Counts(), ExponentialMovingAverage(model), Speed()]
    run = trainer(callbacks if with_callbacks else [], {"max_steps": steps, "log_every": 100}, model, evaluates=False)
    with ExitStack() as stack:
        for name in ("all_reduce", "all_gather", "broadcast", "barrier"):
            stack.enter_context(patch.object(dist, name, counted(getattr(dist, name))))
        stack.enter_context(patch.object(ControlBlock, "fill", counted(ControlBlock.fill)))
        run.fit()
    return count


def test_callbacks_add_no_collective_to_a_step(pools: Pools) -> None:
    # An epoch has 6 steps and ends with a metrics line, a collective. Parameters are compared after 7 steps.
    [short, *_], [long, *_] = (pools.run(2, collectives, steps, True) for steps in (8, 11))
    assert pools.run(2, collectives, 11, False) == [pools.run(2, collectives, 8, False)[0]] * 2
    assert short == long


# -- errors ------------------------------------------------------------------------------------------------------------


class Fails:
    """Raises in one callback method on the last rank."""

    def __init__(self, error: Exception, is_here: bool) -> None:
        self.error, self.is_here = error, is_here

    def fail(self, run: Any) -> None:
        if self.is_here:
            raise self.error


def failing(world: World, moment: str, error: Exception, folder: str) -> list[Any]:
    callback = type("Recorder", (Fails,), {moment: Fails.fail})(error, world.rank == world.size - 1)
    run = trainer([callback], {"max_steps": 4, "evaluate_every": 2, "checkpoint_dir": folder})
    try:
        run.fit()
    except (CallbackError, UsageError) as raised:
        return [type(raised).__name__, raised.__cause__ is error, str(raised)]
    return []


@pytest.mark.parametrize(
    ("moment", "error"), [("on_start", UsageError("x")), ("on_evaluation", KeyError("x")), ("on_save", UsageError("x"))]
)
def test_failing_callback_is_named_on_every_rank(pools: Pools, tmp_path: Path, moment: str, error: Exception) -> None:
    is_usage = isinstance(error, UsageError)
    for rank, (kind, is_cause, message) in enumerate(pools.run(2, failing, moment, error, str(tmp_path))):
        assert (kind, is_cause) == ("UsageError" if is_usage else "CallbackError", rank == 1)
        assert message.startswith(f"rank 1: Recorder.{moment}(){': x' if is_usage else ' raised KeyError: '}")


class OnStep:
    def on_step(self, run: Any) -> None: ...


class Typo:
    def on_train_batch_end(self, run: Any) -> None: ...


REFUSED: dict[str, tuple[Callable[[DistributedDataParallel, int], Any], str]] = {
    "no list": (lambda *_: OnStep(), "callbacks is an OnStep; give a list of objects with on_step(run), …"),
    "a class": (lambda *_: [OnStep], "OnStep in callbacks is a class; give an object: OnStep(…)"),
    "no callback": (lambda *_: [object()], "object is not a callback; give it at least one of on_start, on_step"),
    "a typo": (lambda *_: [Typo()], "the callback Typo has an unknown method on_train_batch_end; use on_start, on"),
    "unknown metric": (lambda *_: [EarlyStopping("accuracy")], "the monitor of EarlyStopping is 'accuracy', but the"),
    "different on ranks": (lambda _, rank: [OnStep()] * (1 + rank), "rank 1 has the callbacks ['OnStep', 'OnStep']"),
    "decay": (lambda model, _: [ExponentialMovingAverage(model, 1.5)], "decay must be from 0 to 1, not 1.5"),
    "no model": (
        lambda *_: [ExponentialMovingAverage(0.9)],  # type: ignore[arg-type]
        "ExponentialMovingAverage averages a model's weights, not a float; give the model",
    ),
}


@pytest.mark.ranks(2)
def test_invalid_callbacks_are_refused_in_one_line(world: World) -> None:
    model = DistributedDataParallel(net(RUN))
    for mistake, (made, beginning) in REFUSED.items():
        message = refusal(lambda: trainer(made(model, world.rank), {"epochs": 1}, model))  # noqa: B023
        assert message.startswith(beginning), mistake
        assert "\n" not in message


# -- callbacks of the package ------------------------------------------------------------------------------------------


def averaged(world: World, steps: int, decay: float) -> list[Any]:
    module = net(RUN)
    model = DistributedDataParallel(module)
    ema = ExponentialMovingAverage(model, decay)
    seen: list[str] = []

    def sums(module: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
        seen.append(digest(dict(module.named_parameters())))
        return squared_error(module, batch)

    weights: list[str] = []

    class Watch:
        def on_step(self, run: Any) -> None:
            weights.append(digest(dict(module.named_parameters())))

        def on_evaluation(self, run: Any) -> None:
            # Outside the evaluation the model has its own weights again, in the same tensors.
            assert digest(dict(module.named_parameters())) == weights[-1]
            assert [parameter._version for parameter in module.parameters()] == self.versions

        def evaluating(self, run: Any) -> Any:
            self.versions = [parameter._version for parameter in module.parameters()]
            return nullcontext()

    run = trainer([ema, Watch()], {"max_steps": steps, "evaluate_every": 2}, model, sums=sums)
    metrics = run.fit().metrics
    return [weights_of(module), metrics, digest(dict(module.named_parameters())) == seen[-1]]


@pytest.mark.parametrize("size", [1, 2])
def test_moving_average_equals_torch_and_is_used_for_evaluation(pools: Pools, size: int) -> None:
    data = Points(RUN.samples, RUN.dtype)
    reference = AveragedModel(net(RUN), multi_avg_fn=get_ema_multi_avg_fn(0.8))
    batches = list(GlobalBatchSampler(RUN.samples, RUN.batch_size, seed=RUN.seed, rank=0, world_size=1))[:4]
    model = plain_loop(RUN, batches, after=reference.update_parameters)
    with torch.no_grad():
        error = float(squared(reference(data.x), data.y)) / RUN.samples
    for final, metrics, is_last_seen in pools.run(size, averaged, 4, 0.8):
        assert relative_difference(final, weights_of(reference.module)) <= (0 if size == 1 else 1e-9)
        assert metrics["error"] == pytest.approx(error, rel=1e-9)
        assert is_last_seen
    assert relative_difference(weights_of(model), weights_of(reference.module)) > 1e-3


NAN = float("nan")
EARLY = {
    "improvements in between": ([5, 6, 4, 5, 6, 7], {"patience": 2}, 5),
    "the largest": ([1, 2, 3, 3, 3], {"patience": 2, "mode": "max"}, 5),
    "NaN from the start": ([NAN, NAN], {"patience": 2}, 2),
}


@pytest.mark.parametrize(("losses", "options", "evaluations"), EARLY.values(), ids=EARLY)
def test_early_stopping_counts_bad_evaluations(losses: list[float], options: dict[str, Any], evaluations: int) -> None:
    stopping, run = EarlyStopping("eval/error", **options), Mock()
    for count, loss in enumerate(losses, start=1):
        run.metrics = {"eval/error": float(loss)}
        stopping.on_evaluation(run)
        assert run.stop.called == (count >= evaluations)
        if run.stop.called:
            break


class Speed:
    """The callback in docs/trainer.md."""

    def on_step(self, run: Any) -> None:
        run.log({f"lr/{number}": rate for number, rate in enumerate(run.result.learning_rates)})
        run.log({"samples_per_second": run.result.samples_per_second})


def monitored(world: World, file: str) -> list[float]:
    config = {"epochs": 2, "log_every": 3, "metrics_file": file, "schedule": {"warmup_steps": 4}, "evaluate_every": 100}
    run = trainer([Speed()], config, groups=True)
    run.fit()
    return [run.result.samples, run.result.weight, run.result.samples_per_second]


def test_values_logged_by_a_callback_are_in_the_next_metrics_line(pools: Pools, tmp_path: Path) -> None:
    for samples, weight, speed in pools.run(2, monitored, str(tmp_path / "m")):
        assert (samples, weight) == (90, 90.0)
        assert speed > 0
    lines = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6, 9, 12, 12]
    rates = [LR * 3 / 4, LR, LR, LR]
    for line, rate in zip(lines[:4], rates, strict=True):
        assert [line["lr"], line["lr/0"], line["lr/1"], line["lr/2"]] == pytest.approx([rate, rate, rate, rate / 10])
        assert line["samples_per_second"] > 0
    assert sorted(lines[4]) == ["eval/error", "step"]


# -- state -------------------------------------------------------------------------------------------------------------


class Counts:
    """Counts steps."""

    def __init__(self) -> None:
        self.count = 0

    def on_step(self, run: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.count = saved["count"]
