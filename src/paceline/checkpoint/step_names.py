"""Names of checkpoint folders: ``step-00000120``. The launcher imports this module, so it has no other imports."""

from __future__ import annotations

import os
import re
from pathlib import Path

_STEP = re.compile(r"step-(\d{8,18})")


def step_name(step: int) -> str:
    """Return the name of the folder of a checkpoint."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of the folder `name`, or None if it is not a checkpoint."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def step_at(path: Path) -> int | None:
    """Return the step of the checkpoint folder `path`, which may be a link, or be named by one ("latest")."""
    step = step_of(path.absolute().name)
    return step_of(path.resolve().name) if step is None else step


def newest_step(folder: Path | None) -> int | None:
    """Return the newest step in a checkpoint `folder`, or None."""
    try:
        names = os.listdir(folder) if folder is not None else []
    except OSError:
        return None
    return max((step for step in map(step_of, names) if step is not None), default=None)
