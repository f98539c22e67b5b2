"""Layers with collectives of their own, such as SyncBatchNorm, and whether a rank without data can shadow them."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from paceline.core.state.unwrapping import Communicates
from paceline.errors import UsageError


def layers_to_shadow(module: nn.Module, group: dist.ProcessGroup) -> list[Communicates]:
    """Return the layers in `module` whose collectives are announced to ranks of the wrapper's `group` without data."""
    own = set(dist.get_process_group_ranks(group))
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, Communicates)}
    for name, layer in layers.items():
        if strangers := sorted(set(layer.ranks()) - own):
            raise UsageError(
                f"{type(layer).__name__} {name!r} computes together with ranks {strangers}, which do not average with "
                f"ranks {sorted(own)} and so would not be told when data runs out inside join(); give it a "
                "process_group of ranks of the wrapper's group"
            )
    return list(layers.values())


def check_shadowable(module: nn.Module) -> None:
    """Refuse layers whose collectives no one can take part in without data."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and layer.training and not isinstance(layer, Communicates):
            raise UsageError(
                f"a rank ran out of data inside join(), and cannot take part in torch's SyncBatchNorm {name!r}; "
                "use paceline.SyncBatchNorm.convert_sync_batchnorm(model)"
            )
