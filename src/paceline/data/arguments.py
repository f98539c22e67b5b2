"""Checks of the arguments that samplers and streams share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sized
from operator import index
from typing import Any, SupportsIndex

import torch.distributed as dist

from paceline.core import world
from paceline.core.schedulers import adopted
from paceline.errors import CheckpointMismatch, UsageError


def find_place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size: the arguments if given, else the process group's, else 0 and 1."""
    if rank is None or world_size is None:
        default_rank, default_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            current = world.current()
            default_rank, default_size = current.rank, current.size
        elif (size := (os.environ | adopted(os.environ)).get("WORLD_SIZE", "1")) != "1":
            raise UsageError(
                f"WORLD_SIZE={size}, but the process group is not initialized, so the data cannot be split; call "
                "paceline.init() first, or give rank= and world_size="
            )
        rank = default_rank if rank is None else rank
        world_size = default_size if world_size is None else world_size
    at_least("world_size", world_size, 1)
    if at_least("rank", rank, 0) >= world_size:
        raise UsageError(f"rank {rank} is not below world_size {world_size}; give a rank in 0..{world_size - 1}")
    return rank, world_size


def at_least(name: str, value: int, minimum: int) -> int:
    """Check that `value` is a whole number >= `minimum`, and return it."""
    # Accept any integer type, such as NumPy's, but not bool, which is an int in Python.
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or index(value) < minimum:
        raise UsageError(f"{name} must be a whole number >= {minimum}, not {value!r}")
    return index(value)


def size_of(dataset: Sized | int) -> int:
    """Return the number of samples in a dataset; a number is returned unchanged."""
    if isinstance(dataset, int):
        return at_least("the number of samples", dataset, 1)
    name = type(dataset).__name__
    try:
        size = len(dataset)
    except TypeError:
        raise UsageError(f"{name} has no length; use paceline.data.GlobalBatchStream for an IterableDataset") from None
    if size < 1:
        raise UsageError(f"{name} has no samples; give a dataset with at least one")
    return size


def reiterable(dataset: Any) -> Iterable[Any]:
    """Check that each ``iter()`` of `dataset` starts from the beginning, and return it."""
    name = type(dataset).__name__
    if isinstance(dataset, Iterator):
        raise UsageError(
            f"{name} is an iterator, which can be read only once; give an IterableDataset whose __iter__ starts from "
            "the beginning"
        )
    if not isinstance(dataset, Iterable):
        raise UsageError(f"{name} cannot be iterated; give an IterableDataset")
    return dataset


def check_settings(rank: int, state: dict[str, Any], settings: dict[str, Any], remedies: dict[str, str]) -> None:
    """Refuse a saved `state` if its `settings` differ; in a remedy, ``{}`` stands for the saved value."""
    for name, value in settings.items():
        if (saved := state.get(name)) != value:
            raise CheckpointMismatch(
                f"rank {rank}: {name} was {saved!r} when the checkpoint was written but is {value!r} now; "
                f"{remedies[name].format(saved)}"
            )
