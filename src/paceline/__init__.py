"""Data-parallel training for PyTorch that is exact, fast, visible and hard to break.

Importing it makes the process group backend ``"paceline"`` known to torch.distributed; nothing else happens.
"""

from importlib import import_module as _import_module

from paceline.supported import warn_if_untested as _warn_if_untested

_warn_if_untested()  # before imports that may need what another torch does not have

# isort: split
from paceline import checkpoint, compression, data, ddp, errors, nn, optim, profiler, train
from paceline.checkpoint import Checkpointer, load_weights
from paceline.comm.c10d.process_group import register as _register
from paceline.data_parallel import DataParallel
from paceline.ddp import DistributedDataParallel, accumulate, clip_grad_norm_, gather_for_metrics, mean_over_ranks
from paceline.errors import PacelineError, UsageError
from paceline.lookup import cache_mesh, get
from paceline.nn import SyncBatchNorm
from paceline.rng import set_seed
from paceline.unwrapping import unwrap
from paceline.world import World, init

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
    "clip_grad_norm_",
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

_register()


def load_ipython_extension(shell: object) -> None:
    """Make the magics of docs/notebooks.md known: ``%load_ext paceline``."""
    _import_module("paceline.notebook.extension").load(shell)  # which needs IPython


def unload_ipython_extension(shell: object) -> None:
    """End the ranks of the notebook: ``%unload_ext paceline``."""
    _import_module("paceline.notebook.extension").unload(shell)
