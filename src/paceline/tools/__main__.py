"""A rank of one of these programs: ``python -m paceline.tools MODULE CONFIG``, as their commands start it."""

from __future__ import annotations

import importlib
import sys
from functools import partial

from paceline.launch.rank.failure_report import rank_main

if __name__ == "__main__":
    name, config = sys.argv[1:]
    # Imported by its name: each program needs other packages, and some of them take seconds.
    rank_main(partial(importlib.import_module(f"paceline.tools.{name}").main, config))
