"""Parses cells: which part runs on which ranks, and the arguments of the magics. Pure functions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from paceline.errors import UsageError

LINE_MAGICS = ("dist_init", "dist_shutdown", "dist_status", "sync", "pull")
IN_KERNEL = ("load_ext paceline", "reload_ext paceline", "unload_ext paceline", "pip", "conda", "uv")
"""Other line magics that run in the kernel, because they must run once, and not once on every rank."""
ALL = "all"
"""The argument of ``%%rank`` that stands for every rank."""

_OURS = re.compile(rf"%({'|'.join(LINE_MAGICS)})\b(.*)")
_KERNELS = re.compile(rf"%({'|'.join(IN_KERNEL)})\b")
_MAGIC = re.compile(r"%%?(?P<name>[a-z]\w*)")
_PULL = re.compile(r"(?P<names>.+?)(?:\s+from\s+(?P<rank>\S+))?\s*")


@dataclass(frozen=True)
class Start:
    """The arguments of ``%dist_init``."""

    nproc: int
    backend: str | None = None
    gpu_ids: tuple[int, ...] | None = None
    """GPU of each rank, in CUDA's numbers; None to take them in order."""
    port: int = 0
    """Port of the store that torch's own functions use; 0 for a free one."""
    timeout: str | None = None
    """Seconds that a collective waits for a rank."""
    force: bool = False
    """Whether ranks are started even if memory is short."""


def routed(lines: Sequence[str], has_ranks: bool) -> list[str]:
    """Return the lines that the kernel runs for a cell: calls that run its parts on the ranks.

    A cell of magics for the kernel, or one that begins with ``%%local`` or ``%%rank``, runs in the kernel.

    Args:
        lines: lines of the cell, each with its end.
        has_ranks: whether ranks are running.
    """
    text = [line for line in lines if line.strip()]
    if not text or text[0].startswith("%%rank"):
        return list(lines)
    if text[0].strip() == "%%local":
        return list(lines)[lines.index(text[0]) + 1 :]
    if all(_is_command(line) for line in text) and not has_ranks and not any(map(_OURS.match, text)):
        return list(lines)
    calls: list[str] = []
    part: list[str] = []
    for line in [*lines, "%sync"]:  # an extra magic ends the last part; its own call is dropped below
        ours = _OURS.match(line)
        if not ours and not _KERNELS.match(line):
            part.append(line)
            continue
        if any(_is_code(each) for each in part):
            calls.append(_call("run_cell_magic", "rank", ALL, "".join(part)))
        part = []
        name, _, argument = line.strip()[1:].partition(" ")
        calls.append(_call("run_line_magic", ours[1] if ours else name, ours[2].strip() if ours else argument.strip()))
    return calls[:-1]


def validate_magics(lines: Sequence[str], is_known: Callable[[str], bool]) -> None:
    """Refuse a magic that does not exist if its name is close to one of this package.

    Args:
        lines: lines of the cell.
        is_known: returns whether a magic of that name exists.
    """
    names = dict.fromkeys(LINE_MAGICS, "%") | {"rank": "%%", "local": "%%"}
    for line in lines:
        if (match := _MAGIC.match(line)) and match["name"] not in names and not is_known(match["name"]):
            for near in get_close_matches(match["name"], names, 1, 0.75):
                raise UsageError(f"there is no magic {match[0]}; did you mean {names[near]}{near}?")


def _is_command(line: str) -> bool:
    return line.startswith(("%", "!", "#")) and not line.startswith("%%")


def _is_code(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _call(function: str, *arguments: str) -> str:
    return f"get_ipython().{function}({', '.join(map(repr, arguments))})\n"


def ranks_in(text: str, size: int) -> list[int]:
    """Return the ranks that an argument such as ``[0,2]`` names, in their order."""
    if text.strip() == ALL:
        return list(range(size))
    inner = text.strip().removeprefix("[").removesuffix("]")
    words = [word for word in re.split(r"[,\s]+", inner) if word]
    if not words or not all(word.isdecimal() for word in words):
        raise UsageError(f"%%rank {text.strip()} names no ranks; write such as %%rank [0] or %%rank [0,2]")
    ranks = sorted({int(word) for word in words})
    if unknown := [rank for rank in ranks if rank >= size]:
        raise UsageError(f"%%rank {text.strip()}: there is no rank {unknown[0]}, only {_counted(size)}")
    return ranks


def pulled(text: str, size: int) -> tuple[list[str], int | None]:
    """Return the names and the rank in ``%pull loss, step from 1``; None for all ranks."""
    match = _PULL.fullmatch(text.strip())
    names = [name.strip() for name in match["names"].split(",")] if match else []
    if match is None or not all(name.isidentifier() for name in names):
        raise UsageError(f"%pull {text.strip()}: this takes names of variables; write such as %pull loss from 1")
    if match["rank"] is None:
        return names, None
    word = match["rank"].removeprefix("[").removesuffix("]")
    if not word.isdecimal() or int(word) >= size:
        raise UsageError(f"%pull {text.strip()}: there is no rank {match['rank']}, only {_counted(size)}")
    return names, int(word)


def _counted(size: int) -> str:
    return f"ranks 0 to {size - 1}" if size > 1 else "rank 0"


def parsed_start(text: str) -> Start:
    """Return the arguments of ``%dist_init``."""
    options: dict[str, Callable[[str], object]] = {
        "nproc": _number("nproc", 1, 4096),
        "backend": str,
        "gpu_ids": _gpu_ids,
        "port": _number("port", 1, 65535),
        "timeout": str,
    }
    aliases = {"-n": "nproc", "--num-processes": "nproc", "--num_processes": "nproc"}
    values: dict[str, object] = {}
    try:
        words = [part for word in shlex.split(text) for part in (word.split("=", 1) if word[:2] == "--" else [word])]
    except ValueError as error:
        raise UsageError(f"%dist_init {text}: {error}") from None
    while words:
        word = words.pop(0)
        if word == "--force":
            values["force"] = True
            continue
        name = aliases.get(word, word[2:].replace("-", "_") if word.startswith("--") else "")
        if name not in options:
            known = [f"--{option.replace('_', '-')}" for option in (*options, "force")]
            near = get_close_matches(word, known, 1)
            remedy = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
            raise UsageError(f"%dist_init does not know {word!r}; {remedy}")
        if not words:
            raise UsageError(f"%dist_init {word} needs a value")
        values[name] = options[name](words.pop(0))
    if "nproc" not in values:
        gpu_ids = values.get("gpu_ids")
        if not isinstance(gpu_ids, tuple):
            raise UsageError("%dist_init needs the number of ranks; write such as %dist_init --nproc 2")
        values["nproc"] = len(gpu_ids)
    start = Start(**values)  # type: ignore[arg-type]  # the functions in `options` return the fields' types
    if start.gpu_ids is not None and len(start.gpu_ids) != start.nproc:
        raise UsageError(
            f"--gpu-ids names {len(start.gpu_ids)} GPUs for {start.nproc} ranks; name one for each rank, each once"
        )
    return start


def _number(name: str, least: int, most: int) -> Callable[[str], int]:
    def number(word: str) -> int:
        # Not left to int(), which takes -1, 1_0 and spaces, too.
        if not word.isdecimal() or not least <= int(word) <= most:
            raise UsageError(f"--{name} {word} is not a number from {least} to {most:,}")
        return int(word)

    return number


def _gpu_ids(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words) or len({int(word) for word in words}) < len(words):
        raise UsageError(f"--gpu-ids {text} is no list of different GPUs such as 0,1")
    return tuple(int(word) for word in words)
