"""A rank of one of these programs: ``python -m paceline.tools MODULE CONFIG``, as their commands start it."""

from __future__ import annotations

import importlib
import sys

if __name__ == "__main__":
    name, config = sys.argv[1:]
    # Imported by its name: each program needs other packages, and some of them take seconds.
    importlib.import_module(f"paceline.tools.{name}").main(config)
