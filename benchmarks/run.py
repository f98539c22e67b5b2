"""Runs every benchmark with two ranks, one after the other. See the scripts' docstrings for details."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = ("collectives.py", "step_time.py")


def main() -> int:
    here = Path(__file__).parent
    if sys.argv[1:]:
        print(
            "run one script to give it options: paceline run --nproc 2 benchmarks/step_time.py --help", file=sys.stderr
        )
        return 2
    for script in SCRIPTS:
        print(f"== {script}", flush=True)
        command = [sys.executable, "-m", "paceline", "run", "--nproc", "2", str(here / script)]
        if code := subprocess.call(command):
            return code
    return subprocess.call([sys.executable, str(here / "startup.py")])


if __name__ == "__main__":
    sys.exit(main())
