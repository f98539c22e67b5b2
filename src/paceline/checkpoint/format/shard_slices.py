"""Slices of the whole that the tensors of a saved shard hold, read from the shard itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.checkpoint.format import state_codec
from paceline.checkpoint.format.safetensors_file import Spec
from paceline.core.state.optimizer_shards import KEY
from paceline.core.torch_internals.tensors import tree_leaves


@dataclass(frozen=True)
class Slice:
    """The elements from `start` to `stop` of a flat tensor; `whole` is the shape of the full tensor."""

    start: int
    stop: int
    whole: tuple[int, ...]


@torch.inference_mode(False)  # where views do not know their base
def slices_of(nodes: Mapping[str, Any], specs: Mapping[str, Spec]) -> dict[str, Slice]:
    """Return, by name, the slices of one rank's tensors that are pieces; `nodes` has the rank's objects."""
    tensors = {name: spec.empty("meta") for name, spec in specs.items()}
    names = {id(tensor): name for name, tensor in tensors.items()}
    found: dict[str, Slice] = {}
    for node in nodes.values():
        try:
            if KEY not in node["state"]["dict"]:
                continue
        except (TypeError, KeyError):  # another kind of state
            continue
        state = state_codec.decode(node["state"], tensors)
        try:
            pieces, shapes = state[KEY]["pieces"], state[KEY]["shapes"]
            for index in state["state"].keys() & pieces.keys():
                start, stop = map(int, pieces[index])
                place = Slice(start, stop, tuple(shapes[index]))
                for leaf in tree_leaves(state["state"][index]):
                    # Numbers beside the pieces have other shapes.
                    if isinstance(leaf, torch.Tensor) and leaf.shape == (stop - start,):
                        found[names[id(leaf._base if leaf.is_complex() else leaf)]] = place
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ValueError(f"a shard is malformed ({type(error).__name__}: {str(error)[:80]})") from None
    return found
