"""The profiler: where the time of a step goes on every rank, who waits for whom, and what to change.

    paceline profile --nproc 2 train.py         # an unchanged script
    with paceline.profiler.profile("profile"):  # a part of one; every rank runs it

:func:`find_stragglers` finds slow ranks in times of any origin.
"""

from paceline.profiler.profiling import profile as profile
from paceline.profiler.stragglers import Straggler as Straggler
from paceline.profiler.stragglers import find_stragglers as find_stragglers
