"""The captured output of a rank: pytest's own capturing, into files that the rank does not share with the others.

A fork shares the test process's files, with one offset for all ranks. So a rank puts files of its own in their place,
and ``capsys``, ``capfd`` and the report find this rank's output there.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from typing import Any

import pytest


def separate(config: pytest.Config) -> None:
    """Give this rank files of its own wherever pytest captures into files."""
    manager: Any = config.pluginmanager.getplugin("capturemanager")
    for capturing in _capturings(manager):
        for capture in (capturing.out, capturing.err):
            file = getattr(capture, "tmpfile", None)
            descriptor = getattr(capture, "targetfd", None)
            if file is None or descriptor is None:  # nothing is captured, or in memory, which a fork does not share
                continue
            with tempfile.TemporaryFile(buffering=0) as own:
                os.dup2(own.fileno(), file.fileno())
            # Suspended, as by capsys.disabled(), the descriptor leads to the terminal, and stays so.
            if capture._state == "started":
                os.dup2(file.fileno(), descriptor)


def read(config: pytest.Config) -> list[tuple[str, str]]:
    """Return the output of this rank since the last call: ``stdout`` or ``stderr``, and the text."""
    manager: Any = config.pluginmanager.getplugin("capturemanager")
    texts = {"stdout": "", "stderr": ""}
    for stream in (sys.stdout, sys.stderr):
        with suppress(ValueError, OSError):
            stream.flush()
    for capturing in _capturings(manager):
        # A test may have closed a file, and pytest asserts that its own objects are in use.
        with suppress(ValueError, OSError, AssertionError):
            out, err = capturing.readouterr()
            texts["stdout"] += out if isinstance(out, str) else out.decode(errors="replace")
            texts["stderr"] += err if isinstance(err, str) else err.decode(errors="replace")
    return [(name, text) for name, text in texts.items() if text]


def _capturings(manager: Any) -> list[Any]:
    """Return pytest's objects that capture now: that of the session, and that of a fixture."""
    fixture = getattr(manager, "_capture_fixture", None)
    found = [getattr(manager, "_global_capturing", None), getattr(fixture, "_capture", None)]
    return [capturing for capturing in found if capturing is not None]
