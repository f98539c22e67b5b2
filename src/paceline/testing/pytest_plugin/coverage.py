"""Coverage of the ranks, added to that of the test process, if coverage.py measures it.

coverage.py's own ``patch = fork, _exit`` does not replace this: it saves when a process calls ``os._exit``, and the
test process kills ranks while they wait for the end of the others. It also needs the user's configuration.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATTERN = "coverage-*"


@contextmanager
def measured(folder: Path, rank: int) -> Iterator[None]:
    """Measure the block on a rank with the settings of the test process, into a file in `folder`."""
    inherited = _current()
    if inherited is None:
        yield
        return
    coverage: Any = sys.modules["coverage"]
    inherited.stop()
    options = {name: inherited.get_option(f"run:{name}") for name in ("branch", "source", "include", "omit")}
    options["config_file"] = getattr(inherited.config, "config_file", None) or False
    own = coverage.Coverage(data_file=str(folder / f"coverage-{rank}"), messages=False, **options)
    own.set_option("run:parallel", False)
    own.set_option("run:patch", [])
    # A rank need not run any of the source; that is no warning, which an option of pytest may make an error.
    own._warn_no_data = own._warn_unimported_source = own._warn_preimported_source = False
    with _where_paths_begin():
        own.start()  # it resolves relative paths of the sources
    try:
        yield
    finally:
        own.stop()
        own.save()


@contextmanager
def _where_paths_begin() -> Iterator[None]:
    """Change into the folder to which relative paths of the measured sources refer; the test may be in another."""
    from coverage.files import relative_directory

    here = os.open(".", os.O_RDONLY)  # not by its name, because the test may have deleted the folder
    try:
        os.chdir(relative_directory())
        yield
    finally:
        os.fchdir(here)
        os.close(here)


def harvest(folder: Path) -> None:
    """Add the ranks' measurements in `folder`, in the test process."""
    current = _current()
    if current is None:
        return
    coverage: Any = sys.modules["coverage"]
    for file in sorted(folder.glob(PATTERN)):
        measured_there = coverage.CoverageData(basename=str(file))
        measured_there.read()
        current.get_data().update(measured_there)


def _current() -> Any:
    """Return the coverage.py object that measures this process; None without one."""
    coverage: Any = sys.modules.get("coverage")
    return coverage.Coverage.current() if coverage is not None and hasattr(coverage, "Coverage") else None
