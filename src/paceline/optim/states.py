"""The state of a sharded optimizer: read from the inner optimizer, gathered from all ranks, and loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.optimizer_shards import KEY, Assembly, Window, cut_state, is_shard, settings_of, uncast
from paceline.ddp.channel import Channel
from paceline.errors import CheckpointMismatch
from paceline.optim.arguments import Subject
from paceline.optim.sharding import Owned

MASTER = "master"
"""Key of the master copy in a parameter's state."""


def local_state(
    owned: Sequence[Owned],
    parameters: Sequence[nn.Parameter],
    groups: Sequence[Mapping[str, Any]],
    inner: Optimizer,
    subject: Subject,
    strides: Sequence[tuple[int, ...]],
) -> dict[str, Any]:
    """Return this rank's shard, see :mod:`~paceline.core.optimizer_shards`."""
    state: dict[int, dict[str, Any]] = {}
    for part in owned:
        entry = dict(inner.state[part.trained]) if part.trained in inner.state else {}
        if part.master_dtype is not None:
            entry[MASTER] = part.trained.detach()
        if entry:
            state[part.index] = entry
    return {
        "state": state,
        "param_groups": packed(groups),
        KEY: {
            "rank": subject.rank,
            "ranks": subject.size,
            "pieces": {part.index: list(part.piece) for part in owned if part.piece is not None},
            "shapes": {index: list(param.shape) for index, param in enumerate(parameters)},
            "strides": dict(enumerate(map(list, strides))),
            "dtypes": {index: param.dtype for index, param in enumerate(parameters)},
        },
    }


