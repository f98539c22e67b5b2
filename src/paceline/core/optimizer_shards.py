"""States of sharded optimizers: the description in each shard, and the assembly of all ranks' shards.

A shard is a dict like the result of ``torch.optim.Optimizer.state_dict``, with only this rank's piece of every
parameter, flattened in memory order. Its entry ``"shards"`` describes the pieces:

    rank, ranks     the shard's rank, and the number of ranks
    pieces          by parameter, start and stop of its elements; whole parameters have no entry
    shapes, strides, dtypes    of all parameters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CheckpointMismatch

KEY = "shards"


def is_shard(state: Any) -> bool:
    """Return whether `state` is a shard of an optimizer's state."""
    return isinstance(state, Mapping) and isinstance(state.get(KEY), Mapping)


@dataclass(frozen=True)
class Window:
    """The requested elements of a parameter's state: all, or a piece in memory order."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    piece: tuple[int, int] | None

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return torch.Size(self.shape).numel()

    def cut(self, full: Tensor) -> Tensor:
        """Return the wanted part of the `full` tensor of :attr:`shape`."""
        if self.piece is None:
            return full
        start, stop = self.piece
        laid_out = torch.empty_strided(self.shape, self.stride, dtype=full.dtype, device=full.device).copy_(full)
        # A view would keep the whole tensor in memory.
        return laid_out.as_strided((self.numel,), (1,))[start:stop].clone()


def cut_state(entry: Mapping[str, Any], window: Window) -> dict[str, Any]:
    """Return a whole parameter's state, with tensors of the parameter's shape cut to the `window`."""
    return {
        key: window.cut(value) if isinstance(value, Tensor) and value.shape == window.shape and value.dim() else value
        for key, value in entry.items()
    }


@dataclass
class Assembly:
    """Assembles the state of the `wanted` windows, by parameter, from shards that are added one by one."""

    wanted: Mapping[int, Window]
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Parameter groups of the shards."""
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    """Dtypes of the parameters when the shards were saved."""
    _ranks: dict[int, int] = field(default_factory=dict)
    """Number of ranks according to each added shard, by the shard's rank."""
    _entries: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Entries by parameter, without the tensors of pieces, which are in :attr:`_parts`."""
    _parts: dict[tuple[int, str], list[tuple[int, Tensor]]] = field(default_factory=dict)
    """First element and values of each known part of a tensor, by parameter and name."""
    _strides: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Strides of the parameters when the shards were saved."""

    def add(self, shard: Mapping[str, Any]) -> None:
        """Add the wanted part of `shard`."""
        about = shard[KEY]
        self._ranks[about["rank"]] = about["ranks"]
        self.groups = self.groups or shard["param_groups"]
        for index, window in self.wanted.items():
            if tuple(about["shapes"].get(index, ())) != window.shape:
                raise CheckpointMismatch(
                    f"parameter {index} of the optimizer has shape {window.shape}, but the shard of rank "
                    f"{about['rank']} has shape {tuple(about['shapes'].get(index, ()))}; build the same "
                    "model and parameter groups as in the saved run"
                )
            self.dtypes[index] = about["dtypes"][index]
            self._strides[index] = tuple(about["strides"][index])
            if index in shard["state"]:
                self._take(index, window, shard["state"][index], about["pieces"].get(index))

    def _take(self, index: int, window: Window, entry: Mapping[str, Any], piece: Sequence[int] | None) -> None:
        merged = self._entries.setdefault(index, {})
        for key, value in entry.items():
            if piece is not None and isinstance(value, Tensor) and value.shape == (piece[1] - piece[0],):
                start, stop = self._span(index, window)
                first, last = max(start, piece[0]), min(stop, piece[1])
                if first < last:
                    part = value[first - piece[0] : last - piece[0]]
                    # Cloned, because a view would keep the whole shard in memory.
                    self._parts.setdefault((index, key), []).append((first, part.clone()))
            else:
                merged.setdefault(key, value)

    def _span(self, index: int, window: Window) -> tuple[int, int]:
        """Return the range of elements to keep, in the saved memory order; all if the current order differs."""
        if window.piece is None or window.stride != self._strides[index]:
            return 0, window.numel
        return window.piece

    def state(self) -> dict[int, dict[str, Any]]:
        """Return the state of the windows, by parameter, once all shards have been added."""
        ranks = max(self._ranks.values(), default=1)
        if missing := [rank for rank in range(ranks) if rank not in self._ranks]:
            raise CheckpointMismatch(
                f"the optimizer's state was saved in {ranks} shards, and that of rank {missing[0]} is missing; load "
                "all of them, or use optimizer.full_state_dict()"
            )
        if not self._ranks or set(self._ranks.values()) != {ranks}:
            raise CheckpointMismatch("the shards come from different numbers of ranks; load the shards of one save")
        for (index, key), parts in self._parts.items():
            self._entries[index][key] = self._whole(index, key, parts)
        return {
            index: cut_state(entry, self.wanted[index]) if self._is_whole(index) else entry
            for index, entry in self._entries.items()
        }

    def _is_whole(self, index: int) -> bool:
        return self.wanted[index].piece is not None and not any(index == of for of, _ in self._parts)

    def _whole(self, index: int, key: str, parts: list[tuple[int, Tensor]]) -> Tensor:
        window = self.wanted[index]
        start, stop = self._span(index, window)
        flat = torch.empty(stop - start, dtype=parts[0][1].dtype, device=parts[0][1].device)
        if sum(part.numel() for _, part in parts) != flat.numel():
            raise CheckpointMismatch(
                f"the shards lack elements of {key!r} of the optimizer's parameter {index}; load the shards of one save"
            )
        for first, part in parts:
            flat[first - start : first - start + part.numel()] = part
        if (start, stop) == window.piece and window.stride == self._strides[index]:
            return flat
        return window.cut(flat.as_strided(window.shape, self._strides[index]))


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group, without its parameters and their names."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def uncast(loaded: Any, saved: Any) -> Any:
    """Return the state `loaded`; take tensors that torch has cast to another dtype from `saved` instead."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        same = loaded.dtype == saved.dtype or not saved.is_floating_point() or loaded.shape != saved.shape
        return loaded if same else saved.to(device=loaded.device, copy=True)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        # torch keeps the counter "step" in float32 on purpose
        loaded.update({key: uncast(loaded[key], saved[key]) for key in loaded.keys() & saved.keys() if key != "step"})
    if type(loaded) in (list, tuple) and type(saved) is type(loaded) and len(loaded) == len(saved):
        return type(loaded)(map(uncast, loaded, saved))
    return loaded
