"""Coverage of the ranks, added to the coverage of the test process.

coverage.py's ``patch = fork, _exit`` saves when a process calls ``os._exit``, but the test process kills ranks. It also
needs a configuration by the user.
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
    """Measure the block on a rank with the test process's settings, and write a file in `folder`."""
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
    # A rank need not run any of the source. An option of pytest may turn the warnings into errors.
    own._warn_no_data = own._warn_unimported_source = own._warn_preimported_source = False
    with _where_paths_begin():
        own.start()  # which resolves relative paths
    try:
        yield
    finally:
        own.stop()
        own.save()


@contextmanager
def _where_paths_begin() -> Iterator[None]:
    """Change into the folder that relative paths of the sources refer to, because the test may be in another one."""
    from coverage.files import relative_directory

    here = os.open(".", os.O_RDONLY)  # a descriptor, because the test may have deleted the folder
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
    """Return the active coverage.py object; None without one."""
    coverage: Any = sys.modules.get("coverage")
    return coverage.Coverage.current() if coverage is not None and hasattr(coverage, "Coverage") else None
