"""Promise: an interrupted run resumes to the bits of an uninterrupted one.

Covers a Trainer with all callbacks, interrupted at any moment; a plain loop, resumed from each of its saves; and the
command, killed in the middle of an epoch.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset, TensorDataset

import paceline
from drawn import draws
from insides import failpoints, rng_state, weights_sha256
from paceline import World, set_seed
from paceline.data import DataLoader, GlobalBatchStream
from paceline.ddp import DistributedDataParallel
from paceline.optim import ShardedOptimizer
from paceline.train import EarlyStopping, Evaluation, ExponentialMovingAverage, TrainConfig, Trainer, evaluate
from processes import Running, gone_after, state_of
from processes import paceline as run_command
from trainings import Points, Run, Settings, digest, net, relative_difference, scalers_made, squared
from twins import Pools

pytestmark = pytest.mark.slow

RUN = Run(TrainConfig(1), dropout=0.3, samples=29, dtype=torch.float32)
SPEEDS = ("samples_per_second", "tokens_per_second")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        points = Points(RUN.samples, RUN.dtype)
        yield from (points[index] for index in range(len(points)))


@dataclass(frozen=True)
class Case:
    """A run with 4 micro-batches per epoch and optional events."""

    by_steps: bool = False
    stream: bool = False
    accumulate: int = 1
    evaluate_every: int | None = None
    checkpoint_every: int = 1
    keep_best: bool = False
    precision: str = "fp32"
    plateau: bool = False
    sharded: bool = False
    patience: int = 2
    stop: tuple[int, int, str] | None = None
    """Rank, step and moment of a request to stop."""
    cut: tuple[int, str] | None = None
    """Step and moment of the interruption."""
    overflow: int | None = None
    """Step with an overflowing loss under fp16."""


class Interruption(BaseException):
    """Interrupts a run."""


class UserCallback:
    """A stateful callback that requests a stop or interrupts the run."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.total = 0.0

    def _at(self, moment: str, run: Any) -> None:
        self.total += run.step + sum(run.metrics.get(name, 0.0) for name in ("train/loss", "eval/loss"))
        if self.case.stop is not None and self.case.stop == (self.rank, run.step, moment):
            run.stop()
        if self.case.cut == (run.step, moment):
            raise Interruption

    def on_step(self, run: Any) -> None:
        self._at("on_step", run)

    def on_evaluation(self, run: Any) -> None:
        self._at("on_evaluation", run)

    def on_save(self, run: Any) -> None:
        if self.case.cut == (run.step, "on_save"):  # counting here would not be part of that save
            raise Interruption

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.total = saved["total"]


class PerRankState:
    """State that differs between ranks, registered with the Checkpointer."""

    def __init__(self, rank: int) -> None:
        self.numbers = [rank]

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.numbers = saved["numbers"]


def train(world: World, case: Case, folder: str, resume: bool) -> dict[str, Any]:
    """Return digests of everything that determines the bits, and facts about the run."""
    set_seed(7 + world.rank)
    module = net(RUN)
    model = DistributedDataParallel(module)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    data, per_rank_state = Points(RUN.samples, RUN.dtype), PerRankState(world.rank)
    overflowed: list[int] = []

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        x, y, indices = batch
        per_rank_state.numbers = [*per_rank_state.numbers, *indices.tolist()][-9:]
        value = squared(model(x + 0.1 * torch.randn_like(x)), y) / 64
        if case.overflow == trainer.result.steps and not overflowed:
            overflowed.append(1)
            value = value * float("inf")
        return value, len(x)

    def sums(module: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
        return {"loss": squared(module(batch[0]) + torch.randn(len(batch[0]), 3), batch[1])}, len(batch[0])

    loader = DataLoader(GlobalBatchStream(Stream(), 8)) if case.stream else DataLoader(data, 8, shuffle=True, seed=2)
    callbacks = [
        UserCallback(case, world.rank),
        EarlyStopping("loss", patience=case.patience),
        ExponentialMovingAverage(model, 0.7),
    ]
    config = Settings(
        epochs=None if case.by_steps else 3,
        max_steps=9 if case.by_steps else None,
        accumulate=case.accumulate,
        clip_norm=0.5,
        precision=case.precision,  # type: ignore[arg-type]
        evaluate_every=case.evaluate_every,
        checkpoint_dir=folder,
        checkpoint_every=case.checkpoint_every,
        keep=99,
        keep_best="loss" if case.keep_best else None,
        load_best_at_end=case.keep_best,
        resume=resume,
        metrics_file=f"{folder}/metrics.jsonl",
        log_every=2,
    )
    evaluation = Evaluation(DataLoader(data, 16), sums, ("loss",))
    if case.sharded:
        optimizer = ShardedOptimizer(optimizer.param_groups, type(optimizer), model.process_group)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0) if case.plateau else None
    objects = config.objects(optimizer)
    objects["checkpointer"].register("own", per_rank_state, per_rank=True)
    with scalers_made() as scalers:
        trainer = Trainer(model, optimizer, loss, loader, config, evaluation, scheduler, callbacks=callbacks, **objects)
    try:
        trainer.fit()
    except Interruption:
        return {}
    finally:
        objects["checkpointer"].close()
    result = trainer.result
    states = [callback.state_dict() for callback in callbacks if hasattr(callback, "state_dict")]
    return {
        "weights": digest(module.state_dict()),
        "optimizer": digest(trainer.optimizer.state_dict() if not case.sharded else 0),
        "schedule": digest(scheduler.state_dict() if scheduler else 0),
        "callbacks": [digest(state) for state in states],
        "own": per_rank_state.numbers,
        "generators": digest(rng_state()),
        "scaler": [scaler.state_dict() for scaler in scalers],
        "result": [result.steps, result.metrics, result.best_step],
        "log": metrics_without_speeds(Path(folder) / "metrics.jsonl"),
    }


