"""Collectives from first principles: each one a schedule of messages, over send and receive of any process group."""

from paceline.comm.algorithms.schedule import Schedule, Step, Transfer, bounds, elements, holdings
from paceline.comm.algorithms.schedules import NAMES, build

__all__ = ["NAMES", "Schedule", "Step", "Transfer", "bounds", "build", "elements", "holdings"]
