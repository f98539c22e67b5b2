"""When to save, what to keep, and which checkpoint to restore."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from test_checkpoint_folder import open_with
from test_checkpoint_ranks import raised
from torch import nn

from insides import RunFolder, automatic_interval, consensus, due_saves
from paceline import DistributedDataParallel, World, accumulate
from paceline.checkpoint import Checkpointer
from paceline.errors import CheckpointWarning, DesyncError, NoCheckpoint, UsageError
from twins import Pools


def save(checkpointer: Checkpointer, model: nn.Module, *steps: int, **options: Any) -> None:
    for step in steps:
        nn.init.constant_(model.weight, step)
        checkpointer.save(step, **options)


def test_a_requested_step_is_restored(tmp_path: Path) -> None:
    checkpointer, model = open_with(tmp_path)
    save(checkpointer, model, 1, 2, 3)
    assert checkpointer.restore(2) == 2
    assert model.weight.mean() == 2
    assert checkpointer.restore() == 3
    with pytest.raises(NoCheckpoint, match=r"no checkpoint of step 7 in .*, which has \[1, 2, 3\]; choose"):
        checkpointer.restore(step=7)


def test_a_partial_restore_leaves_other_objects_unchanged(tmp_path: Path) -> None:
    checkpointer, model = open_with(tmp_path)
    other = checkpointer.register("other", nn.Linear(2, 1))
    for step in (1, 2):
        nn.init.constant_(other.weight, step)
        save(checkpointer, model, step)
    torch.rand(1)  # moves the generator on from its saved state
    generator = torch.get_rng_state()
    assert checkpointer.restore(1, only=["model"]) == 1
    assert (model.weight.mean(), other.weight.mean()) == (1, 2)
    assert torch.equal(torch.get_rng_state(), generator)
    with pytest.raises(UsageError, match=r"no object is registered as 'weights'; choose from \['model', 'other'\]"):
        checkpointer.restore(1, only=["model", "weights"])


VALUES: dict[str, Any] = {
    "number": 71.25,
    "nan": math.nan,
    "text": "läuft",
    "none": None,
    "nested": {"confusion": [[1, 2], [3, 4]], "shape": (3, 4)},
}


def test_metadata_round_trips(tmp_path: Path) -> None:
    checkpointer, model = open_with(tmp_path)
    save(checkpointer, model, 1, metadata=VALUES)
    save(checkpointer, model, 2, metadata={"acc": torch.tensor(0.5), "best": numpy.float64(0.25)})
    save(checkpointer, model, 3)
    assert repr(checkpointer.metadata(1)) == repr(VALUES)
    assert checkpointer.metadata(2) == {"acc": 0.5, "best": 0.25}
    assert checkpointer.metadata(3) == checkpointer.metadata() == {}
    assert not (tmp_path / "step-00000003" / "metadata.json").exists()
    with pytest.raises(NoCheckpoint, match="no checkpoint of step 4"):
        checkpointer.metadata(4)
    (tmp_path / "step-00000001" / "metadata.json").write_text("{}")
    with pytest.raises(NoCheckpoint, match=r"step-00000001 is damaged: metadata.json has 2 bytes"):
        checkpointer.metadata(1)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"metadata": [1]}, r"metadata must be a dict with string keys, not \[1\]"),
    ({"metadata": {1: 2}}, "metadata must be a dict with string keys"),
    ({"metadata": {"a": {"b": {1}}}}, r"metadata\['a'\]\['b'\] is a builtins.set; give numbers"),
    ({"metadata": {"a": torch.ones(3)}}, "metadata contains the tensor 'a'; register"),
    ({"protect": 1}, "protect must be True or False, not 1"),
]


def test_metadata_that_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    checkpointer, _ = open_with(tmp_path)
    for options, message in BAD:
        with pytest.raises(UsageError, match=message):
            checkpointer.save(1, **options)
    assert checkpointer.steps() == []


def test_best_and_protected_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpointer, model = open_with(tmp_path, keep=2, keep_best="acc")
    for step, acc in enumerate((0.1, 0.5, 0.9, 0.9, math.nan, 0.2, 0.3), start=1):
        with (
            pytest.warns(CheckpointWarning, match=r"metadata\['acc'\] of this checkpoint is NaN")
            if acc != acc
            else nullcontext()
        ):
            save(checkpointer, model, step, metadata={"acc": acc}, protect=step == 2)
    assert checkpointer.steps() == [2, 3, 6, 7]
    assert checkpointer.best() == 3
    assert checkpointer.restore(checkpointer.best()) == 3
    checkpointer.close()
    checkpointer, model = open_with(tmp_path, keep=1, keep_best="acc")  # a resumed run remembers them
    save(checkpointer, model, 8, metadata={"acc": 1})
    save(checkpointer, model, 9)
    assert checkpointer.steps() == [2, 8, 9]


def test_a_metric_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    # It was saved but never counted as the best, so the checkpoint that the user wanted was deleted.
    checkpointer, model = open_with(tmp_path, keep_best="acc")
    for acc in ("71.2", True, [71.2], {"top1": 71.2}):
        with pytest.raises(UsageError, match=r"compares numbers, but metadata\['acc'\] is .*; give a number"):
            checkpointer.save(1, metadata={"acc": acc})
    assert checkpointer.steps() == []
    for step, number in enumerate((None, torch.tensor(0.5), numpy.float32(0.25), numpy.int64(0)), start=1):
        save(checkpointer, model, step, metadata={"acc": number})
    assert checkpointer.best() == 2


def test_the_best_metric_can_be_the_smallest(tmp_path: Path) -> None:
    checkpointer, model = open_with(tmp_path, keep=1, keep_best="loss", best="min")
    assert checkpointer.best() is None
    for step, loss in enumerate((3.0, 1.0, 2.0), start=1):
        save(checkpointer, model, step, metadata={"loss": loss})
    assert (checkpointer.steps(), checkpointer.best()) == ([2, 3], 2)


def on_two_ranks(world: World, folder: str) -> tuple[Any, ...]:
    checkpointer, model = open_with(Path(folder), keep=1, keep_best="acc")
    save(checkpointer, model, 1, metadata={"acc": 5.0 - world.rank})
    save(checkpointer, model, 2, metadata={"acc": 1.0})
    save(checkpointer, model, 3, metadata={"acc": float(world.rank)})
    found = checkpointer.best(), checkpointer.metadata(1), checkpointer.steps(), checkpointer.restore(1)
    mistake = raised(checkpointer.restore, 1 + 2 * world.rank)
    checkpointer.close()
    return (*found, model.weight.mean().item(), mistake)


def test_every_rank_gets_the_same_answers(pools: Pools, tmp_path: Path) -> None:
    for *found, (kind, message) in pools.run(2, on_two_ranks, str(tmp_path)):
        assert found == [1, {"acc": 5.0}, [1, 3], 1, 1.0]
        assert kind == DesyncError.__name__
        assert "restores step" in message


# -- intervals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("save_s", "hosts", "interval_s"),
    [
        (None, 1, 60),  # the first save measures the cost
        (0.01, 1, 674),
        (1.0, 1, 3600),  # 6,743 s without the upper bound
        (100.0, 1, 5000),  # saving hourly would cost 2.8 %
        (1.0, 64, 843),
        (30.0, 2048, 816),
        (0.1, 2048, 60),  # 47 s without the lower bound
    ],
)
def test_automatic_intervals_follow_youngs_bounded_formula(save_s: float | None, hosts: int, interval_s: float) -> None:
    assert automatic_interval(save_s, hosts) == pytest.approx(interval_s, rel=1e-3)


STEP_S = 20.0


def trained(world: World, folder: Path) -> tuple[list[int], int]:
    """Train 400 steps on a fake clock; return the saved steps and the number of decisions."""
    now, decisions, decide, save = 0.0, 0, consensus.decide, RunFolder.save

    def counted(*arguments: Any) -> Any:
        nonlocal decisions
        decisions += 1
        return decide(*arguments)

    def timed(*arguments: Any) -> Path:
        nonlocal now
        now += 0.1
        return save(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(due_saves, "time", SimpleNamespace(monotonic=lambda: now))
        patch.setattr(RunFolder, "save", timed)
        checkpointer = Checkpointer(folder, keep=99, every="auto", async_save=True)
        checkpointer.register("model", nn.Linear(2, 2))
        patch.setattr(due_saves, "consensus", SimpleNamespace(decide=counted, here=consensus.here))
        for _ in range(400):
            now += STEP_S * (1 + 4 * world.rank)  # only rank 0's clock matters
            checkpointer.step()
        checkpointer.wait()
        saved = checkpointer.steps()
        checkpointer.close()
    return saved, decisions


def test_the_interval_follows_the_save_cost_and_is_equal_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    interval_s = automatic_interval(0.1, 1)
    (saved, decisions), other = pools.run(2, trained, tmp_path)
    assert other == (saved, decisions)
    first, *_ = saved
    assert first * STEP_S == pytest.approx(60, abs=2 * STEP_S)
    gaps = [STEP_S * (later - earlier) for earlier, later in pairwise(saved)]
    assert len(gaps) == int(8000 / interval_s)
    assert all(interval_s <= gap < interval_s + 2 * STEP_S for gap in gaps)
    assert decisions < 120  # most of the 400 steps need no collective


@pytest.mark.parametrize("every", ["hourly", 0, True, 1.5])
def test_an_unknown_interval_is_refused(tmp_path: Path, every: Any) -> None:
    with pytest.raises(UsageError, match="must be a positive number of steps, a positive timedelta or 'auto'"):
        Checkpointer(tmp_path, every=every)


# -- accumulation windows ----------------------------------------------------------------------------------------------


def saved(checkpointer: Checkpointer, step: int) -> bool:
    try:
        checkpointer.save(step)
    except UsageError as error:
        message = str(error)
        if "'model' is in the middle of an accumulation window" in message and "save after optimizer.step()" in message:
            return False
        raise
    return True


def saves(world: World, folder: str, module: nn.Module, batch: Any) -> list[bool]:
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with Checkpointer(folder) as checkpointer:
        checkpointer.register("model", model)
        for number, each in enumerate(accumulate(model, [batch] * 5, every=2)):
            model(each).sum().backward()
            if model.do_sync:
                optimizer.step()
                optimizer.zero_grad()
            found.append(saved(checkpointer, number))
        # One rank is inside a window, so all refuse. Then both ways to drop the accumulated gradients.
        for set_to_none in (False, True):
            if world.rank == 0:
                with model.no_sync():
                    model(batch).sum().backward()
            found.append(saved(checkpointer, 10))
            optimizer.zero_grad(set_to_none=set_to_none)
            found.append(saved(checkpointer, 11))
    return found


MODELS = {
    "dense": (nn.Linear(3, 2), torch.ones(4, 3)),
    "sparse": (nn.Embedding(5, 2, sparse=True), torch.tensor([1, 3])),
}


@pytest.mark.parametrize("kind", MODELS)
def test_saving_is_only_allowed_between_windows(pools: Pools, tmp_path: Path, kind: str) -> None:
    # The resumed run skipped the micro-batches whose gradients were lost.
    for found in pools.run(2, saves, str(tmp_path), *MODELS[kind]):
        assert found == [False, True, False, True, True, False, True, False, True]
