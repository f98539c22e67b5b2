"""A rank of a benchmark: ``python -m paceline.tools.bench CONFIG``, as ``paceline bench collectives`` starts it."""

from __future__ import annotations

import sys
from functools import partial

from paceline.launch.rank.failure_report import rank_main
from paceline.tools.bench.measure import main

if __name__ == "__main__":
    rank_main(partial(main, sys.argv[1]))