def metrics_without_speeds(file: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in SPEEDS} for line in lines]


def compare_with_uninterrupted_run(pools: Pools, size: int, case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = pools.run(size, train, replace(case, cut=None), f"{folder}/whole", False)
        assert whole[0]["result"] == whole[-1]["result"]
        cut = pools.run(size, train, case, f"{folder}/cut", False)
        if cut[0]:  # the run ended before the interruption
            assert cut == whole
            return
        again = pools.run(size, train, replace(case, cut=None), f"{folder}/cut", True)
    for expected, resumed in zip(whole, again, strict=True):
        assert resumed == expected


MOMENTS = ("on_step", "on_evaluation", "on_save")
CASES = st.builds(
    Case,
    by_steps=st.booleans(),
    accumulate=st.sampled_from((1, 1, 2)),
    evaluate_every=st.sampled_from((None, 1, 2, 3)),
    checkpoint_every=st.sampled_from((1, 1, 2)),
    keep_best=st.booleans(),
    plateau=st.booleans(),
    sharded=st.booleans(),
    patience=st.integers(1, 4),
    stop=st.none() | st.tuples(st.integers(0, 1), st.integers(1, 8), st.sampled_from(MOMENTS[:2])),
    cut=st.tuples(st.integers(3, 9), st.sampled_from(MOMENTS)),
)


def valid_case(case: Case, precision: str, stream: bool) -> Case:
    """Return a valid case: streams count steps, and a user's scheduler excludes a sharded optimizer."""
    case = replace(case, precision=precision, stream=stream, by_steps=case.by_steps or stream)
    return replace(case, sharded=False) if case.plateau else case


@pytest.mark.parametrize("size", [1, 2])
@draws(12, shrinks=False)
@given(case=CASES, precision=st.sampled_from(("fp32", "bf16", "fp16")), stream=st.booleans())
def test_run_interrupted_anywhere_resumes_to_the_same_bits(
    pools: Pools, size: int, case: Case, precision: str, stream: bool
) -> None:
    compare_with_uninterrupted_run(pools, size, valid_case(case, precision, stream))


def test_resume_after_a_step_skipped_by_the_scaler(pools: Pools) -> None:
    case = Case(by_steps=True, evaluate_every=2, keep_best=True, precision="fp16", overflow=2, patience=9)
    compare_with_uninterrupted_run(pools, 2, replace(case, cut=(6, "on_step")))


# -- a plain loop ------------------------------------------------------------------------------------------------------


EPOCHS, WINDOWS = 2, 2  # 46 samples in batches of 8 are 6 micro-batches: a window of 4 and one of 2


def small_net(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(8)] if dropout else []  # its statistics depend on the number of ranks
    return nn.Sequential(nn.Linear(4, 8), *norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).double()


def noisy_error(module: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
    x, y = batch
    return {"error": (module(x + 0.1 * torch.randn_like(x)) - y).square().sum()}, len(x)


def train_in_a_loop(world: World, folder: str, dropout: float, resume_from: int | None = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(46, width, generator=generator, dtype=torch.float64) for width in (4, 3))
    model = paceline.DistributedDataParallel(small_net(dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * WINDOWS)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    evaluation = Evaluation(DataLoader(TensorDataset(x[:9], y[:9]), batch_size=4), noisy_error, ("error",))
    torch.manual_seed(world.rank if resume_from is None else 99)
    metrics: dict[int, Any] = {}
    with paceline.Checkpointer(folder, keep=99) as checkpointer:
        for name, value in {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}.items():
            checkpointer.register(name, value)
        step = 0 if resume_from is None else checkpointer.restore(resume_from)
        for epoch in range(step // WINDOWS, EPOCHS):
            for x, y in paceline.accumulate(model, loader, every=4):
                with model.weight(len(x)):
                    (model(x) - y).square().sum().backward()
                if model.do_sync:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                    step += 1
                    if resume_from is None:
                        checkpointer.save(step)
            metrics[epoch] = evaluate(model, evaluation)
    assert step == EPOCHS * WINDOWS
    return {
        "weights": {name: tensor.numpy().copy() for name, tensor in model.module.state_dict().items()},
        "bits": (weights_sha256(model), digest(optimizer.state_dict()), digest(rng_state())),
        "metrics": metrics,
    }


def resume_from_every_save(world: World, folder: str) -> None:
    whole = train_in_a_loop(world, folder, dropout=0.3)
    for step in range(1, EPOCHS * WINDOWS):
        resumed = train_in_a_loop(world, folder, 0.3, step)
        assert resumed["bits"] == whole["bits"], f"from step {step}"
        assert resumed["metrics"] == {epoch: whole["metrics"][epoch] for epoch in resumed["metrics"]}


def test_resuming_from_any_save_gives_the_same_bits(pools: Pools, tmp_path: Path) -> None:
    pools.run(3, resume_from_every_save, str(tmp_path))


def resume_from_other_saves(world: World, folder: str) -> list[Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*random generators")  # not restored on another number of ranks
        return [train_in_a_loop(world, folder, 0.0, step) for step in range(1, EPOCHS * WINDOWS)]


def test_resuming_from_any_save_works_with_another_number_of_ranks(pools: Pools, tmp_path: Path) -> None:
    [whole, _] = pools.run(2, train_in_a_loop, str(tmp_path), 0.0)
    first, *others = pools.run(3, resume_from_other_saves, str(tmp_path))
    for index, resumed in enumerate(first):
        assert relative_difference(resumed["weights"], whole["weights"]) < 1e-9
        assert all(other[index]["bits"][:2] == resumed["bits"][:2] for other in others)


# -- kills of the launcher ---------------------------------------------------------------------------------------------


TRAINING_SAMPLES = 1437
EVERY = 20  # steps between checkpoints


@dataclass(frozen=True)
class Job:
    """A run and its kills."""

    ranks: int
    batch_size: int
    epochs: int
    kills: tuple[tuple[int, int], ...]
    """For each kill, the rank that is stopped in a step, and the step."""

    @property
    def steps(self) -> int:
        return self.epochs * -(-TRAINING_SAMPLES // self.batch_size)

    def arguments(self, *more: str) -> list[str]:
        chosen = {"--nproc": self.ranks, "--batch-size": self.batch_size, "--epochs": self.epochs}
        return ["train", "digits", *(str(word) for pair in chosen.items() for word in pair), "--json", "j", *more]


JOB = Job(2, 16, 3, kills=((1, 53), (0, 137)))


def report_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "j").read_text()))


def run_to_the_end(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Run the command until it exits and return its report."""
    folder.mkdir()
    # More threads would wait for each other on a busy machine.
    done = run_command(folder, *arguments, fork="all", OMP_NUM_THREADS="1")
    assert (done.returncode, [line for line in done.stderr.splitlines() if not line.startswith("note:")]) == (0, [])
    return report_of(folder)


def stop_rank_at(rank: int, step: int) -> None:
    """Make `rank` of the command stop with SIGSTOP in its `step`-th forward; runs in the command's process."""
    failpoints.orders.append(f"forward rank={rank} at={step} do=stop")


def run_and_kill(folder: Path, arguments: list[str], rank: int, step: int) -> None:
    """Kill the launcher while `rank` is stopped in the `step`-th forward of this start."""
    folder.mkdir()
    with Running(folder, *arguments, fork="all", first=partial(stop_rank_at, rank, step), OMP_NUM_THREADS="1") as job:
        job.wait_until(lambda: "T" in map(state_of, job.family()), "no rank has reached the step")
        family = job.family()
        job.process.kill()
        gone_after(family[1:], 5)
        assert job.process.wait(5) == -9
        assert job.leftovers == []


def test_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    job = JOB
    whole = run_to_the_end(tmp_path / "uninterrupted", job.arguments())
    assert (whole["steps"], whole["resumed_from_step"]) == (job.steps, None)
    checkpoints = tmp_path / "checkpoints"
    arguments = job.arguments("--checkpoint-dir", str(checkpoints), "--checkpoint-every", str(EVERY))
    step = 0
    for kill, (rank, at) in enumerate(job.kills):
        run_and_kill(tmp_path / f"killed-{kill}", arguments + ["--resume"] * bool(kill), rank, at - step)
        step = (at - 1) // EVERY * EVERY
    resumed = run_to_the_end(tmp_path / "resumed", [*arguments, "--resume"])
    assert resumed["resumed_from_step"] == step
    assert resumed["steps"] == job.steps
    assert resumed["replica_sha256"] == whole["replica_sha256"] == [whole["replica_sha256"][0]] * job.ranks
    assert (resumed["accuracy"], resumed["test_loss"]) == (whole["accuracy"], whole["test_loss"])
    assert all(name.startswith("step-") for name in os.listdir(checkpoints)), "the draft of the killed save remains"
