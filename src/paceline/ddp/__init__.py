"""The wrapper, its reducer, and functions for plain training loops."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from paceline.ddp.wrapper import DistributedDataParallel

if TYPE_CHECKING:
    from paceline.ddp.metrics import gather_for_metrics, mean_over_ranks
    from paceline.ddp.training_loop import accumulate

__all__ = ["DistributedDataParallel", "accumulate", "gather_for_metrics", "mean_over_ranks"]
_HOMES = {
    "accumulate": "paceline.ddp.training_loop",
    "gather_for_metrics": "paceline.ddp.metrics",
    "mean_over_ranks": "paceline.ddp.metrics",
}


def __getattr__(name: str) -> Any:
    """Import a function on first use, because most programs need only the wrapper."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
