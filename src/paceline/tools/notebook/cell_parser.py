"""Pure functions that parse cells and the arguments of magics."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from paceline.errors import UsageError

LINE_MAGICS = ("dist_init", "dist_shutdown", "dist_status", "sync", "pull")
"""The line magics in ``magics.py``."""
IN_KERNEL = ("load_ext paceline", "reload_ext paceline", "unload_ext paceline", "pip", "conda", "uv")
"""IPython magics that run in the kernel, because they must run only once."""
ALL = "all"
"""The argument of ``%%rank`` for all ranks."""

_MAGIC = re.compile(rf"%({'|'.join(LINE_MAGICS)})\b(.*)")
_KERNEL_MAGIC = re.compile(rf"%({'|'.join(IN_KERNEL)})\b")
_PULL = re.compile(r"(?P<names>.+?)(?:\s+from\s+(?P<rank>\S+))?\s*")


@dataclass(frozen=True)
class Start:
    """The arguments of ``%dist_init``."""

    nproc: int
    backend: str | None = None
    timeout: str | None = None
    """Timeout of collectives in seconds."""


def routed(lines: Sequence[str], has_ranks: bool) -> list[str]:
    """Return the lines that the kernel runs for a cell: calls that run its parts on the ranks.

    A cell that begins with ``%%local`` or ``%%rank``, or has only magics for the kernel, runs in the kernel.
    """
    text = [line for line in lines if line.strip()]
    if not text or text[0].startswith("%%rank"):
        return [line.replace("%%rank[", "%%rank [", 1) if line is text[0] else line for line in lines]
    if text[0].strip() == "%%local":
        return list(lines)[lines.index(text[0]) + 1 :]
    if text[0].strip() == "%%distributed":  # nbdistributed's magic for a cell on all ranks
        lines, text = list(lines)[lines.index(text[0]) + 1 :], text[1:]
    if all(_is_command(line) for line in text) and not has_ranks and not any(map(_MAGIC.match, text)):
        return list(lines)
    calls: list[str] = []
    part: list[str] = []
    for line in [*lines, "%sync"]:  # the extra magic marks the end of the last part; its call is dropped below
        magic = _MAGIC.match(line)
        if not magic and not _KERNEL_MAGIC.match(line):
            part.append(line)
            continue
        if any(map(_is_code, part)):
            calls.append(_call("run_cell_magic", "rank", ALL, "".join(part)))
        part = []
        name, argument = magic.groups() if magic else line.strip()[1:].partition(" ")[::2]
        calls.append(_call("run_line_magic", name, argument.strip()))
    return calls[:-1]


def _is_command(line: str) -> bool:
    return line.startswith(("%", "!", "#")) and not line.startswith("%%")


def _is_code(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _call(function: str, *arguments: str) -> str:
    return f"get_ipython().{function}({', '.join(map(repr, arguments))})\n"


def ranks_in(text: str, size: int) -> list[int]:
    """Return the ranks that an argument such as ``[0,2]`` names, in ascending order."""
    if text.strip() == ALL:
        return list(range(size))
    inner = text.strip().removeprefix("[").removesuffix("]")
    words = [word for word in re.split(r"[,\s]+", inner) if word]
    if not words or not all(word.isdecimal() for word in words):
        raise UsageError(f"%%rank {text.strip()} names no ranks; write for example %%rank [0] or %%rank [0,2]")
    ranks = sorted({int(word) for word in words})
    if unknown := [rank for rank in ranks if rank >= size]:
        raise UsageError(f"%%rank {text.strip()}: rank {unknown[0]} does not exist; choose from {_range(size)}")
    return ranks


def pulled(text: str, size: int) -> tuple[list[str], int | None]:
    """Return the names and the rank in ``%pull loss, step from 1``; the rank is None for all ranks."""
    match = _PULL.fullmatch(text.strip())
    names = [name.strip() for name in match["names"].split(",")] if match else []
    if match is None or not all(name.isidentifier() for name in names):
        raise UsageError(f"%pull {text.strip()} names no variables; write for example %pull loss from 1")
    if match["rank"] is None:
        return names, None
    word = match["rank"].removeprefix("[").removesuffix("]")
    if not word.isdecimal() or int(word) >= size:
        raise UsageError(f"%pull {text.strip()}: rank {match['rank']} does not exist; choose from {_range(size)}")
    return names, int(word)


def _range(size: int) -> str:
    return f"ranks 0 to {size - 1}" if size > 1 else "rank 0"


class _StartParser(ArgumentParser):
    """Parser of ``%dist_init`` whose errors are :class:`UsageError`."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("--nproc", "-n", "--num-processes", "--num_processes", type=_number)
        self.add_argument("--backend")
        self.add_argument("--timeout", "-t")

    def error(self, message: str) -> NoReturn:
        raise UsageError(
            f"%dist_init: {message}; it takes --nproc, --backend and --timeout; to choose GPUs, run "
            "%env CUDA_VISIBLE_DEVICES=2,3 in an earlier cell"
        )


def parsed_start(text: str) -> Start:
    """Return the arguments of ``%dist_init``."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"%dist_init {text}: {error}") from None
    options = _StartParser().parse_args(words)
    if options.nproc is None:
        raise UsageError("%dist_init needs the number of ranks; write for example %dist_init --nproc 2")
    return Start(**vars(options))


def _number(word: str) -> int:
    # int() alone would accept -1, 1_0 and spaces.
    if not word.isdecimal() or not 1 <= int(word) <= 4096:
        raise ArgumentTypeError(f"{word!r} is not a number from 1 to 4,096")
    return int(word)
