"""Sparse gradients, which travel outside buckets: only the rows that some rank touched.

A bucket would hold an embedding of millions of rows whole. So parameters whose layer has ``sparse=True`` get no place
in one, and a sparse gradient of a parameter in a bucket is left out of it. The control block lists the parameters
with one; all ranks average these in a second pass. Each rank's rows, whose number may differ, are gathered as a
sum with one part from each rank, and then added up in the order of ranks, so that the result has the
same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn

from paceline.ddp.transport.channel import Channel, Pausing
from paceline.errors import DesyncError


def sparse_by_layer(module: nn.Module) -> set[int]:
    """Return the ``id`` of every parameter whose layer gives sparse gradients: ``nn.Embedding(sparse=True)``."""
    layers = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse]
    return {id(layer.weight) for layer in layers}


def stored_elements(gradient: Tensor) -> Tensor:
    """Return the elements that a gradient stores: all of a dense one, the values of a sparse one."""
    return gradient._values() if gradient.is_sparse else gradient


def as_dense(gradient: Tensor) -> Tensor:
    """Return a dense tensor with the values of `gradient`, which is itself if it is dense."""
    # torch 2.13's to_dense() gives zeros for expanded values, such as sum()'s backward makes; `* 1` lays them out.
    return (gradient.detach() * 1).to_dense() if gradient.is_sparse else gradient


def average_sparse(
    indices: Sequence[int],
    local: Mapping[int, Tensor],
    parameters: Sequence[Tensor],
    names: Sequence[str],
    scale: float,
    channel: Channel,
) -> Pausing[dict[int, Tensor]]:
    """Average the sparse gradients of parameters `indices`; this rank has `local`, the rest count as zero.

    Returns the averages, coalesced, by parameter.
    """
    parts = {index: local[index].detach().coalesce() for index in indices if index in local}
    # For each parameter, the number of its entries on this rank, and the number of its sparse dimensions.
    pairs = [(parts[index]._nnz(), parts[index].sparse_dim()) if index in parts else (0, 0) for index in indices]
    flat = [number for pair in pairs for number in pair]
    sizes = yield from channel.gather_numbers(flat, "exchange of the sizes of sparse gradients")

    gathered = []
    for place, index in enumerate(indices):
        dims = {row[2 * place + 1] for row in sizes} - {0}
        if len(dims) != 1:
            raise DesyncError(
                f"rank {channel.rank}: the gradient of {names[index]!r} has {sorted(dims)} sparse dimensions on "
                "different ranks; use the same layers on every rank"
            )
        gathered.append(
            _Gathered(parameters[index], parts.get(index), [row[2 * place] for row in sizes], dims.pop(), channel)
        )
    yield True  # all parameters are launched before one is waited for
    return {index: entries.average(scale, channel) for index, entries in zip(indices, gathered, strict=True)}


class _Gathered:
    """The entries of one parameter's gradient on all ranks, one rank after the other, while they are gathered."""

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
        """Wait for the entries, add them up in the order of ranks, and scale the sums."""
        for launched in self._launched:
            channel.meet(launched, "gathering of sparse gradients")
        keys, place = torch.unique(self._keys, return_inverse=True)
        # Half precision is added up in single precision: a sum of N may overflow although the mean does not.
        dtype = torch.promote_types(self._values.dtype, torch.float32)
        total = torch.zeros((len(keys), *self._values.shape[1:]), dtype=dtype, device=keys.device)
        start = 0
        for count in self._counts:
            # A rank's entries are coalesced, so no two of one call share a row, and only the order of ranks matters.
            end = start + count
            total.index_add_(0, place[start:end], self._values[start:end].to(dtype))
            start = end
        values = total.mul_(scale).to(self._values.dtype)
        indices = (
            torch.stack(torch.unravel_index(keys, self._sparse_shape))
            if len(keys)
            else keys.new_zeros((len(self._sparse_shape), 0))
        )
        # The operator itself: torch.sparse_coo_tensor of torch 2.11 warns, also if its check_invariants is given.
        made = torch.ops.aten.sparse_coo_tensor
        mean: Tensor = made.indices_size(indices, values, self._shape, is_coalesced=True)
        return mean


def _places(indices: Tensor, shape: torch.Size) -> Tensor:
    """Return the places in a flat tensor of `shape` for `indices`, which have shape (dimensions, entries)."""
    steps = torch.tensor([prod(shape[dim + 1 :]) for dim in range(len(shape))], device=indices.device)
    return (indices * steps[:, None]).sum(0)
