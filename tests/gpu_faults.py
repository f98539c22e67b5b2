"""Checks that go wrong in every way in which a check may: what runs the GPU checks has to outlive them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

from gpu_checks.catalogue import Check, Ranks
from gpu_checks.rows import NotRun, Place, Row, holds


def fail(how: str, place: Place) -> Iterator[Row]:
    yield holds("a line before", "", True)
    if how == "crash":
        os.abort()
    if how == "hang":
        compiler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", __file__])
        print(f"started {compiler.pid}", flush=True)
        time.sleep(1000)
    if how == "unable":
        raise NotRun("triton is not installed")
    if how == "one rank":
        if place.rank == 1:
            raise ArithmeticError("on rank 1")
        time.sleep(1000)  # in a collective that rank 1 does not come to
    if how == "differs":
        yield holds("a line after", f"{place.rank}", place.rank == 0)


CHECKS = [
    Check("faults", how.replace(" ", "-"), partial(fail, how), "the remedy", joined=False)
    for how in ("crash", "hang", "unable")
] + [
    Check("faults", how.replace(" ", "-"), partial(fail, how), "the remedy", Ranks.SHARED, joined=False)
    for how in ("one rank", "differs")
]
