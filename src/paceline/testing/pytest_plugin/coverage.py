"""Measures coverage on the ranks, and adds it to the test process's coverage.

coverage.py's ``patch = fork, _exit`` is not enough: it saves when a process calls ``os._exit``, but the test process
kills ranks. The user would also have to configure it.
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
    """Measure the block on a rank with the test process's settings, and write the data to a file in `folder`."""
    inherited = _current()
    if inherited is None:
        yield
        return
    coverage: Any = sys.modules["coverage"]
    inherited.stop()
    options = {name: inherited.get_option(f"run:{name}") for name in ("branch", "source", "include", "omit")}
    options["config_file"] = getattr(inherited.config, "config_file", None) or False
    measurement = coverage.Coverage(data_file=str(folder / f"coverage-{rank}"), messages=False, **options)
    measurement.set_option("run:parallel", False)
    measurement.set_option("run:patch", [])
    # Disable warnings that pytest might turn into errors. A rank does not have to run any of the measured source.
    measurement._warn_no_data = measurement._warn_unimported_source = measurement._warn_preimported_source = False
    with _where_paths_begin():
        measurement.start()  # start() resolves relative paths
    try:
        yield
    finally:
        measurement.stop()
        measurement.save()


@contextmanager
def _where_paths_begin() -> Iterator[None]:
    """Change to the base folder of relative source paths, because the test may have changed to another folder."""
    from coverage.files import relative_directory

    cwd = os.open(".", os.O_RDONLY)  # a descriptor instead of a path, because the test may have deleted the folder
    try:
        os.chdir(relative_directory())
        yield
    finally:
        os.fchdir(cwd)
        os.close(cwd)


def harvest(folder: Path) -> None:
    """Merge the measurements that ranks wrote to `folder` into the test process's own."""
    current = _current()
    if current is None:
        return
    coverage: Any = sys.modules["coverage"]
    for file in sorted(folder.glob(PATTERN)):
        measured_there = coverage.CoverageData(basename=str(file))
        measured_there.read()
        current.get_data().update(measured_there)


def _current() -> Any:
    """Return the active coverage.py object; None if there is none."""
    coverage: Any = sys.modules.get("coverage")
    return coverage.Coverage.current() if coverage is not None and hasattr(coverage, "Coverage") else None
