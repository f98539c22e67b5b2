"""Damage of any kind is detected and named, and the previous checkpoint is used instead.

Untrusted files are read in linear time and bounded memory, or refused by name: a manifest is parsed before any checksum
can be verified, and checksums can be forged.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from insides import manifest, safetensors_file, state_codec, strict_json
from paceline.checkpoint import Checkpointer, CheckpointWarning, load_weights
from paceline.errors import CheckpointError, NoCheckpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2; the bias equals the step number."""
    folder = tmp_path_factory.mktemp("saved")
    with Checkpointer(folder) as checkpointer:
        model = checkpointer.register("model", nn.Linear(1, 2))
        for step in (1, 2):
            nn.init.constant_(model.bias, step)
            checkpointer.save(step)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoints."""
    return shutil.copytree(saved, tmp_path, dirs_exist_ok=True)


def restored(folder: Path, step: int | None = None) -> tuple[int, float]:
    with Checkpointer(folder) as checkpointer:
        model = checkpointer.register("model", nn.Linear(1, 2))
        return checkpointer.restore(step), model.bias[0].item()


FILES = ["manifest.json", "model.safetensors", "rank-00000.safetensors", "state.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_extended_or_altered_file_is_detected(folder: Path, name: str) -> None:
    path = folder / "step-00000002" / name
    whole = path.read_bytes()
    offsets = sorted({0, 1, 7, 8, 9, *range(0, len(whole), max(1, len(whole) // 12)), len(whole) - 1})
    flipped = [whole[:at] + bytes([whole[at] ^ 0x20]) + whole[at + 1 :] for at in offsets]
    for altered in (*(whole[:at] for at in offsets), *flipped, whole + b"\n"):
        path.write_bytes(altered)
        with pytest.raises(manifest.Damaged):
            manifest.read_whole(path.parent, 2)
    path.write_bytes(whole)
    assert manifest.read_whole(path.parent, 2).step == 2


def flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def swap_steps(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "step-00000001", folder)


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def link(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder.parent.parent / "elsewhere")


def pipe(folder: Path) -> None:
    (folder / "state.json").unlink()
    os.mkfifo(folder / "state.json")


def grow(folder: Path) -> None:
    with (folder / "manifest.json").open("r+b") as file:
        file.truncate(2**40)


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (flip, "model.safetensors does not have the SHA-256"),
    (swap_steps, "belongs to step 1, not to step 2"),
    (empty, "manifest.json is missing"),
    (lambda folder: (folder / "state.json").unlink(), "state.json is missing"),
    (link, "model.safetensors cannot be read"),
    (pipe, "state.json is not a regular file"),
    (grow, r"manifest.json has more than \d+ bytes"),
]


@pytest.mark.parametrize(("damage", "why"), DAMAGES)
def test_a_damaged_checkpoint_is_skipped_by_name_unless_it_was_requested(
    folder: Path, damage: Callable[[Path], None], why: str
) -> None:
    path = folder / "step-00000002"
    damage(path)
    with pytest.warns(CheckpointWarning, match=f"step-00000002 is damaged and skipped: .*{why}"):
        assert restored(folder) == (1, 1.0)
    with pytest.warns(CheckpointWarning, match=f"step-00000002 is damaged and skipped: .*{why}"):
        assert load_weights(folder)["bias"][0] == 1
    with pytest.raises(NoCheckpoint, match=f"step-00000002 is damaged: .*{why}.*; choose another step"):
        restored(folder, 2)
    with pytest.raises(CheckpointError, match=f"step-00000002 is damaged: .*{why}.*; choose another step"):
        load_weights(path)


def test_if_every_checkpoint_is_damaged_all_are_named_and_none_restored(folder: Path) -> None:
    flip(folder / "step-00000001")
    empty(folder / "step-00000002")
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(NoCheckpoint, match=r"damaged: step-00000001, step-00000002\); restore one"),
    ):
        restored(folder)


def forge(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest and recompute its checksum, as an attacker would."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    del body["sha256"]
    change(body)
    digest = hashlib.sha256(strict_json.render(body)).hexdigest()
    path.write_bytes(strict_json.render({**body, "sha256": digest}, indent=1) + b"\n")


def forge_state(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "state.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_bytes(strict_json.render(state))

    def adjust(body: dict[str, Any]) -> None:
        entry = next(entry for entry in body["files"] if entry["path"] == "state.json")
        entry.update(size=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest())

    forge(folder, adjust)


def at(index: int, **change: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda body: body["files"][index].update(change)


FORGERIES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (at(0, path="../../etc/passwd"), r"'../../etc/passwd', which is not a valid checkpoint file name"),
    (at(0, path="manifest.json"), "not a valid checkpoint file name"),
    (at(0, size=-1), "but the manifest says -1"),
    (at(0, size=[9] * 10**5), r"but the manifest says \[9, .{70,90}…"),
    (at(0, sha256=json.loads("[" * 600 + "]" * 600)), r"malformed \(RecursionError"),
    (lambda body: body.update(step=2.0), "2.0' is not a count"),
    (at(0, path="state.json"), "lists a file twice"),
    (at(0, tensors={"w": {"shape": [1], "dtype": "object"}}), "does not have the tensors that the manifest lists"),
    (at(0, tensors={"w": {"shape": [1]}}), "malformed"),
    (lambda body: body.update(format_version=0), "format_version is 0, not 1"),
    (lambda body: body.update(more=1), "checksum"),
    (lambda body: body["files"].pop(), "does not list state.json"),
]


@pytest.mark.parametrize(("change", "why"), FORGERIES)
def test_a_forged_manifest_is_refused(folder: Path, change: Callable[[dict[str, Any]], Any], why: str) -> None:
    forge(folder / "step-00000002", change)
    with pytest.warns(CheckpointWarning, match=why):
        assert restored(folder) == (1, 1.0)


def test_a_newer_format_is_refused_and_blocks_saving(folder: Path) -> None:
    # It counted as damaged, so a run resumed from an older checkpoint and overwrote or pruned this one.
    newer, elsewhere = folder / "step-00000002", folder / "elsewhere"
    forge(newer, lambda body: body.update(format_version=2))
    refused = f"{newer} has format 2, but this version of Paceline reads formats up to 1; update Paceline"
    for use in (Checkpointer, Checkpointer, load_weights, lambda folder: load_weights(newer)):
        with pytest.raises(NoCheckpoint, match=refused):
            use(folder)
    with Checkpointer(elsewhere) as checkpointer:
        shutil.rmtree(elsewhere)
        shutil.copytree(newer, elsewhere / newer.name)  # as if another disk were mounted there
        for _ in range(2):
            with pytest.raises(CheckpointError, match="has format 2"):
                checkpointer.save(2)


STATES: list[Callable[[dict[str, Any]], Any]] = [
    lambda state: state.update(objects=[]),
    lambda state: state.pop("ranks"),
    lambda state: state["ranks"].append({}),
    lambda state: state["objects"].update(model=3),
    lambda state: state["objects"]["model"].update(state={"pickle": "gASV"}),
    lambda state: state["objects"]["model"].update(state={"tensor": "nowhere"}),
    lambda state: state["ranks"][0].update(rng={"state": {"eval": "1"}, "metadata": None, "buckets": None}),
]


@pytest.mark.parametrize("change", STATES)
def test_a_forged_state_is_refused(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    forge_state(folder / "step-00000002", change)
    with pytest.raises(CheckpointError, match="malformed"):
        restored(folder)


def test_a_pickle_in_place_of_a_tensor_file_is_never_loaded(folder: Path) -> None:
    path = folder / "step-00000002" / "model.safetensors"
    torch.save({"weight": torch.ones(1)}, path)
    raw = path.read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    forge(path.parent, at(0, size=len(raw), sha256=digest))
    with pytest.warns(CheckpointWarning, match="not a safetensors file"):
        assert restored(folder) == (1, 1.0)


# -- untrusted files ---------------------------------------------------------------------------------------------------


AMPLIFIED = {
    "lists": b"[" + b"[]," * 2_700_000 + b"0]",
    "dicts": b"[" + b'{"":0},' * 1_100_000 + b"0]",
    "entries": b"{" + b'"":0,' * 1_600_000 + b'"":0}',
}


@pytest.mark.parametrize("raw", AMPLIFIED.values(), ids=AMPLIFIED)
def test_json_that_would_expand_in_memory_is_refused_before_parsing(raw: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"up to \d+ values"):
        strict_json.parse(raw, limit=2**23)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(raw)


def entry(begin: Any, end: Any, shape: Any = (1,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HEADERS: dict[str, tuple[Any, int]] = {
    "more than the file": ({"a": entry(0, 4)}, 3),
    "huge": ({"a": entry(0, 2**62, (2**60,))}, 4),
    "dtype that torch does not have": ({"a": entry(0, 1, dtype="F8_E8M0")}, 1),
    "dimension that torch cannot count": ({"a": entry(0, 0, (0, 2**63))}, 0),
    "deep": (b"[" * 99_999, 0),
    "many": (b"{" + b'"":[],' * 2_000_000 + b"}", 0),
}


@pytest.mark.parametrize(("tensors", "data"), HEADERS.values(), ids=HEADERS)
def test_a_hostile_header_is_refused(tmp_path: Path, tensors: Any, data: int) -> None:
    raw, path = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode(), tmp_path / "x.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data))
    with pytest.raises(ValueError, match="not a safetensors file"):
        safetensors_file.read(path, safetensors_file.read_specs(path))


def test_hash_colliding_keys_are_refused() -> None:
    # Integers hash modulo 2**61 - 1 without a secret, so 100,000 colliding keys took minutes.
    node = {"items": [[{"int": hex(index * (2**61 - 1))}, 0] for index in range(2000)]}
    with pytest.raises(ValueError, match="2000 of a dict's keys have the same hash"):
        state_codec.decode(node, {})
    assert state_codec.decode({"items": [[-1, 0], [-2, 1]]}, {}) == {-1: 0, -2: 1}
    with pytest.raises(ValueError, match="1 occurs twice"):
        state_codec.decode({"items": [[1, 0], [1, 1]]}, {})
