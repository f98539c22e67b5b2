"""The wrapper, its reducer, and functions for plain training loops."""

from typing import TYPE_CHECKING

from paceline.core import on_first_use as _on_first_use
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
# Most programs need only the wrapper.
__getattr__ = _on_first_use(__name__, _HOMES)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
