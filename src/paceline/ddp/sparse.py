"""Averages sparse gradients outside buckets, sending only rows that some rank has touched.

In a bucket, an embedding with millions of rows would take its full size. So parameters of layers with ``sparse=True``
are not assigned to buckets, and if a parameter in a bucket gets a sparse gradient, this gradient is left out. The
control block lists the parameters with sparse gradients, which all ranks then average in a second pass. The rows of
each rank, whose number may differ between ranks, are gathered and added in rank order, so the result is bit-identical
on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn

from paceline.ddp.channel import Channel, Pausing
from paceline.errors import DesyncError


def sparse_by_layer(module: nn.Module) -> set[int]:
    """Return the ``id`` of every parameter whose layer has sparse gradients, such as ``nn.Embedding(sparse=True)``."""
    layers = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse]
    return {id(layer.weight) for layer in layers}


def as_dense(gradient: Tensor) -> Tensor:
    """Return `gradient` as a dense tensor."""
    # In torch 2.13, to_dense() returns zeros for expanded values, such as sum()'s gradients; `* 1` copies them.
    return (gradient.detach() * 1).to_dense() if gradient.is_sparse else gradient


def average_sparse(
    indices: Sequence[int],
    local: Mapping[int, Tensor],
    parameters: Sequence[Tensor],
    names: Sequence[str],
    scale: float,
    channel: Channel,
) -> Pausing[dict[int, Tensor]]:
    """Average the sparse gradients of the parameters in `indices`. This rank contributes `local`, and zeros otherwise.

    Returns the coalesced averages, keyed by parameter index.
    """
    parts = {index: local[index].detach().coalesce() for index in indices if index in local}
    # For each parameter: number of entries on this rank, and number of sparse dimensions.
    pairs = [(parts[index]._nnz(), parts[index].sparse_dim()) if index in parts else (0, 0) for index in indices]
    flat = [number for pair in pairs for number in pair]
    sizes = yield from channel.gather_numbers(flat, "exchange of the sizes of sparse gradients")

    gathered = []
    for place, index in enumerate(indices):
        dims = {row[2 * place + 1] for row in sizes} - {0}
        if len(dims) != 1:
            raise DesyncError(
                f"rank {channel.rank}: the gradient of {names[index]!r} has different numbers of sparse "
                f"dimensions on different ranks, {sorted(dims)}; build the same model on every rank"
            )
        gathered.append(
            _Gathered(parameters[index], parts.get(index), [row[2 * place] for row in sizes], dims.pop(), channel)
        )
    yield True  # launch all parameters before waiting for any
    return {index: entries.average(scale, channel) for index, entries in zip(indices, gathered, strict=True)}


class _Gathered:
    """The entries of one parameter's gradient on all ranks, concatenated in rank order, while they are gathered."""

    def __init__(
        self, parameter: Tensor, local: Tensor | None, counts: list[int], sparse_dim: int, channel: Channel
    ) -> None:
        self._counts, self._shape = counts, parameter.shape
        self._sparse_shape = parameter.shape[:sparse_dim]
        total, row = sum(counts), parameter.shape[sparse_dim:]
        self._keys = torch.zeros(total, dtype=torch.int64, device=parameter.device)
        self._values = torch.zeros((total, *row), dtype=parameter.dtype, device=parameter.device)
        if local is not None:
            rows = slice(sum(counts[: channel.rank]), sum(counts[: channel.rank + 1]))
            self._keys[rows] = _places(local.indices(), self._sparse_shape)
            self._values[rows] = local.values()
        self._launched = [channel.all_reduce(part) for part in (self._keys, self._values) if part.numel()]

    def average(self, scale: float, channel: Channel) -> Tensor:
        """Wait for the entries, add them in rank order, and scale the sums."""
        for launched in self._launched:
            channel.meet(launched, "gathering of sparse gradients")
        keys, place = torch.unique(self._keys, return_inverse=True)
        # Add half-precision values in float32, because a sum of N may overflow although the mean does not.
        dtype = torch.promote_types(self._values.dtype, torch.float32)
        total = torch.zeros((len(keys), *self._values.shape[1:]), dtype=dtype, device=keys.device)
        start = 0
        for count in self._counts:
            # A rank's entries are coalesced, so the rows in one call are distinct, and only the rank order matters.
            end = start + count
            total.index_add_(0, place[start:end], self._values[start:end].to(dtype))
            start = end
        values = total.mul_(scale).to(self._values.dtype)
        indices = (
            torch.stack(torch.unravel_index(keys, self._sparse_shape))
            if len(keys)
            else keys.new_zeros((len(self._sparse_shape), 0))
        )
        # Call the operator directly, because torch.sparse_coo_tensor warns in torch 2.11 in any case.
        operator = torch.ops.aten.sparse_coo_tensor
        mean: Tensor = operator.indices_size(indices, values, self._shape, is_coalesced=True)
        return mean


def _places(indices: Tensor, shape: torch.Size) -> Tensor:
    """Return the positions in a flattened tensor of `shape` for `indices` of shape (dimensions, entries)."""
    steps = torch.tensor([prod(shape[dim + 1 :]) for dim in range(len(shape))], device=indices.device)
    return (indices * steps[:, None]).sum(0)
