"""The versions of torch that this Paceline was tested with; pyproject.toml requires the same versions."""

from __future__ import annotations

import os
import re
import sys
import warnings

from paceline.errors import UntestedTorchWarning

OLDEST, NEWEST = (2, 11), (2, 15)
RANGE = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
INSTALL = f"pip install 'torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"


def untested(version: str) -> str | None:
    """Describe why torch `version`, such as ``2.16.0a0+git1f2``, is untested; None if its series was tested."""
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    if numbers is None:
        return f"not a version that Paceline knows; it was tested with {RANGE}"
    series = int(numbers[1]), int(numbers[2])
    if OLDEST <= series <= NEWEST:
        return None
    return f"{'older' if series < OLDEST else 'newer'} than the versions that Paceline was tested with, {RANGE}"


def is_command_line() -> bool:
    """Return whether this is the process of the command ``paceline``, which imports torch only when it needs it."""
    return "paceline_command" in sys.modules


def warn_if_untested() -> None:
    """Warn if the installed torch is untested. Only one process of a job warns: our launcher, or without it rank 0."""
    import torch  # imported here, because the command's help does not need torch

    version = str(torch.__version__)
    matter = untested(version)
    if matter and "PACELINE_LAUNCHER" not in os.environ and os.environ.get("RANK", "0") == "0":
        message = f"torch {version} is {matter}; if something goes wrong, try {INSTALL}"
        warnings.warn(message, UntestedTorchWarning, stacklevel=3)
