"""The moments of a batch distributed over ranks, combined from each rank's count, mean and squared deviations.

After Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (Stanford
STAN-CS-79-773, 1979): deviations are taken from a mean, never as E[x²] - E[x]², which cancels if the mean is large.
Everything here is a function of plain tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
