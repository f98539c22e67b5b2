"""Assertions about replicas and data across ranks. All ranks must call them."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.core.digests import tensor_digest
from paceline.core.unwrapping import plain_name, unwrap
from paceline.errors import UsageError
from paceline.testing.faults import tensors_of


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers: torch's, Paceline's, and any whose only child is their ``module``."""
    model = unwrap(model)
    while isinstance(inner := getattr(model, "module", None), nn.Module) and list(model.children()) == [inner]:
        model = unwrap(inner)
    return model


def assert_replicas_equal(model: nn.Module) -> None:
    """Assert that all parameters and buffers of `model` are bit-identical on all ranks.

    Raises:
        AssertionError: on every rank. Names the first tensor that differs, a rank, and the difference.
        UsageError: if parameters are sharded, because ranks then have different parts of them.
    """
    __tracebackhide__ = True
    check_world("assert_replicas_equal()")
    module = unwrapped(model)
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    tensors = {plain_name(name): value.detach() for name, value in named}
    digests = {name: _digest(name, value) for name, value in tensors.items()}
    gathered = gather(digests)
    reference = gathered[0]
    for rank, entry in enumerate(gathered):
        if odd := [name for name in [*reference, *entry] if (name in reference) != (name in entry)]:
            raise AssertionError(
                f"replicas differ: {odd[0]!r} is only on rank {0 if odd[0] in reference else rank}, not on rank "
                f"{rank if odd[0] in reference else 0}"
            )
    different = {name: [entry[name] != reference[name] for entry in gathered] for name in reference}
    different = {name: where for name, where in different.items() if any(where)}
    if not different:
        return
    name, where = next(iter(different.items()))
    index = where.index(True)
    count = f"; {len(different)} of {len(reference)} tensors differ" if len(reference) > 1 else ""
    kinds = [gathered[0][name][0], gathered[index][name][0]]
    if kinds[0] != kinds[1]:
        detail = f"is {kinds[1]} on rank {index} and {kinds[0]} on rank 0"
    else:
        # `gathered` is the same on all ranks, so all of them call this collective.
        values = gather(tensors[name].cpu())
        detail = f"on rank {index} differs from rank 0's{_distance(values[index], values[0])}"
    raise AssertionError(f"replicas differ: {name!r} {detail}{count}")


def check_world(call: str) -> None:
    """Raise unless there is a process group."""
    if not dist.is_initialized():
        raise UsageError(f"{call} needs a process group; mark the test with pytest.mark.ranks")


def _digest(name: str, tensor: Tensor) -> tuple[str, bytes]:
    if hasattr(tensor, "placements"):
        raise UsageError(f"{name!r} is sharded, so ranks have different parts of it; compare full tensors")
    return f"{tensor.dtype} {tuple(tensor.shape)}", tensor_digest(tensor)


def gather(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _distance(first: Tensor, second: Tensor) -> str:
    if not first.numel() or first.dtype == torch.bool:
        return ""
    wide = torch.complex128 if first.is_complex() else torch.float64
    return f" by up to {float((first.to(wide) - second.to(wide)).abs().max()):.3g}"


def assert_data_is_split(epoch: Callable[[int], Iterable[Any]], shuffled: bool = True) -> None:
    """Assert that no sample is repeated within epoch 0 or epoch 1, and that the two epochs have different orders.

    All ranks must call it. Samples with the same values count as the same sample.

    Args:
        epoch: returns this rank's batches of the epoch with the given number. Batches are tensors, or lists, tuples or
            dictionaries of tensors whose first dimension counts samples.
        shuffled: whether the orders of the two epochs must differ.

    Raises:
        AssertionError: on every rank. Names the epoch and the ranks.
    """
    __tracebackhide__ = True
    check_world("assert_data_is_split()")
    epochs: list[list[list[str]]] = []
    for number in (0, 1):
        epochs.append(gather([sample for batch in epoch(number) for sample in _samples(batch)]))
        _check_split(epochs[-1], number)
    # With one or two samples, the order is often the same by chance.
    if shuffled and epochs[0] == epochs[1] and len(epochs[1][0]) > 2:
        raise AssertionError(
            "epoch 1 has the same samples in the same order as epoch 0 on every rank; call "
            "sampler.set_epoch(epoch) before each epoch"
        )


def _check_split(by_rank: list[list[str]], number: int) -> None:
    __tracebackhide__ = True
    owners: dict[str, int] = {}
    twice: Counter[tuple[int, int]] = Counter()
    for rank, samples in enumerate(by_rank):
        for sample in samples:
            if sample in owners:
                twice[owners[sample], rank] += 1
            owners.setdefault(sample, rank)
    if twice:
        [((first, second), count)] = twice.most_common(1)
        whose = f"rank {first} repeats" if first == second else f"ranks {first} and {second} share"
        raise AssertionError(
            f"in epoch {number} {whose} {count} of {len(by_rank[second])} samples; give every rank a sampler that "
            "splits the data without padding, with the same seed on all ranks"
        )


def _samples(batch: Any) -> list[str]:
    """Return a digest of each sample of a batch."""
    tensors = [tensor for tensor in tensors_of(batch) if tensor.dim()]
    count = len(tensors[0]) if tensors else 0
    return [
        hashlib.sha256(b"".join(tensor_digest(tensor[index]) for tensor in tensors)).hexdigest()
        for index in range(count)
    ]
