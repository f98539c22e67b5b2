"""Data-parallel training for PyTorch that is exact, fast, visible and hard to break."""

from paceline.errors import PacelineError, UsageError
from paceline.world import World, init

__all__ = ["PacelineError", "UsageError", "World", "init"]
