"""A rank of a comparison: ``python -m paceline.compare RUN``, as ``paceline compare`` starts it."""

from __future__ import annotations

import sys
from functools import partial

from paceline.compare.measured_run import main
from paceline.launch.failure_report import rank_main

if __name__ == "__main__":
    rank_main(partial(main, sys.argv[1]))
