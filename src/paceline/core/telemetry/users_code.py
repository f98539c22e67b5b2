"""Tells the user's code from that of libraries: what is shown of a stack is the user's own."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

_LIBRARIES = (sys.base_prefix + "/lib", str(Path(__file__).parents[2]), "<")
"""Beginnings of files of Python and of this package, and of code without a file."""
_INSTALLED = re.compile(r"/(site|dist)-packages/")


@functools.cache
def is_users(path: str | None) -> bool:
    """Return whether a file is the user's own: no part of Python, of an installed package, or of this one."""
    return path is not None and not path.startswith(_LIBRARIES) and _INSTALLED.search(path) is None
