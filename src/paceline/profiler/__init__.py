"""The profiler: the parts of a step on every rank, waiting between ranks, and advice.

    paceline profile --nproc 2 train.py         # an unchanged script
    with paceline.profiler.profile("profile"):  # a part of one; every rank runs it

:func:`find_stragglers` finds slow ranks in times from any source.
"""

from paceline.profiler.profiling import profile as profile
from paceline.profiler.stragglers import Straggler as Straggler
from paceline.profiler.stragglers import find_stragglers as find_stragglers