def packed(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups with parameters replaced by numbers, like torch's optimizers do in their state dicts."""
    packed, first = [], 0
    for group in groups:
        count = len(group["params"])
        settings = {name: value for name, value in group.items() if name != "params"}
        packed.append({**settings, "params": list(range(first, first + count))})
        first += count
    return packed


def full_state(
    shard: Mapping[str, Any], parameters: Sequence[nn.Parameter], channel: Channel | None, to: int | None
) -> dict[str, Any] | None:
    """Gather the shards of all ranks on every rank, or only on rank `to`."""
    size = 1 if channel is None else channel.size
    if to is not None and not 0 <= to < size:
        raise CheckpointMismatch(f"full_state_dict(to={to}) names a rank that does not exist; give a rank below {size}")
    wanted = {index: Window(tuple(param.shape), param.stride(), None) for index, param in enumerate(parameters)}
    assembly = Assembly(wanted) if channel is None or to in (None, channel.rank) else None
    # One shard at a time, so that a rank never holds more than one shard besides its result.
    for rank in range(size):
        part = shard if channel is None else _broadcast_shard(shard, rank, channel, parameters[0].device)
        if assembly is not None:
            assembly.add(part)
    if assembly is None:
        return None
    return {"state": dict(sorted(assembly.state().items())), "param_groups": deepcopy(assembly.groups)}


def _broadcast_shard(
    shard: Mapping[str, Any], source: int, channel: Channel, device: torch.device
) -> Mapping[str, Any]:
    """Return the shard of rank `source` on every rank."""
    tensors: list[Tensor] = []

    def replaced(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        return _Placeholder(tuple(value.shape), value.dtype, value.device.type)

    is_source = channel.rank == source
    plain = _mapped(shard, replaced) if is_source else None
    plain = channel.all_gather_object(plain)[source]
    if not is_source:

        def made(value: Any) -> Any:
            if isinstance(value, _Placeholder):
                # Only the type of the source's device matters, because each rank has its own GPU.
                own_device = value.device if value.device == "cpu" else device
                tensors.append(torch.empty(value.shape, dtype=value.dtype, device=own_device))
                return tensors[-1]
            return value

        plain = _mapped(plain, made)
    channel.broadcast([tensor.reshape(-1) if tensor.dim() == 0 else tensor for tensor in tensors], source)
    return shard if is_source else plain


class _Placeholder:
    """Shape, dtype and device of a tensor that is broadcast separately."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device


def _mapped(value: Any, function: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _mapped(entry, function) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(entry, function) for entry in value)
    return function(value)


def windows(owned: Sequence[Owned]) -> dict[int, Window]:
    """Return the part of each parameter's state that this rank needs."""
    return {part.index: Window(tuple(part.parameter.shape), part.parameter.stride(), part.piece) for part in owned}


def find_owned(
    state: Mapping[str, Any] | Iterable[Mapping[str, Any]] | Assembly,
    owned: Sequence[Owned],
    subject: Subject,
) -> dict[str, Any]:
    """Return this rank's part of `state`, in the form of a shard."""
    wanted = windows(owned)
    if not isinstance(state, Mapping):
        assembly = state if isinstance(state, Assembly) else _assembled(wanted, state)
        return {"state": assembly.state(), "param_groups": assembly.groups, "dtypes": assembly.dtypes}
    if not is_shard(state):
        parts = {index: cut_state(state["state"][index], wanted[index]) for index in wanted if index in state["state"]}
        return {"state": parts, "param_groups": state["param_groups"], "dtypes": {}}
    about = state[KEY]
    if about["ranks"] == 1:  # the whole state, which fits any number of ranks
        return find_owned([state], owned, subject)
    if (about["rank"], about["ranks"]) != (subject.rank, subject.size):
        raise CheckpointMismatch(
            f"rank {subject.rank} of {subject.size} was given the optimizer's shard of rank {about['rank']} of "
            f"{about['ranks']}; load a list with the shards of all ranks, or the result of full_state_dict()"
        )
    pieces = {index: tuple(piece) for index, piece in about["pieces"].items()}
    cut = [part for part in owned if part.piece is not None]
    # Pieces count elements in memory order, so with different strides they contain different elements.
    strides = {index: tuple(about["strides"][index]) for index in pieces}
    if pieces != {part.index: part.piece for part in cut} or strides != {
        part.index: part.parameter.stride() for part in cut
    }:
        raise CheckpointMismatch(
            f"the shard of rank {subject.rank} was cut differently from this optimizer's parameters; load a list "
            "with the shards of all ranks, or the result of full_state_dict()"
        )
    return {"state": state["state"], "param_groups": state["param_groups"], "dtypes": about["dtypes"]}


def _assembled(wanted: Mapping[int, Window], shards: Iterable[Any]) -> Assembly:
    assembly = Assembly(wanted)
    for shard in shards:
        if not is_shard(shard):
            raise CheckpointMismatch(
                "an entry in the list of shards is not a shard; give the local_state() of every rank"
            )
        assembly.add(shard)
    return assembly


def load(loaded: Mapping[str, Any], owned: Sequence[Owned], groups: Sequence[dict[str, Any]], inner: Optimizer) -> None:
    """Load the result of :func:`find_owned` into the inner optimizer and the settings of `groups`."""
    # A copy, because schedulers change the groups, and the loaded state belongs to the caller.
    saved = deepcopy(loaded["param_groups"])
    saved_sizes, sizes = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if saved_sizes != sizes:
        raise CheckpointMismatch(
            f"the optimizer's state has groups of {saved_sizes} parameters, but this optimizer has groups of {sizes}; "
            "create the groups that were saved"
        )
    number = {index: place for place, index in enumerate(key for group in saved for key in group["params"])}
    entries = {number.get(index, index): _copied(entry) for index, entry in loaded["state"].items()}
    places = {id(part.trained): place for place, part in enumerate(owned)}
    packed = [
        {**settings_of(group), "params": [places[id(trained)] for trained in inner_group["params"]]}
        for group, inner_group in zip(saved, inner.param_groups, strict=True)
    ]
    for part in owned:
        master = entries.get(part.index, {}).pop(MASTER, None)
        if part.master_dtype is not None:
            values = part.values() if master is None else master
            part.trained.data = values.to(device=part.parameter.device, dtype=part.master_dtype, copy=True)
    state = {place: entries[part.index] for place, part in enumerate(owned) if entries.get(part.index)}
    inner.load_state_dict({"state": state, "param_groups": packed})
    # torch casts a loaded state to the parameter's dtype, which would change state of another dtype.
    for place, part in enumerate(owned):
        if place in state and loaded["dtypes"].get(part.index) == part.parameter.dtype:
            uncast(inner.state[part.trained], state[place])
    for group, saved_group in zip(groups, saved, strict=True):
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        parameters = group["params"]
        group.clear()
        group.update({**names, **saved_group, "params": parameters})


def _copied(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return `entry` with copies of its tensors, because the optimizer changes them in place."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in entry.items()}
