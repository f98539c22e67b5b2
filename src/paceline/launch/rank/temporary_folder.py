"""Moves the sockets that multiprocessing uses in a rank, for example for DataLoader workers, into the job's folder.

By default each process has a temporary folder, ``pymp-…``, which is left behind if the process is killed. The job's
folder is always removed by the launcher. Standard library only, because ranks load this module by path
(``hook/sitecustomize.py``).
"""

from __future__ import annotations

import multiprocessing.process
import os
from collections.abc import Mapping

FOLDER = "PACELINE_BLACK_BOX"  # as in paceline.core.telemetry.black_box
LONGEST = 80
"""Maximum length of the folder's path in bytes, because the path of a socket in it may have at most 107."""


def install(environment: Mapping[str, str] = os.environ) -> None:
    """Make this process and its child processes use the job's folder."""
    path = os.path.join(environment.get(FOLDER, ""), "tmp")
    if not environment.get(FOLDER) or len(os.fsencode(path)) > LONGEST:
        return
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError:  # keep the default
        return
    config: dict[str, object] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    config["tempdir"] = path  # the cache of multiprocessing.util.get_temp_dir
