"""Sparse gradients, which travel outside buckets: only the rows that some rank touched.

A bucket would hold an embedding of millions of rows whole. So parameters whose layer says ``sparse=True`` have no place
in one, and what a parameter in a bucket gives as a sparse gradient is left out of it. The control block says for which
parameters that is so on any rank; these are averaged by all ranks in a pass of their own. Each rank's rows, which may
be of any number, are gathered as a sum to which a rank contributes its own part alone, then added up in the order of
ranks: the result has the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn

from paceline.ddp.transport.channel import Channel, Pausing
from paceline.ddp.transport.gathering import gather_numbers
from paceline.errors import DesyncError


def sparse_by_layer(module: nn.Module) -> set[int]:
    """The ``id`` of every parameter whose layer gives sparse gradients, as ``nn.Embedding(sparse=True)`` does."""
    layers = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse]
    return {id(layer.weight) for layer in layers}


def stored_elements(gradient: Tensor) -> Tensor:
    """The elements that a gradient stores: all of a dense one's, the values of a sparse one."""
    return gradient._values() if gradient.is_sparse else gradient


def as_dense(gradient: Tensor) -> Tensor:
    """`gradient` itself if it is dense."""
    # torch 2.13's to_dense() gives zeros for values that were expanded, as sum() hands them back; `* 1` lays them out.
    return (gradient.detach() * 1).to_dense() if gradient.is_sparse else gradient


def average_sparse(
    indices: Sequence[int],
    local: Mapping[int, Tensor],
    parameters: Sequence[Tensor],
    names: Sequence[str],
    scale: float,
    channel: Channel,
) -> Pausing[dict[int, Tensor]]:
    """Average the sparse gradients of parameters `indices`; this rank holds `local`, the rest count as zero.

    Returns the averages, coalesced, by parameter.

    Raises:
        DesyncError: if ranks give gradients with other numbers of sparse dimensions.
    """
    parts = {index: local[index].detach().coalesce() for index in indices if index in local}
    # Per parameter: how many entries it has on this rank, and over how many dimensions they are spread.
    pairs = [(parts[index]._nnz(), parts[index].sparse_dim()) if index in parts else (0, 0) for index in indices]
    flat = [number for pair in pairs for number in pair]
    sizes = yield from gather_numbers(channel, flat, "exchange of the sizes of sparse gradients")

    gathered = []
    for at, index in enumerate(indices):
        dims = {row[2 * at + 1] for row in sizes} - {0}
        if len(dims) != 1:
            raise DesyncError(
                f"rank {channel.rank}: the gradient of {names[index]!r} has {sorted(dims)} sparse dimensions on "
                "different ranks; use the same layers on every rank"
            )
        gathered.append(
            _Gathered(parameters[index], parts.get(index), [row[2 * at] for row in sizes], dims.pop(), channel)
        )
    yield True
    return {index: entries.average(scale, channel) for index, entries in zip(indices, gathered, strict=True)}


class _Gathered:
    """The entries of one parameter's gradient on all ranks, one rank after the other, on their way."""

    def __init__(
        self, parameter: Tensor, local: Tensor | None, counts: list[int], sparse_dim: int, channel: Channel
    ) -> None:
        self._counts, self._shape = counts, parameter.shape
        self._sparse_shape = parameter.shape[:sparse_dim]
        total, row = sum(counts), parameter.shape[sparse_dim:]
        self._keys = torch.zeros(total, dtype=torch.int64, device=parameter.device)
        self._values = torch.zeros((total, *row), dtype=parameter.dtype, device=parameter.device)
        if local is not None:
            own = slice(sum(counts[: channel.rank]), sum(counts[: channel.rank + 1]))
            self._keys[own] = _places(local.indices(), self._sparse_shape)
            self._values[own] = local.values()
        self._launched = [channel.all_reduce(part) for part in (self._keys, self._values) if part.numel()]

    def average(self, scale: float, channel: Channel) -> Tensor:
        """Wait, and add up in the order of ranks."""
        for launched in self._launched:
            channel.meet(launched, "gathering of sparse gradients")
        keys, place = torch.unique(self._keys, return_inverse=True)
        # Half precision is added up in single: a sum of N may overflow where the mean does not.
        dtype = torch.promote_types(self._values.dtype, torch.float32)
        total = torch.zeros((len(keys), *self._values.shape[1:]), dtype=dtype, device=keys.device)
        at = 0
        for count in self._counts:
            # A rank's entries are coalesced, so no two of them meet: the order of ranks is the only one.
            total.index_add_(0, place[at : at + count], self._values[at : at + count].to(dtype))
            at += count
        values = total.mul_(scale).to(self._values.dtype)
        indices = (
            torch.stack(torch.unravel_index(keys, self._sparse_shape))
            if len(keys)
            else keys.new_zeros((len(self._sparse_shape), 0))
        )
        return torch.sparse_coo_tensor(indices, values, self._shape, check_invariants=False, is_coalesced=True)


def _places(indices: Tensor, shape: torch.Size) -> Tensor:
    """Places in a flat tensor of `shape` for `indices`, shape (dimensions, entries)."""
    steps = torch.tensor([prod(shape[dim + 1 :]) for dim in range(len(shape))], device=indices.device)
    return (indices * steps[:, None]).sum(0)
