"""Loads weights from a checkpoint, for evaluation or another program; needs no Checkpointer, lock or process group."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from paceline.checkpoint.format import manifest, safetensors_file, state_codec, verify
from paceline.checkpoint.format.manifest import RANK_ROLE, Manifest
from paceline.checkpoint.format.shard_slices import is_shard_node
from paceline.checkpoint.format.state_codec import Encoder
from paceline.checkpoint.objects.registered import Outline, Registered
from paceline.checkpoint.storage import step_folders
from paceline.core import strict_json
from paceline.core.state.optimizer_shards import KEY, Assembly, Window
from paceline.core.state.unwrapping import unwrap
from paceline.errors import CheckpointError, NoCheckpoint, UsageError


def load_weights(
    path: str | os.PathLike[str], model: nn.Module | None = None, name: str = "model"
) -> dict[str, torch.Tensor]:
    """Return the weights in a checkpoint, on the CPU, tied ones under each of their names. ::

        model.load_state_dict(paceline.load_weights("runs/7"))
        paceline.load_weights("runs/7/step-00000120", model)

    Nothing is changed in the folder, and a run may be using it.

    Args:
        path: a run's folder (the newest whole checkpoint is read), a checkpoint's folder, or a single
            ``model.safetensors``, which cannot be verified and whose complex tensors are pairs of reals.
        model: the model to load them into; wrapped, compiled or plain. Names, shapes and dtypes must fit. The
            averages of an ``AveragedModel`` (``torch.optim.swa_utils``) can be loaded into the model itself.
        name: the name under which the model was registered; the Trainer uses ``"model"``.

    Returns:
        The ``state_dict`` of the model inside its wrappers, without ``module.`` and ``_orig_mod.``.

    Raises:
        NoCheckpoint: if there is none at `path`, or none that is whole.
        CheckpointError: if the checkpoint at `path` is damaged.
        CheckpointMismatch: if it does not fit `model`.
        UsageError: if no module is registered as `name`.
    """
    if not isinstance(path, str | os.PathLike) or not (model is None or isinstance(model, nn.Module)):
        raise UsageError(
            f"load_weights({type(path).__name__}, {type(model).__name__}): give the path first, then the module, as in "
            "load_weights('runs/7', model)"
        )
    place = Path(path)
    if place.is_dir():
        step, node, tensors = _read_folder(place, name)
    elif place.is_file():
        step, tensors = step_folders.step_of(place.resolve().parent.name) or 0, _read_file(place)
        node = {"state": {"OrderedDict": {"dict": {key: {"tensor": key} for key in tensors}}}, "metadata": None}
    else:
        raise NoCheckpoint(f"there is no checkpoint at {place}; check the path")
    state = state_codec.decode(node["state"], tensors)
    if not isinstance(state, dict):
        raise UsageError(f"what is saved as {name!r} in {place} is no module; give the name that the model has")
    weights: dict[str, torch.Tensor] = state
    if model is not None and "n_averaged" in weights and not isinstance(unwrap(model), AveragedModel):
        encoder = Encoder()
        named = [(key.removeprefix("module."), value) for key, value in weights.items() if key != "n_averaged"]
        weights = OrderedDict(named)
        node, tensors = {"state": encoder.encode(weights), "metadata": None}, encoder.tensors
    if model is not None:
        entry = Registered(name, model)
        entry.check(Outline(weights, None), step, allow_changed=False)
        entry.load(node, tensors, step)
    return weights


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    try:
        specs = safetensors_file.read_specs(path)
        tensors = safetensors_file.read(path, specs)
        aliases = safetensors_file.read_aliases(path, specs)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; use another checkpoint") from error
    return OrderedDict(tensors | {alias: tensors[target] for alias, target in aliases.items()})


def _read_folder(folder: Path, name: str) -> tuple[int, Any, dict[str, torch.Tensor]]:
    """Return step, node and tensors of the object `name` in the checkpoint, or the newest one of the run, `folder`."""
    step = step_folders.step_of(folder.resolve().name)
    if step is not None:
        try:
            found = verify.read_whole(folder, step)
        except verify.Damaged as damage:
            raise _damaged(folder, damage) from None
    elif (newest := step_folders.newest(folder, set())) is not None:
        folder, found = newest
    else:
        raise NoCheckpoint(f"there is no checkpoint in {folder} that is whole; check the path")
    return found.step, *read_object(folder, found, name)


def read_object(folder: Path, found: Manifest, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return node and tensors of the object `name` in the checkpoint `folder`, which was verified by `found`.

    An optimizer that was saved in shards is put together.

    Raises:
        CheckpointError: if it is malformed.
        UsageError: if no shared or sharded object is saved as `name`.
    """
    try:
        state = strict_json.parse(verify.read_document(folder / manifest.STATE))
        ranks = state["ranks"]
        in_shards = sorted(each for each, node in ranks[0].items() if is_shard_node(node)) if ranks else []
        if name in in_shards:
            encoder = Encoder()
            whole = encoder.encode(_unsharded(folder, found, ranks, name))
            return {"state": whole, "metadata": None}, encoder.tensors
        node = state["objects"].get(name)
        if node is None:
            raise UsageError(
                f"nothing is saved as {name!r} in {folder}, which has {sorted([*state['objects'], *in_shards])}; give "
                "one of these names"
            )
        file = found.file(name)
        tensors = {} if file is None else safetensors_file.read(folder / file.path, file.tensors)
        # Only to find damage; the caller decodes it again.
        state_codec.decode(node["state"], tensors)
        state_codec.decode(node["metadata"], tensors)
    # Before the next clause, which would take it for damage, because it is a ValueError.
    except UsageError:
        raise
    except (verify.Damaged, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, error) from None
    return node, tensors


def _unsharded(folder: Path, found: Manifest, ranks: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Merge the shards of the optimizer `name` in the checkpoint `folder`, one at a time; return its state.

    Raises:
        CheckpointMismatch: if a shard is missing.
        OSError: if a file cannot be read.
        ValueError: if one is malformed.
    """
    assembly: Assembly | None = None
    for rank, nodes in enumerate(ranks):
        file = found.file(RANK_ROLE, rank)
        names = [] if file is None else [key for key in file.tensors if key.startswith(f"{name}.")]
        tensors = {} if file is None else safetensors_file.read(folder / file.path, names)
        shard = state_codec.decode(nodes[name]["state"], tensors)
        if assembly is None:
            shapes, strides = shard[KEY]["shapes"], shard[KEY]["strides"]
            whole = {index: Window(tuple(shape), tuple(strides[index]), None) for index, shape in shapes.items()}
            assembly = Assembly(whole)
        assembly.add(shard)
    assert assembly is not None, "a name among shards has some"
    return {"state": dict(sorted(assembly.state().items())), "param_groups": assembly.groups}


def _damaged(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"the checkpoint {folder} is damaged: {error}; use another one")
