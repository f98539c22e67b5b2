"""Checks of the arguments that samplers and streams share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sized
from operator import index
from typing import Any, SupportsIndex

import torch.distributed as dist

from paceline.core.processes import world
from paceline.core.processes.schedulers import adopted
from paceline.core.state.data_position import LIMIT, short
from paceline.core.state.rng import derive_seed
from paceline.errors import CheckpointMismatch, UsageError


def find_place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size: the arguments, otherwise the process group's, otherwise 0 and 1."""
    if rank is None or world_size is None:
        here = (0, 1)
        if dist.is_available() and dist.is_initialized():
            current = world.current()
            here = (current.rank, current.size)
        elif (size := (os.environ | adopted(os.environ)).get("WORLD_SIZE", "1")) != "1":
            raise UsageError(
                f"WORLD_SIZE={size} but there is no process group yet, so the data "
                "cannot be split; call paceline.init() first, or give rank= and world_size="
            )
        rank, world_size = here[0] if rank is None else rank, here[1] if world_size is None else world_size
    at_least("world_size", world_size, 1)
    if at_least("rank", rank, 0) >= world_size:
        raise UsageError(f"rank {rank} is not below world_size {world_size}; give a rank in 0..{world_size - 1}")
    return rank, world_size


def at_least(name: str, value: int, least: int) -> int:
    """Return `value`, if it is a whole number and not below `least`."""
    # Any index, such as NumPy's whole numbers, but no truth value, which is an int to Python.
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or index(value) < least:
        raise UsageError(f"{name} must be a whole number >= {least}, not {value!r}")
    return index(value)


def size_of(dataset: Sized | int) -> int:
    """Return the number of samples of a data set, which may be that number itself."""
    if isinstance(dataset, int):
        return at_least("the number of samples", dataset, 1)
    name = type(dataset).__name__
    try:
        size = len(dataset)
    except TypeError:
        raise UsageError(f"{name} has no length; for an IterableDataset use paceline.data.GlobalBatchStream") from None
    if size < 1:
        raise UsageError(f"{name} has no samples; give a data set with at least one")
    return size


def reiterable(dataset: Any) -> Iterable[Any]:
    """Return `dataset` if each ``iter()`` of it starts from the beginning."""
    name = type(dataset).__name__
    if isinstance(dataset, Iterator):
        raise UsageError(
            f"{name} is an iterator, which can be read only once and so neither split nor resumed; give "
            "an IterableDataset whose __iter__ begins anew"
        )
    if not isinstance(dataset, Iterable):
        raise UsageError(f"{name} cannot be iterated; give an IterableDataset")
    return dataset


def check_settings(rank: int, state: dict[str, Any], settings: dict[str, Any], remedies: dict[str, str]) -> None:
    """Refuse a saved `state` whose `settings` are not equal; a remedy has ``{}`` for the saved value."""
    for name, ours in settings.items():
        if (theirs := state.get(name)) != ours:
            raise CheckpointMismatch(
                f"rank {rank}: {name} was {theirs!r} when the checkpoint was written but is {ours!r} now; "
                f"{remedies[name].format(theirs)}"
            )


def short_seed(seed: int) -> int:
    """Return a number for a seed that fits into a :class:`~.data_position.Origin`."""
    return seed if seed < LIMIT else short(derive_seed(seed))
