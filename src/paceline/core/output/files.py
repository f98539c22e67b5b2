"""Output files of a command: checked before the work starts, and written at the end."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import UsageError


def check_file(option: str, file: str | None) -> None:
    """Raise an error early if `file` cannot be written."""
    if file is None:
        return
    path = Path(file).absolute()
    if not path.parent.is_dir():
        raise UsageError(f"{option} {file}: the folder {path.parent} does not exist; make it, or choose another file")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "it is a folder" if path.is_dir() else "permission denied"
        raise UsageError(f"{option} {file} cannot be written: {reason}; choose another file")


def write_file(option: str, file: str | None, content: str | bytes) -> None:
    """Write `content` to `file`, unless `file` is None."""
    if file is None:
        return
    try:
        # A path in the text may not be UTF-8.
        Path(file).write_bytes(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
    except OSError as error:
        raise UsageError(f"{option} {file} cannot be written: {error.strerror}; choose another file") from error
