"""Collectives built from the send and receive of any process group; each one runs a schedule of messages.

schedule.py     the schedule, and the chunks that each rank holds after each step
linear.py  tree.py  scatter.py  ring.py  halving.py  hierarchical.py     the algorithms: pure functions with their laws
schedules.py    all schedules by name
participants.py the ranks of a group: messages between them, and the comparison of their arguments
execute.py      runs a schedule on a tensor
functions.py    the public functions

To add an algorithm, write its schedule, name it in ``schedules.py``, and give it a function in ``functions.py``. For
``paceline bench``, name it in ``tools/bench/backends.py``. For ``paceline explain``, name it in
``tools/explain/explain_command.py``, and say what to watch in ``HINTS`` of ``tools/explain/subjects/schedules.py``.
"""

from paceline.comm.algorithms.functions import (
    halving_doubling_all_reduce,
    hierarchical_all_reduce,
    linear_broadcast,
    linear_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    scatter_all_gather_broadcast,
    tree_all_reduce,
    tree_broadcast,
    tree_reduce,
)
from paceline.comm.algorithms.schedule import Schedule, Step, Transfer, bounds, elements, holdings
from paceline.comm.algorithms.schedules import NAMES, build

__all__ = [
    "NAMES",
    "Schedule",
    "Step",
    "Transfer",
    "bounds",
    "build",
    "elements",
    "halving_doubling_all_reduce",
    "hierarchical_all_reduce",
    "holdings",
    "linear_broadcast",
    "linear_reduce",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "scatter_all_gather_broadcast",
    "tree_all_reduce",
    "tree_broadcast",
    "tree_reduce",
]
