"""Late deltas: gradients that arrive for a parameter whose bucket was launched already.

That happens where backward accumulates more than once into a parameter (reentrant checkpointing) or into one that was
not expected. The parameters concerned are the same on every rank, as the control block says so; one more reduction of
these alone makes the average whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.ddp.channel import Channel, Launched


@dataclass
class LateReduction:
    """One launched reduction: the deltas of `indices`, flat and one after the other."""

    indices: list[int]
    flat: Tensor
    launched: Launched


def launch_late(mine: Mapping[int, Tensor], targets: Mapping[int, Tensor], channel: Channel) -> list[LateReduction]:
    """Launch the sums of the deltas for `targets`, of which this rank holds `mine`; one for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, target in targets.items():
        kinds.setdefault((target.dtype, target.device), []).append(index)
    launched = []
    for same in kinds.values():
        parts = [mine[index] if index in mine else torch.zeros_like(targets[index]) for index in same]
        # Half precision is added up in single: a sum of N may overflow where the mean does not.
        dtype = torch.promote_types(targets[same[0]].dtype, torch.float32)
        flat = torch.cat([part.detach().reshape(-1).to(dtype) for part in parts])
        launched.append(LateReduction(same, flat, channel.all_reduce(flat)))
    return launched


def settle_late(
    launched: Sequence[LateReduction], targets: Mapping[int, Tensor], scale: float, channel: Channel
) -> None:
    """Wait for the sums and add them, scaled, to the averages in `targets`."""
    for reduction in launched:
        channel.wait(reduction.launched, "all-reduce of late gradients")
        offset = 0
        for index in reduction.indices:
            target = targets[index]
            target.add_(reduction.flat[offset : offset + target.numel()].view(target.shape), alpha=scale)
            offset += target.numel()
