"""Loads weights from a checkpoint without a Checkpointer, a lock or a process group."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.checkpoint import manifest, state_codec, step_folders
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.registered import Outline, Registered
from paceline.checkpoint.restore import Saved, malformed
from paceline.checkpoint.state_codec import Encoder
from paceline.checkpoint.step_names import step_at
from paceline.core.optimizer_shards import KEY, Assembly, Window
from paceline.core.world import World
from paceline.errors import NoCheckpoint, UsageError

_ALONE = World(rank=0, size=1, local_rank=0, local_size=1, node=0, device=torch.device("cpu"))


def load_weights(
    path: str | os.PathLike[str], model: nn.Module | None = None, name: str = "model"
) -> dict[str, torch.Tensor]:
    """Return the weights in a checkpoint, on the CPU, with tied weights under each of their names.

    ::

        model.load_state_dict(paceline.load_weights("runs/7"))
        paceline.load_weights("runs/7/step-00000120", model)

    The folder is only read, so a run may be using it.

    Args:
        path: a run's folder (the newest intact checkpoint is read) or a checkpoint's folder.
        model: the model to load the weights into; wrapped, compiled or plain. Names, shapes and dtypes must fit.
        name: the name of the registered model; the Trainer uses ``"model"``.

    Returns:
        The ``state_dict`` of the model inside its wrappers, without ``module.`` and ``_orig_mod.``.

    Raises:
        NoCheckpoint: if no intact checkpoint is found at `path`.
        CheckpointError: if the checkpoint was not written by Paceline.
        CheckpointMismatch: if the weights do not fit `model`.
        UsageError: if no module is saved as `name`.
    """
    if not isinstance(path, str | os.PathLike) or not (model is None or isinstance(model, nn.Module)):
        raise UsageError(
            f"load_weights() takes a path and a module, not {type(path).__name__} and {type(model).__name__}; write "
            "load_weights('runs/7', model)"
        )
    place = Path(path)
    if not place.is_dir():
        raise NoCheckpoint(
            f"there is no checkpoint at {place}; give the folder of a run or a checkpoint, or read a single file with "
            "safetensors.torch.load_model()"
        )
    step, node, tensors = read_folder(place, name)
    state = state_codec.decode(node["state"], tensors)
    if not isinstance(state, dict):
        raise UsageError(f"{name!r} in {place} is not a module; give the name of the registered model")
    weights: dict[str, torch.Tensor] = state
    if node["metadata"] is not None:  # versions that modules use to convert older states
        state._metadata = state_codec.decode(node["metadata"], tensors)  # type: ignore[attr-defined]
    if model is not None:
        entry = Registered(name, model)
        entry.check(Outline(weights, {}), step, allow_changed=False)
        entry.load(node, tensors, step)
    return weights


def read_folder(folder: Path, name: str) -> tuple[int, Any, dict[str, torch.Tensor]]:
    """Return the step, node and tensors of the object `name`; `folder` belongs to a checkpoint or a run.

    The checkpoint is verified. The shards of an optimizer are merged.
    """

    def read(path: Path, step: int) -> tuple[int, Any, dict[str, torch.Tensor]]:
        return step, *_read_object(path, manifest.read_whole(path, step), name)

    if (step := step_at(folder)) is not None:
        return step_folders.intact(folder, step, read)
    if (newest := step_folders.newest(folder, set(), read)) is not None:
        return newest[1]
    raise NoCheckpoint(f"there is no intact checkpoint in {folder}; check the path")


def _read_object(folder: Path, listed: Manifest, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    saved = Saved.open(_ALONE, lambda: (folder, listed))
    if name in saved.objects:
        saved.outline(name)  # refuses malformed nodes
        return saved.objects[name], saved.tensors(_ALONE, name)
    sharded = [key for key in (saved.ranks[0] if saved.ranks else ()) if saved.has_shards(key)]
    if name not in sharded:
        raise UsageError(
            f"nothing is saved as {name!r} in {folder}, which has {sorted([*saved.objects, *sharded])}; choose one of "
            "these names"
        )
    try:
        state = _unsharded(saved, name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise malformed(saved.path, error) from None
    encoder = Encoder()
    return {"state": encoder.encode(state), "metadata": None}, encoder.tensors


def _unsharded(saved: Saved, name: str) -> dict[str, Any]:
    """Return the merged state of the optimizer `name`."""
    assembly: Assembly | None = None
    for rank, nodes in enumerate(saved.ranks):
        shard = state_codec.decode(nodes[name]["state"], saved.shard_tensors(_ALONE, name, rank))
        if assembly is None:
            shapes, strides = shard[KEY]["shapes"], shard[KEY]["strides"]
            assembly = Assembly({key: Window(tuple(shape), tuple(strides[key]), None) for key, shape in shapes.items()})
        assembly.add(shard)
    assert assembly is not None
    return {"state": dict(sorted(assembly.state().items())), "param_groups": assembly.groups}
