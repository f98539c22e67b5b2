"""Merges the shards of a saved optimizer into the state of the unsharded optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint.format import safetensors_file, state_codec
from paceline.checkpoint.format.manifest import RANK_ROLE, Manifest
from paceline.checkpoint.format.shard_slices import is_shard_node
from paceline.core.state.optimizer_shards import KEY, Assembly, Window


def shards_among(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the objects whose nodes show that each of `ranks` has a shard."""
    return sorted(name for name, node in ranks[0].items() if is_shard_node(node)) if ranks else []


def put_together(folder: Path, found: Manifest, ranks: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
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
        assembly = assembly or Assembly(_whole(shard[KEY]))
        assembly.add(shard)
    assert assembly is not None, "a name among shards has some"
    return {"state": dict(sorted(assembly.state().items())), "param_groups": assembly.groups}


def _whole(about: Mapping[str, Any]) -> dict[int, Window]:
    shapes, strides = about["shapes"], about["strides"]
    return {index: Window(tuple(shape), tuple(strides[index]), None) for index, shape in shapes.items()}
