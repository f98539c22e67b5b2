"""Entry point of a program's ranks: its command starts each as ``paceline.tools MODULE CONFIG``."""

from __future__ import annotations

import importlib
import sys

if __name__ == "__main__":
    name, config = sys.argv[1:]
    # Imported by name, because each program needs different packages, and some take seconds to import.
    importlib.import_module(f"paceline.tools.{name}").main(config)
