"""The command ``paceline``, beside the package: ``import paceline`` brings no torch where this module is loaded first.

Help, completion and refusals need none; what runs or reads something imports it.
"""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Entry point of ``paceline``."""
    try:
        from paceline.tools.main import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()
