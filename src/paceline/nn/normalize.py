"""Autograd function of batch normalization with the moments of the whole global batch, and its double backward.

μ and σ² are the moments over n values per channel on all ranks, x̂ = (x - μ)/σ, and dy the gradient of y = w·x̂ + b:

    dx = w/σ · (dy - Σdy/n - x̂·Σ(dy·x̂)/n)        sums over all ranks: one all-reduce of 2C elements
    dw = Σ dy·x̂,  db = Σ dy                       sums over this rank; the wrapper averages them like other gradients
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

# The moments of a batch distributed over ranks, combined from each rank's count, mean and squared deviations.
#
# After Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (Stanford
# STAN-CS-79-773, 1979): deviations are taken from a mean, never as E[x²] - E[x]², which cancels if the mean is large.
# Everything here is a function of plain tensors.


HEAD = 4
"""Number of header elements before the C means and C sums: the count (two elements), dimensions and channels."""
PART = 2**20  # counts are sent as quotient and remainder, because float32 is exact only up to 2**24


@dataclass(frozen=True)
class Report:
    """What one rank reports to the others about the shape of its input."""

    count: int
    """Number of values per channel."""
    dims: int
    """Number of dimensions of the input; 0 for a rank without input."""
    channels: int


@dataclass(frozen=True)
class Moments:
    """Moments of the whole batch: number of values per channel, and their mean and biased variance, of shape (C,)."""

    count: int
    mean: Tensor
    variance: Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics for inputs of `dtype`."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def pack(x: Tensor, features: int) -> Tensor:
    """Return a rank's message of HEAD + 2C elements; only the head is filled if the number of channels is wrong."""
    dtype = wide(x.dtype)
    channels = x.size(1) if x.dim() > 1 else 0
    count = x.numel() // features
    head = [count // PART, count % PART, x.dim(), channels]
    message = empty_message(features, dtype, x.device)
    for place, number in enumerate(head):
        if number:
            message[place].fill_(number)  # a copy from the host would wait for the device
    if channels == features and count:
        mean, variance = _own_moments(x, features, dtype)
        message[HEAD : HEAD + features] = mean
        message[HEAD + features :] = variance * count
    return message


def empty_message(features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the message of a rank that has no input."""
    return torch.zeros(HEAD + 2 * features, dtype=dtype, device=device)


def reports(rows: Tensor) -> list[Report]:
    """Return every rank's report from messages of shape (ranks, HEAD + 2C). Only this function waits for a GPU."""
    heads = rows[:, :HEAD].tolist()
    return [Report(int(high) * PART + int(low), int(dims), int(channels)) for high, low, dims, channels in heads]


def combine(rows: Tensor, total: int) -> Moments:
    """Return the moments of all ranks' `total` values, or zeros if there are none; bit-identical on every rank."""
    means, squares = rows[:, HEAD:].chunk(2, dim=1)
    weights = rows[:, 0:1] * PART + rows[:, 1:2]
    mean = (means * (weights / max(total, 1))).sum(0)
    between = (means - mean).square() * weights
    return Moments(total, mean, (squares + between).sum(0) / max(total, 1))


def _own_moments(x: Tensor, features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of one rank's values, computed by BatchNorm's own kernel."""
    # The kernel returns results in the dtype of the running statistics, so these select the wide dtype.
    first, second = (torch.zeros(features, dtype=dtype, device=x.device) for _ in range(2))
    mean, variance = torch.batch_norm_update_stats(x, first, second, 0.0)
    return mean, variance


class Communicator(Protocol):
    """The part of the layer's interface that the autograd functions use."""

    eps: float

    def gather_moments(self, x: Tensor) -> Moments:
        """Return the moments over all ranks."""

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""


class Normalize(Function):
    """``apply(x, weight, bias, layer)``: x of shape (N, C, …); weight and bias of shape (C,) or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: Communicator) -> Tensor:
        """Gather the moments of all ranks and normalize. Collective."""
        moments = layer.gather_moments(x)
        ctx.layer, ctx.count = layer, moments.count
        ctx.save_for_backward(x, weight, moments.mean, moments.variance)
        dtype = wide(x.dtype)
        scale, shift = (None if parameter is None else parameter.to(dtype) for parameter in (weight, bias))
        return torch.native_batch_norm(x, scale, shift, moments.mean, moments.variance, False, 0.0, layer.eps)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Compute the gradients. Collective, unless the input needs no gradient."""
        x, weight, mean, variance = ctx.saved_tensors
        gradients: tuple[Tensor | None, Tensor, Tensor]
        if torch.is_grad_enabled():  # create_graph=True
            gradients = _differentiable(x, weight, dy, ctx.count, ctx.layer)
        else:
            gradients = _gradients(x, weight, dy, mean, variance, ctx.count, ctx.layer, ctx.needs_input_grad[0])
        dx, dw, db = (
            gradient if needed else None for gradient, needed in zip(gradients, ctx.needs_input_grad, strict=False)
        )
        return dx, _like(weight, dw), _like(weight, db), None


def _like(weight: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None or weight is None else gradient.to(weight.dtype)


def _gradients(
    x: Tensor,
    weight: Tensor | None,
    dy: Tensor,
    mean: Tensor,
    variance: Tensor,
    count: int,
    layer: Communicator,
    input_needs: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    if x.numel():
        # The needed sums are the weight and bias gradients of a normalization with given statistics. The CUDA kernel
        # requires tensors for all arguments: `mean` stands in for the weight, which does not affect the sums. Empty
        # tensors stand in for the values saved by forward, which saves none with given statistics.
        saved = mean.new_empty(0)
        _, dw, db = torch.ops.aten.native_batch_norm_backward(
            dy, x, mean, mean, variance, saved, saved, False, layer.eps, [False, True, True]
        )
    else:
        dw, db = torch.zeros_like(mean), torch.zeros_like(mean)
    if not input_needs:
        return None, dw, db
    sums = layer.sum_over_ranks(torch.cat([db, dw])) / max(count, 1)
    inverse = (variance + layer.eps).rsqrt()
    scale = inverse if weight is None else inverse * weight
    shape = _over_channels(x)
    sum_dy, sum_dy_x = sums.chunk(2)
    # Computed from x - μ, because x would lose precision if the mean is large compared with the deviation.
    dx = x - mean.view(shape)
    torch.addcmul((-scale * sum_dy).view(shape), dx, (-scale * inverse * sum_dy_x).view(shape), out=dx)
    return dx.addcmul_(dy, scale.view(shape)).to(x.dtype), dw, db


def _differentiable(
    x: Tensor, weight: Tensor | None, dy: Tensor, count: int, layer: Communicator
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same gradients with differentiable operations; this takes three all-reduces instead of one."""
    shape, dtype = _over_channels(x), wide(x.dtype)
    values, dy_wide = x.to(dtype), dy.to(dtype)
    dims = [0, *range(2, x.dim())]
    n = max(count, 1)
    mean = _sum(values.sum(dims), layer) / n
    centered = values - mean.view(shape)
    inverse = (_sum(centered.square().sum(dims), layer) / n + layer.eps).rsqrt()
    unit = centered * inverse.view(shape)
    dw, db = (dy_wide * unit).sum(dims), dy_wide.sum(dims)
    sum_dy, sum_dy_x = (_sum(torch.cat([db, dw]), layer) / n).chunk(2)
    scale = inverse if weight is None else inverse * weight
    dx = scale.view(shape) * (dy_wide - sum_dy.view(shape) - unit * sum_dy_x.view(shape))
    return dx.to(x.dtype), dw, db


def _over_channels(x: Tensor) -> list[int]:
    return [1, -1] + [1] * (x.dim() - 2)


class _SumOverRanks(Function):
    """A sum over ranks. It is its own adjoint: the gradient of an input is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, layer: Communicator) -> Tensor:
        ctx.layer = layer
        # Cloned, because the sum is computed in place and the input belongs to the graph.
        return layer.sum_over_ranks(tensor.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _sum(gradient, ctx.layer), None


def _sum(tensor: Tensor, layer: Communicator) -> Tensor:
    summed: Tensor = _SumOverRanks.apply(tensor, layer)  # type: ignore[no-untyped-call]
    return summed
