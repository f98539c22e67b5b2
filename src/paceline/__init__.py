"""Data-parallel training for PyTorch that is exact, fast, visible and hard to break.

Importing it only registers the process group backend ``"paceline"`` with torch.distributed. Each public name is
imported when it is first used.
"""

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from paceline import errors
from paceline.errors import PacelineError, UsageError

if TYPE_CHECKING:
    from paceline import checkpoint, compression, data, ddp, nn, optim, profiler, train
    from paceline.checkpoint import Checkpointer, load_weights
    from paceline.core.rank_lookup import cache_mesh, get
    from paceline.core.rng import set_seed
    from paceline.core.unwrapping import unwrap
    from paceline.core.world import World, init
    from paceline.ddp import DistributedDataParallel, accumulate, gather_for_metrics, mean_over_ranks
    from paceline.nn import SyncBatchNorm
    from paceline.nn.data_parallel import DataParallel

__version__ = "0.1.0"

__all__ = [
    "Checkpointer",
    "DataParallel",
    "DistributedDataParallel",
    "PacelineError",
    "SyncBatchNorm",
    "UsageError",
    "World",
    "accumulate",
    "cache_mesh",
    "checkpoint",
    "compression",
    "data",
    "ddp",
    "errors",
    "gather_for_metrics",
    "get",
    "init",
    "load_ipython_extension",
    "load_weights",
    "mean_over_ranks",
    "nn",
    "optim",
    "profiler",
    "set_seed",
    "train",
    "unload_ipython_extension",
    "unwrap",
]

_HOMES = {
    "Checkpointer": "checkpoint",
    "load_weights": "checkpoint",
    "DataParallel": "nn.data_parallel",
    "DistributedDataParallel": "ddp",
    "accumulate": "ddp",
    "gather_for_metrics": "ddp",
    "mean_over_ranks": "ddp",
    "cache_mesh": "core.rank_lookup",
    "get": "core.rank_lookup",
    "SyncBatchNorm": "nn",
    "set_seed": "core.rng",
    "unwrap": "core.unwrapping",
    "World": "core.world",
    "init": "core.world",
}
"""The module of each public name that is imported on first use. All other public names are modules themselves."""

if "paceline_command" not in _sys.modules:  # the command imports torch only when it needs it
    _import_module("paceline.comm.own_backend").register()

if not TYPE_CHECKING:  # so that type checkers report unknown names

    def __getattr__(name: str) -> Any:
        """Import the object or module called `name`."""
        if name.startswith("_"):
            raise AttributeError(f"module 'paceline' has no attribute {name!r}")
        home = f"paceline.{_HOMES.get(name, name)}"
        try:
            module = _import_module(home)
        except ModuleNotFoundError as error:
            if error.name != home:
                raise
            raise AttributeError(f"module 'paceline' has no attribute {name!r}") from None
        globals()[name] = getattr(module, name) if name in _HOMES else module
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: object) -> None:
    """Register the magics of docs/notebooks.md: ``%load_ext paceline``."""
    _import_module("paceline.tools.notebook.magics").load(shell)  # which needs IPython


def unload_ipython_extension(shell: object) -> None:
    """End the notebook's ranks: ``%unload_ext paceline``."""
    _import_module("paceline.tools.notebook.magics").unload(shell)
