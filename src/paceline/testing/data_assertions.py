"""The assertion that ranks divide the data among themselves, and shuffle it again in every epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from paceline.core.state.digests import tensor_digest
from paceline.testing.replica_assertions import check_world


def assert_data_is_split(
    epoch: Callable[[int], Iterable[Any]], epochs: int = 2, shuffled: bool = True, repeated: int = 0
) -> None:
    """Assert that in every epoch no sample comes twice, and that epochs have their samples in another order.

    All ranks call it. Samples count as the same if they have the same values.

    Args:
        epoch: gives this rank's batches of the epoch of a number, as the training has them. Batches are tensors, or
            lists, tuples or dictionaries of tensors whose first dimension counts samples.
        epochs: how many are looked at.
        shuffled: whether their order has to differ.
        repeated: how many samples of an epoch may come twice, as samplers fill up the last batches.

    Raises:
        AssertionError: on every rank, if it is otherwise; names epoch and ranks.
    """
    __tracebackhide__ = True
    check_world("assert_data_is_split()")
    size = dist.get_world_size()
    seen: list[list[list[str]]] = []
    for number in range(epochs):
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, [sample for batch in epoch(number) for sample in _samples(batch)])
        seen.append(everyone)
        _check_split(everyone, number, repeated)
    for number in range(1, epochs if shuffled else 0):
        if seen[number] == seen[number - 1] and len(seen[number][0]) > 2:
            raise AssertionError(
                f"epoch {number} has the same samples in the same order as epoch {number - 1} on every rank; call "
                "sampler.set_epoch(epoch) before each epoch"
            )


def _check_split(everyone: list[list[str]], number: int, repeated: int) -> None:
    __tracebackhide__ = True
    owners: dict[str, int] = {}
    twice: dict[tuple[int, int], int] = {}
    for rank, samples in enumerate(everyone):
        for sample in samples:
            if sample in owners:
                pair = owners[sample], rank
                twice[pair] = twice.get(pair, 0) + 1
            owners.setdefault(sample, rank)
    if sum(twice.values()) > repeated:
        (first, second), count = max(twice.items(), key=lambda entry: entry[1])
        whose = f"rank {first} has" if first == second else f"ranks {first} and {second} share"
        raise AssertionError(
            f"in epoch {number} {whose} {count} of {len(everyone[second])} samples, that come twice; give every rank "
            "a sampler that divides the data, with the same seed on all"
        )


def _samples(batch: Any) -> list[str]:
    """Return a digest of each sample of a batch."""
    tensors = _tensors(batch)
    count = len(tensors[0]) if tensors else 0
    return [
        hashlib.sha256(b"".join(tensor_digest(tensor[index]) for tensor in tensors)).hexdigest()
        for index in range(count)
    ]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.dim() else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]
