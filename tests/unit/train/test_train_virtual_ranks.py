"""Virtual ranks in the Trainer: bit-identical weights, optimizer and metrics on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from insides import weights_sha256
from paceline import World
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel, accumulate
from paceline.optim import ShardedOptimizer
from paceline.train import Evaluation, Trainer, evaluate, predict
from ranks import Pools, run_ranks
from trainings import Interrupted, Settings, digest, interruption, refusal

SAMPLES, BATCH, SLICES = 3 * 16 + 5, 16, 8
"""The last batch has 5 samples, so 3 of 8 slices are empty."""


class Pictures(Dataset[tuple[Tensor, int]]):
    """Pictures of four classes with noise drawn on every access."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.x = torch.randn(samples, 2, 8, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index] + 0.1 * torch.randn(2, 8, 8), index % 4


def network() -> nn.Module:
    """Return a CNN with BatchNorm and dropout."""
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU()),
        *(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2)),
        *(nn.Flatten(), nn.Linear(6 * 16, 4)),
    )


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x).float(), y, reduction="sum"), len(y)


def sums(module: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
    """Return the sums of an evaluation, with random noise."""
    x, y = batch
    logits = module(x + 0.1 * torch.randn(x.shape)).float()
    return {"loss": F.cross_entropy(logits, y, reduction="sum"), "right": (logits.argmax(1) == y).sum()}, len(y)


def config(folder: Path | None = None, **options: Any) -> Settings:
    given = {"epochs": 2, "virtual_ranks": SLICES, "evaluate_every": 3, "clip_norm": 0.5, "log_every": 3, **options}
    if folder is not None:
        given |= {"checkpoint_dir": str(folder / "points"), "checkpoint_every": 1}
        given |= {"metrics_file": str(folder / "metrics.jsonl")}
    return Settings(**given)


def trained(world: World, config: Settings, stop_after: int | None = None, sharded: bool = False) -> dict[str, Any]:
    """Train on this rank; return everything that must be bit-identical."""
    module = network()
    model = DistributedDataParallel(module, virtual_ranks=config.virtual_ranks)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if sharded:
        optimizer = ShardedOptimizer(model, torch.optim.AdamW, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)  # follows the evaluation
    evaluation = Evaluation(DataLoader(Pictures(), 12), sums, ("loss", "right"))
    loader = DataLoader(Pictures(), BATCH, shuffle=True, seed=5)
    objects = config.objects(optimizer)
    trainer = Trainer(model, optimizer, loss, loader, config, evaluation, scheduler, **objects)
    if stop_after is not None:
        optimizer.register_step_post_hook(interruption(stop_after))
    try:
        result = trainer.fit()
    except Interrupted:
        return {}
    state = {"weights": weights_sha256(model), "optimizer": digest(optimizer.state_dict())}
    state["rows"] = digest(trainer.predict(DataLoader(Pictures(), 12, shuffle=True)))
    return {**state, "buffers": digest(dict(module.named_buffers())), "metrics": result.metrics, "steps": result.steps}


def test_bits_and_metrics_are_the_same_on_1_2_and_4_ranks(pools: Pools) -> None:
    """Single precision is covered by the test that resumes on other ranks."""
    fp16 = config(precision="fp16")
    [alone] = pools.run(1, trained, fp16)
    assert alone["steps"] >= 6  # the GradScaler skips two
    for outcome in (*pools.run(2, trained, fp16), *pools.run(4, trained, fp16)):
        assert outcome == alone


@pytest.mark.slow
def test_bits_are_the_same_over_gloo_and_on_8_ranks(pools: Pools) -> None:
    bf16 = config(precision="bf16")
    [alone] = pools.run(1, trained, bf16)
    for size, backend in ((4, "gloo"), (8, None)):
        for outcome in run_ranks(size, trained, bf16, None, True, backend=backend):
            del outcome["optimizer"]  # sharded across ranks
            assert outcome.items() <= alone.items()


# -- resume on another number of ranks ------------------------------------------------------------------------------


def test_resume_mid_epoch_on_other_ranks_matches_an_uninterrupted_run(pools: Pools, tmp_path: Path) -> None:
    # From step 2 to 3 and from 5 to 6 a metrics line is pending, whose losses other ranks have accumulated.
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    [alone] = pools.run(1, trained, config(whole))
    pools.run(4, trained, config(parts), 2)
    pools.run(1, trained, config(parts, resume=True), 3)
    for outcome in pools.run(2, trained, config(parts, resume=True)):
        assert outcome == alone
    lines = [(folder / "metrics.jsonl").read_text() for folder in (whole, parts)]
    assert lines[0] == lines[1]


def resumed(world: World, folder: Path) -> list[str]:
    """Resume with other numbers of slices; return the refusals."""
    more = {"epochs": 1, "resume": True, "allow_changed_settings": True}
    return [refusal(trained, world, config(folder, virtual_ranks=count, **more)) for count in (4, None)]


def test_resume_with_another_number_of_slices_is_refused(pools: Pools, tmp_path: Path) -> None:
    pools.run(2, trained, config(tmp_path, epochs=1), 2)
    for messages in pools.run(2, resumed, tmp_path):
        for message, count in zip(messages, (4, None), strict=True):
            assert f"written with virtual_ranks=8, but this run has virtual_ranks={count}; resume with" in message


# -- other passes over the same loaders -----------------------------------------------------------------------------


def beside_plain_loops(world: World, is_shared: bool) -> tuple[list[Any], list[str]]:
    """Train models with 2 and 4 slices and read the loaders in plain loops; return the observed samples."""

    def loaders() -> list[DataLoader]:
        return [DataLoader(Pictures(), size, shuffle=True) for size in (BATCH, 12)]

    models, plain, common = list[Any](), list[str](), loaders()
    for count in (2, 4):
        training, held_out = common if is_shared else loaders()
        read = (training, held_out) if is_shared else loaders()
        model = DistributedDataParallel(network(), virtual_ranks=count)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        training.progress.set_epoch(0)
        for batch in accumulate(model, training):
            total, samples = loss(model, batch)
            with model.weight(samples):
                total.backward()
            if model.do_sync:
                optimizer.step()
                optimizer.zero_grad()
                models.append(evaluate(model, Evaluation(held_out, sums, ("loss", "right"))))
                read[1].progress.set_epoch(1)
                plain += [digest([x, y]) for x, y in read[1]]
        read[0].progress.set_epoch(1)
        plain += [digest([x, y]) for x, y in read[0]]
        models += [weights_sha256(model), digest(predict(model, held_out))]
    return models, plain


def test_plain_loops_and_models_with_different_slice_counts_share_loaders(pools: Pools) -> None:
    """A loader kept its slices, so "for x, y in loader" took two slices for x and y, and other counts were refused."""
    outcomes = set()
    for size in (1, 2):
        together = pools.run(size, beside_plain_loops, True)
        assert together == pools.run(size, beside_plain_loops, False)
        outcomes |= {repr(models) for models, _ in together}
    assert len(outcomes) == 1


# -- refusals -------------------------------------------------------------------------------------------------------


def trainer(batch_size: int = BATCH, accumulate: int = 1, **options: Any) -> None:
    """Build a Trainer with virtual ranks, without training."""
    loader = DataLoader(Pictures(), batch_size, **options)
    model = DistributedDataParallel(network(), virtual_ranks=SLICES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Trainer(model, optimizer, loss, loader, config(evaluate_every=None, accumulate=accumulate))


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "batch": ({"batch_size": 4}, "a global batch of 4 samples cannot be cut into virtual_ranks=8 slices; give 1 to 4"),
    "speed": ({"speed": [2, 1]}, "speed= cuts batches into slices of different lengths"),
    "cost": ({"cost": [float(at) for at in range(SAMPLES)]}, "cost= cuts batches into slices of different lengths"),
    "accumulate": ({"accumulate": 2}, "virtual_ranks=8 already cuts a step into micro-batches; leave out accumulate=2"),
}


@pytest.mark.ranks(2)
def test_mistakes_are_refused_in_one_line_before_training(world: World) -> None:
    for mistake, (options, expected) in MISTAKES.items():
        message = refusal(trainer, **options)
        assert expected in message, mistake
        assert "\n" not in message
