"""A rank of a comparison: ``python -m paceline.tools.compare RUN``, as ``paceline compare`` starts it."""

from __future__ import annotations

import sys
from functools import partial

from paceline.launch.rank.failure_report import rank_main
from paceline.tools.compare.measured_run import main

if __name__ == "__main__":
    rank_main(partial(main, sys.argv[1]))
