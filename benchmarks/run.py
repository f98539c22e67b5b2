"""Measures step time and startup with two ranks. See the scripts' docstrings for details."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> int:
    here = Path(__file__).parent
    if sys.argv[1:]:
        print(
            "run one script to give it options: paceline run --nproc 2 benchmarks/step_time.py --help", file=sys.stderr
        )
        return 2
    step_time = [sys.executable, "-m", "paceline", "run", "--nproc", "2", str(here / "step_time.py")]
    return subprocess.call(step_time) or subprocess.call([sys.executable, str(here / "startup.py")])


if __name__ == "__main__":
    sys.exit(main())
