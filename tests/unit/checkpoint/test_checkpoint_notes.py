"""Choosing the checkpoint to restore, keeping the best ones, and metadata."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from test_checkpoint_ranks import raised
from torch import nn

from paceline.checkpoint import Checkpointer
from paceline.core.world import World
from paceline.errors import CheckpointWarning, DesyncError, NoCheckpoint, UsageError
from twins import Pools


def open_with(folder: Path, **options: Any) -> tuple[Checkpointer, nn.Module]:
    checkpointer = Checkpointer(folder, **options)
    return checkpointer, checkpointer.register("model", nn.Linear(2, 1))


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
    mistakes = (
        raised(checkpointer.restore, 1 + 2 * world.rank),
        raised(checkpointer.save, 9, {"a": {1} if world.rank else 1}),
    )
    checkpointer.close()
    return (*found, model.weight.mean().item(), mistakes)


def test_every_rank_gets_the_same_answers(pools: Pools, tmp_path: Path) -> None:
    for *found, mistakes in pools.run(2, on_two_ranks, str(tmp_path)):
        assert found == [1, {"acc": 5.0}, [1, 3], 1, 1.0]
        (kind, message), (other, unencodable) = mistakes
        assert kind == DesyncError.__name__
        assert "restores step" in message
        assert other == UsageError.__name__
        assert "metadata['a'] is a builtins.set" in unencodable
