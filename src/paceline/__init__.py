"""Data-parallel training for PyTorch that is exact, fast, visible and hard to break.

The public names are loaded when they are first used, so that ``paceline --help`` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.checkpoint import Checkpointer
    from paceline.ddp import DistributedDataParallel, accumulate, clip_grad_norm_, gather_for_metrics
    from paceline.errors import PacelineError, UsageError
    from paceline.modules import unwrap
    from paceline.rng import set_seed
    from paceline.world import World, init

__all__ = [
    "Checkpointer",
    "DistributedDataParallel",
    "PacelineError",
    "UsageError",
    "World",
    "accumulate",
    "clip_grad_norm_",
    "gather_for_metrics",
    "init",
    "set_seed",
    "unwrap",
]

_HOME = {
    "Checkpointer": "checkpoint",
    "DistributedDataParallel": "ddp",
    "PacelineError": "errors",
    "UsageError": "errors",
    "World": "world",
    "accumulate": "ddp",
    "clip_grad_norm_": "ddp",
    "gather_for_metrics": "ddp",
    "init": "world",
    "set_seed": "rng",
    "unwrap": "modules",
}
_MODULES = ("checkpoint", "data", "ddp", "errors", "train")


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"paceline.{_HOME[name]}"), name)
    if name in _MODULES:
        return import_module(f"paceline.{name}")
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
