"""The folder in which a rank's multiprocessing, and its DataLoader's workers, have their sockets: in the job's folder.

By default each process makes one in the folder for temporary files, ``pymp-…``, and removes it at its end; workers of
a rank that was killed are also killed, and leave theirs. The launcher removes this one in any case. Standard library
only, because ranks load this file by path (``hook/sitecustomize.py``).
"""

from __future__ import annotations

import multiprocessing.process
import os
from collections.abc import Mapping

FOLDER = "PACELINE_BLACK_BOX"  # as in paceline.core.telemetry.flight_record
LONGEST = 80
"""Characters: the path of a socket in the folder has 107 at most."""


def install(environment: Mapping[str, str] = os.environ) -> None:
    """Make this process and its children use the job's folder."""
    path = os.path.join(environment.get(FOLDER, ""), "tmp")
    if not environment.get(FOLDER) or len(os.fsencode(path)) > LONGEST:
        return
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError:  # the default folder is used
        return
    config: dict[str, object] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    config["tempdir"] = path  # the cache of multiprocessing.util.get_temp_dir
