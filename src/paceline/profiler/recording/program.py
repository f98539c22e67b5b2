"""Runs a program in this process, as Python itself would."""

from __future__ import annotations

import os
import runpy
import sys


class Enough(SystemExit):
    """Raised to end the program after the last requested step."""


def run_program(program: list[str]) -> None:
    """Run a script, or a module after ``-m``, with its arguments."""
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = program
    script = os.path.abspath(program[0])
    # Like Python, resolve links: modules are next to the link's target.
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    runpy.run_path(script, run_name="__main__")
