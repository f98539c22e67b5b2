"""Slices of the whole that the tensors of a saved shard hold, read from the shard itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.checkpoint.format import state_codec
from paceline.checkpoint.format.safetensors_file import Spec
from paceline.core.state.optimizer_shards import KEY


@dataclass(frozen=True)
class Slice:
    """The elements from `start` to `stop` of a flat tensor; `whole` is the shape of the full tensor."""

    start: int
    stop: int
    whole: tuple[int, ...]


def is_shard_node(node: Mapping[str, Any]) -> bool:
    """Return whether an object's `node` is that of a shard."""
    return {KEY, "state", "param_groups"} <= dict(_items(node["state"])).keys()


def slices_of(nodes: Mapping[str, Any], specs: Mapping[str, Spec]) -> dict[str, Slice]:
    """Return, by name, the slices of one rank's tensors that are pieces; `nodes` has the rank's objects."""
    found: dict[str, Slice] = {}
    for node in nodes.values():
        if not is_shard_node(node):
            continue
        try:
            parts = dict(_items(node["state"]))
            about = state_codec.decode(parts[KEY], {})
            pieces = {index: (int(start), int(stop)) for index, (start, stop) in about["pieces"].items()}
            for index, entry in _items(parts["state"]):
                if index in pieces:
                    place = Slice(*pieces[index], tuple(about["shapes"][index]))
                    found |= dict.fromkeys(_pieces(entry, specs, place.stop - place.start), place)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"a shard is malformed ({type(error).__name__}: {str(error)[:80]})") from None
    return found


def _pieces(entry: Any, specs: Mapping[str, Spec], numel: int) -> Iterator[str]:
    """Yield the tensors of a parameter's state that are pieces of `numel` elements, not numbers beside them."""
    for _, leaf in _items(entry):
        for name, is_complex in state_codec.tensors_in(leaf):
            shape = specs[name].shape
            if (shape[:-1] if is_complex else shape) == (numel,):
                yield name


def _items(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys of the dict that `node` encodes, with the nodes of their values; nothing for other nodes."""
    if not isinstance(node, dict) or len(node) != 1:
        return
    ((tag, content),) = node.items()
    if tag == "dict":
        yield from content.items()
    elif tag == "items":
        for key, value in content:
            yield state_codec.decode(key, {}), value
