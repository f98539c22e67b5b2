"""The check that every rank holds the same gradients, bit by bit, for training loops that average them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.core.processes.missing_ranks import named_ranks
from paceline.core.state.digests import quick_digest
from paceline.ddp.transport.channel import Channel
from paceline.errors import UsageError

_ABSENT = 0x6E6F6E65
"""A number in place of the digest of a gradient that is None."""


def check_equal_gradients(names: Sequence[str], parameters: Sequence[nn.Parameter], channel: Channel) -> None:
    """Compare digests of 64 bits of the gradients between the ranks of `channel`, in one small collective."""
    table = torch.zeros(channel.size, len(parameters), dtype=torch.int64)
    table[channel.rank] = torch.tensor([digest_of(parameter.grad) for parameter in parameters], dtype=torch.int64)
    channel.meet(channel.host.all_reduce(table), "comparison of gradients")
    if (difference := unequal(names, table.tolist())) is not None:
        raise UsageError(
            f"model.gradients_are_averaged() found gradients that differ between ranks: {difference}; average them "
            "over the ranks before, or call model.sync_gradients() instead, which does so"
        )


def unequal(names: Sequence[str], rows: Sequence[Sequence[int]]) -> str | None:
    """Describe the first gradient that differs from rank 0's, given every rank's digests; None if none does."""
    differing = [place for place in range(len(names)) if len({row[place] for row in rows}) > 1]
    if not differing:
        return None
    place = differing[0]
    odd = [rank for rank, row in enumerate(rows) if row[place] != rows[0][place]]
    others = f" (and of {len(differing) - 1} more parameters)" if len(differing) > 1 else ""
    return f"that of {names[place]!r}{others} is not the same on {named_ranks(odd)} as on rank 0"


def digest_of(gradient: Tensor | None) -> int:
    """Return a digest of a gradient, dense, sparse or absent."""
    if gradient is None:
        return _ABSENT
    if gradient.is_sparse:
        whole = gradient.detach().coalesce()
        return int(quick_digest(whole.indices()) ^ quick_digest(whole.values()))
    return int(quick_digest(gradient))
