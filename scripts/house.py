"""Refuses full folders, long files and functions, and docstrings that open with a riddle.

Run by ``make check``: python scripts/house.py. Decision 0048 says why.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "paceline"
ENTRIES, ENTRIES_AT_THE_TOP, LINES, FUNCTION_LINES = 12, 16, 320, 60
RIDDLES = ("What ", "Those ", "Of ")
"""First words of a docstring that cannot be read without its surroundings."""


def entries(folder: Path) -> list[Path]:
    """Return the files and folders that a reader sees in a folder of the package."""
    hidden = ("__init__.py", "__pycache__", "py.typed")
    return [path for path in folder.iterdir() if path.name not in hidden and not is_left_over(path)]


def is_left_over(path: Path) -> bool:
    """Return whether `path` is a folder with nothing but compiled files: git leaves it when its files have moved."""
    return path.is_dir() and not any(file.is_file() and file.suffix != ".pyc" for file in path.rglob("*"))


def full_folders() -> Iterator[str]:
    """Name folders with too many entries."""
    for folder in (SOURCE, *(path for path in SOURCE.rglob("*") if path.is_dir() and path.name != "__pycache__")):
        found, limit = len(entries(folder)), ENTRIES_AT_THE_TOP if folder == SOURCE else ENTRIES
        if found > limit:
            yield (
                f"{folder}: {found} entries, at most {limit}: gather those that are used together in a folder of "
                "their own, or merge a small file into its only user"
            )


def faults_of(path: Path) -> Iterator[str]:
    """Name a file's parts that are too long, and its docstrings that open with a riddle."""
    text = path.read_text("utf-8")
    if (lines := text.count("\n")) > LINES:
        yield f"{path}: {lines} lines, at most {LINES}: find its second noun, and give that a file"
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.FunctionDef(name=name, lineno=first, end_lineno=int(last)) if last - first >= FUNCTION_LINES:
                yield f"{path}:{first}: {name}() has {last - first + 1} lines, at most {FUNCTION_LINES}: find its parts"
            case ast.Expr(value=ast.Constant(value=str(said)), lineno=first) if said.startswith(RIDDLES):
                yield f"{path}:{first}: a docstring opens with {said.split()[0]!r}: name the thing itself"


def main() -> int:
    """Print every fault; returns 1 if there is one."""
    faults = [*full_folders(), *(fault for path in sorted(SOURCE.rglob("*.py")) for fault in faults_of(path))]
    for fault in faults:
        print(fault, file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
