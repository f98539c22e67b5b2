"""The profiler: how each rank spends its steps, how long ranks wait for each other, and advice.

    paceline profile --nproc 2 train.py         # an unchanged script
    with paceline.profiler.profile("profile"):  # part of a script; every rank runs it

:func:`find_stragglers` finds slow ranks in compute times from any source.
"""

from paceline.profiler.profiling import profile as profile
from paceline.profiler.stragglers import Straggler as Straggler
from paceline.profiler.stragglers import find_stragglers as find_stragglers
