"""A rank of a recipe: ``python -m paceline.tools.recipes NAME CONFIG``, as ``paceline train`` starts it."""

from __future__ import annotations

import importlib
import sys
from functools import partial

from paceline.launch.rank.failure_report import rank_main

if __name__ == "__main__":
    recipe, config = sys.argv[1:]
    module = importlib.import_module(f"paceline.tools.recipes.{recipe}")
    rank_main(partial(module.main, config))
