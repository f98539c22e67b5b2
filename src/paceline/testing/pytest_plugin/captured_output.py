"""Captures a rank's output with pytest's own capturing, but into the rank's own files.

Forks share the test process's files, with one offset for all ranks. A rank replaces them, so that ``capsys``, ``capfd``
and the report contain only the output of this rank.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from typing import Any

import pytest


def separate(config: pytest.Config) -> None:
    """Make pytest capture output into the rank's own files."""
    manager: Any = config.pluginmanager.getplugin("capturemanager")
    for capturing in _capturings(manager):
        for capture in (capturing.out, capturing.err):
            file = getattr(capture, "tmpfile", None)
            descriptor = getattr(capture, "targetfd", None)
            if file is None or descriptor is None:  # not captured, or captured in memory
                continue
            with tempfile.TemporaryFile(buffering=0) as capture_file:
                os.dup2(capture_file.fileno(), file.fileno())
            # While capturing is suspended, for example by capsys.disabled(), the descriptor is the terminal's.
            if capture._state == "started":
                os.dup2(file.fileno(), descriptor)


def read(config: pytest.Config) -> list[tuple[str, str]]:
    """Return this rank's output since the last call, as pairs of ``stdout`` or ``stderr`` and the text."""
    manager: Any = config.pluginmanager.getplugin("capturemanager")
    texts = {"stdout": "", "stderr": ""}
    for stream in (sys.stdout, sys.stderr):
        with suppress(ValueError, OSError):
            stream.flush()
    for capturing in _capturings(manager):
        # A test may have closed a file; pytest asserts that this does not happen.
        with suppress(ValueError, OSError, AssertionError):
            out, err = capturing.readouterr()
            texts["stdout"] += out if isinstance(out, str) else out.decode(errors="replace")
            texts["stderr"] += err if isinstance(err, str) else err.decode(errors="replace")
    return [(name, text) for name, text in texts.items() if text]


def _capturings(manager: Any) -> list[Any]:
    """Return pytest's active capturing objects: the session's, and that of a fixture, if any."""
    fixture = getattr(manager, "_capture_fixture", None)
    capturings = [getattr(manager, "_global_capturing", None), getattr(fixture, "_capture", None)]
    return [capturing for capturing in capturings if capturing is not None]
