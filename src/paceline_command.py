"""The command ``paceline``. If this module is loaded first, ``import paceline`` does not import torch.

Help, completion and usage errors need no torch. Whatever runs or reads something imports it.
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
