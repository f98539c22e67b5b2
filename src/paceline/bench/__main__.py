"""A rank of a benchmark: ``python -m paceline.bench CONFIG``, as ``paceline bench collectives`` starts it."""

from __future__ import annotations

import sys
from functools import partial

from paceline.bench.measure import main
from paceline.launch.failure_report import rank_main

if __name__ == "__main__":
    rank_main(partial(main, sys.argv[1]))
