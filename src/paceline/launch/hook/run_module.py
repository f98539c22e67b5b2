"""Runs a module as ``python -m`` does, but never imports from the working folder, whose files may shadow modules.

Run by path, because ``python -P`` needs Python 3.11. Imported, it gives the command.
"""

import sys


def module_command(*arguments: str) -> "list[str]":
    """Return the command that runs a module, such as ``paceline.tools``, with its arguments."""
    return [sys.executable, "-u", __file__, *arguments]


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this file's folder
    from runpy import run_module

    del sys.argv[0]
    run_module(sys.argv[0], run_name="__main__", alter_sys=True)
