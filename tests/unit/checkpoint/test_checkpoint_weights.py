"""Portable weights: tied weights are named in the file, compiled modules leave no prefix, and one call loads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from test_checkpoint_roundtrip import Holder, Tied, opened, same, save
from torch import nn

import paceline
from insides import export, manifest
from paceline.checkpoint import load_weights
from paceline.errors import CheckpointError, CheckpointMismatch, NoCheckpoint, UsageError


def test_tied_weights_are_named_in_the_file_metadata(tmp_path: Path) -> None:
    # load_file and a strict load_state_dict failed with "Missing key head.weight" and no explanation.
    model, fresh = Tied(), Tied()
    path = save(tmp_path, model=model) / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"head.weight": "embed.weight", "format": "pt"}
    with pytest.raises(RuntimeError, match=r"Missing key"):
        fresh.load_state_dict(load_file(path))
    assert load_model(fresh, path) == (set(), [])
    manifest = json.loads(path.with_name("manifest.json").read_text())
    assert manifest["aliases"] == {"model.safetensors": {"head.weight": "embed.weight"}}
    [tensors] = (file["tensors"] for file in manifest["files"] if file["role"] == "model")
    assert tensors["embed.weight"] == {"shape": [10, 6], "dtype": "float32"}
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("what", ["run", "step"])
def test_load_weights_only_needs_a_path(tmp_path: Path, what: str) -> None:
    model, fresh, other = Tied(), Tied(), Tied()
    path = save(tmp_path / "run", model=model)
    place = path if what == "step" else tmp_path / "run"
    fresh.load_state_dict(paceline.load_weights(str(place)))  # strict
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))
    weights = paceline.load_weights(place, other)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert other.head.weight is other.embed.weight
    assert list(weights) == list(model.state_dict())


def test_missing_and_mismatched_weights_are_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path / "run", model=nn.Linear(2, 2), notes=Holder([1]))
    for place in (tmp_path / "nowhere", path / "model.safetensors"):
        with pytest.raises(NoCheckpoint, match=rf"there is no checkpoint at .*{place.name}; give the folder of a run"):
            load_weights(place)
    with pytest.raises(NoCheckpoint, match=r"no intact checkpoint in"):
        load_weights(tmp_path)
    with pytest.raises(UsageError, match=r"nothing is saved as 'ema' in .*, which has \['model', 'notes'\]"):
        load_weights(path, name="ema")
    with pytest.raises(UsageError, match=r"'notes' in .* is not a module"):
        load_weights(path, name="notes")
    with pytest.raises(CheckpointMismatch, match=r"'weight' of 'model' has shape \(2, 2\)"):
        load_weights(path, nn.Linear(2, 3))
    with pytest.raises(CheckpointMismatch, match=r"'0.weight' of 'model' is not in .* of step 1"):
        load_weights(path, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


class Body(nn.Linear):
    """A layer with a version and extra state (initially None)."""

    _version = 5
    extra: Any = None
    seen: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.seen = metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


def parts(compiled: bool) -> tuple[nn.Module, Body]:
    """Return a model and its submodule that may be compiled."""
    body = Body(2, 2)
    return nn.Sequential(torch.compile(body, backend="eager") if compiled else body, nn.Linear(2, 1)), body


@pytest.mark.parametrize("before", [False, True], ids=["plain to compiled", "compiled to plain"])
def test_compiling_a_submodule_keeps_names_version_and_extra_state(tmp_path: Path, before: bool) -> None:
    # Its keys contained "_orig_mod.", so compiled and uncompiled runs could not load each other's checkpoints.
    def objects(compiled: bool) -> tuple[Body, dict[str, Any]]:
        model, body = parts(compiled)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return body, {"model": model, "optimizer": optimizer}

    (body, saved), (fresh_body, fresh) = objects(before), objects(not before)
    body.extra = torch.ones(3)
    path = save(tmp_path, **saved)
    names = {"0.weight", "0.bias", "0._extra_state", "1.weight", "1.bias"}
    assert set(load_file(path / "model.safetensors")) == names
    with opened(tmp_path, fresh) as checkpointer:
        checkpointer.restore()
    again, again_body = parts(not before)
    load_weights(path, again)
    plain, plain_body = parts(False)
    plain.load_state_dict(load_weights(path))
    for model, its_body in ((fresh["model"], fresh_body), (again, again_body), (plain, plain_body)):
        assert (its_body.seen, its_body.extra.tolist()) == (5, [1.0] * 3)
        assert all(map(torch.equal, model.parameters(), saved["model"].parameters()))


@pytest.mark.parametrize(
    ("function", "reads_first", "newer"),
    [("read_manifest", False, 2), ("read_manifest", True, 2), ("read_manifest", True, 1), ("read_whole", True, 2)],
)
@pytest.mark.parametrize("load", [load_weights, export])
def test_reading_a_checkpoint_deleted_meanwhile_falls_back_to_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, reads_first: bool, newer: int, load: Any
) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    run, out = tmp_path / "run", tmp_path / "out.pt"
    save(run, 1, model=first)
    read, calls = getattr(manifest, function), []

    def read_and_prune(folder: Path, step: int) -> Any:
        calls.append(step)
        listed = read(folder, step) if len(calls) > 1 or reads_first else None
        if len(calls) == 1:
            save(run, newer, keep=1, model=second)
        return listed or read(folder, step)

    monkeypatch.setattr(manifest, function, read_and_prune)
    weights = load(run) if load is load_weights else (load(run, "model", out), torch.load(out))[1]
    assert same(dict(weights), dict(second.state_dict()))
    assert calls[0] == 1
    assert calls[-1] == newer


def test_checkpoints_that_change_during_every_read_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(folder: Path, step: int) -> Any:
        (folder / str(len(list(folder.iterdir())))).mkdir()
        raise manifest.Damaged("model.safetensors is missing")

    monkeypatch.setattr(manifest, "read_whole", read)
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(CheckpointError, match="were deleted or replaced 101 times while they were read"):
        load_weights(tmp_path)


def test_deleting_every_checkpoint_while_reading_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(folder: Path, step: int) -> Any:
        shutil.rmtree(folder)
        raise manifest.Damaged("model.safetensors is missing")

    monkeypatch.setattr(manifest, "read_whole", read)
    path = tmp_path / "step-00000001"
    for place, message in ((path, "was deleted while it was read"), (tmp_path, "no intact checkpoint")):
        path.mkdir()
        (tmp_path / "step-00000002").mkdir(exist_ok=True)
        with pytest.raises(NoCheckpoint, match=message):
            load_weights(place)
