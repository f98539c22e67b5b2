"""The slices of whole tensors that a saved shard holds."""

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
    """Elements `start` to `stop` of a flattened tensor of shape `whole`."""

    start: int
    stop: int
    whole: tuple[int, ...]


@torch.inference_mode(False)  # in inference mode, views have no _base
def slices_of(nodes: Mapping[str, Any], specs: Mapping[str, Spec]) -> dict[str, Slice]:
    """Return the slices of the tensors in one rank's state, by name; `nodes` contains the rank's objects."""
    tensors = {name: spec.empty("meta") for name, spec in specs.items()}
    names = {id(tensor): name for name, tensor in tensors.items()}
    slices: dict[str, Slice] = {}
    for node in nodes.values():
        try:
            if KEY not in node["state"]["dict"]:
                continue
        except (TypeError, KeyError):  # not an optimizer
            continue
        state = state_codec.decode(node["state"], tensors)
        try:
            pieces, shapes = state[KEY]["pieces"], state[KEY]["shapes"]
            for index in state["state"].keys() & pieces.keys():
                start, stop = map(int, pieces[index])
                piece = Slice(start, stop, tuple(shapes[index]))
                for leaf in tree_leaves(state["state"][index]):
                    # Other entries, such as step counts, have other shapes.
                    if isinstance(leaf, torch.Tensor) and leaf.shape == (stop - start,):
                        slices[names[id(leaf._base if leaf.is_complex() else leaf)]] = piece
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ValueError(f"a shard is malformed ({type(error).__name__}: {str(error)[:80]})") from None
    return slices
