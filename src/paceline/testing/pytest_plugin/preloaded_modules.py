"""Modules that ranks need, loaded once in the test process: otherwise every rank of every test would load them.

torch loads its compiler, in more than a second, when the first optimizer or wrapper is made. It is loaded here before
the first test of a file that looks as if it made one, and after a test whose ranks have loaded it. The same goes for
every other module of torch and Paceline that ranks have loaded.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from paceline.core.torch_internals.distributed.elastic import OPTIMIZERS_NEED
from paceline.testing.ranks.outcomes import Ending

TRAINING = re.compile(r"optim|compile|[Pp]arallel|checkpoint|[Tt]rain")
"""Words of tests that are likely to make an optimizer or a wrapper. A wrong guess costs time, nothing else."""
PACKAGES = ("torch", "paceline")


class LoadedModules:
    """Modules that are still to be loaded in the test process."""

    def __init__(self) -> None:
        self._wanted: dict[str, None] = {}
        """Names of modules, in the order in which ranks loaded them."""

    def preload_for(self, path: Path) -> None:
        """Load the modules that a file's tests are likely to need, and those that ranks of earlier tests loaded."""
        if trains(path):
            self._wanted.setdefault(OPTIMIZERS_NEED)
        wanted, self._wanted = self._wanted, {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own; as an error, a warning would leave half of a module behind
            for name in wanted:
                if name not in sys.modules:
                    with suppress(Exception):  # a module that the test has made, or that needs a rank's preparation
                        importlib.import_module(name)

    def note(self, endings: Iterable[Ending]) -> None:
        """Note the modules that the ranks of a test have loaded."""
        for ending in endings:
            if ending.outcome is not None:
                self._wanted.update(dict.fromkeys(ending.outcome.modules))


def loaded_since(count: int) -> list[str]:
    """Return the modules of torch and Paceline that were loaded since ``len(sys.modules)`` was `count`."""
    latest = list(islice(reversed(sys.modules), len(sys.modules) - count))
    return [name for name in reversed(latest) if name.partition(".")[0] in PACKAGES]


@functools.cache
def trains(path: Path) -> bool:
    """Return whether the tests in a file are likely to make an optimizer or a wrapper."""
    try:
        return TRAINING.search(path.read_text(errors="replace")) is not None
    except OSError:
        return True
