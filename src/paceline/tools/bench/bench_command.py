"""The command ``paceline bench``, whose options are validated before any rank starts."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from paceline.core.command_line import Commands
from paceline.core.output_files import check_chart, check_file
from paceline.errors import UsageError
from paceline.tools.program import ProgramConfig, start_program

OPS = ("all_reduce", "broadcast", "reduce")
SIZES = "1K,4K,16K,64K,256K,1M,4M,25M"
ELEMENT = 4
"""Bytes of a float32. Other dtypes are not measured."""
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
COPIES = 4
"""Maximum number of tensors that a rank holds at once: one per variant, and a buffer of the backend."""


@dataclass(frozen=True)
class BenchConfig(ProgramConfig):
    """Options of ``paceline bench collectives``."""

    sizes: list[int]
    """Bytes of the whole tensor."""
    ops: list[str]
    json: str | None
    plot: str | None

    def check(self, ranks: int) -> None:
        """Reject options that would fail on `ranks` ranks."""
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        needed = max(self.sizes) * ranks * COPIES
        if needed > available:
            raise UsageError(
                f"--sizes: {max(self.sizes)} bytes on {ranks} ranks need {needed} bytes of memory, but this host has "
                f"{available // 2**30} GiB; give smaller sizes"
            )
        check_file("--json", self.json)
        check_chart("--plot", self.plot)


def parse_sizes(text: str) -> list[int]:
    """Return sizes in bytes in ascending order: ``"4K,1M"`` is ``[4096, 1048576]``."""
    sizes = set()
    for part in text.split(","):
        matched = re.fullmatch(r"(\d+)\s*([KMG]?)(I?B)?", part.strip().upper())
        if matched is None:
            raise UsageError(f"--sizes: {part.strip()!r} is not a size; give bytes with K, M or G, such as 4K,1M,25M")
        size = int(matched[1]) * UNITS[matched[2]]
        if size < ELEMENT or size % ELEMENT:
            raise UsageError(f"--sizes: {part.strip()!r} is not a multiple of {ELEMENT} bytes, the size of a float32")
        sizes.add(size)
    return sorted(sizes)


def parse_ops(text: str) -> list[str]:
    """Return the comma-separated names in `text`, each once, in the order of :data:`OPS`."""
    names = [part.strip().replace("-", "_") for part in text.split(",")]
    for name in names:
        if name not in OPS:
            raise UsageError(f"--ops: {name!r} is unknown; choose among {', '.join(OPS)}")
    return [name for name in OPS if name in names]


EXAMPLES = """Examples:

paceline bench collectives --nproc 2

paceline bench collectives --nproc 4 --sizes 64K,1M --ops all_reduce,broadcast --plot speed.svg
"""
bench = typer.Typer(cls=Commands, help="Measure this machine.")


# Without a callback, typer would merge the group with its only command: `paceline bench --nproc 2`.
@bench.callback()
def _group() -> None:
    """Measure this machine."""


@bench.command("collectives", epilog=EXAMPLES)
def collectives(
    nproc: Annotated[str, typer.Option(metavar="N", help="Ranks: a number, cpu, or auto.")] = "auto",
    sizes: Annotated[str, typer.Option(metavar="LIST", help="Bytes of the whole tensor, with K, M or G.")] = SIZES,
    ops: Annotated[str, typer.Option(metavar="LIST", help=f"Any of {', '.join(OPS)}.")] = "all_reduce",
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the results as JSON.")] = None,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the results (.svg, .png or .pdf).")] = None,
) -> None:
    """Time collectives: Paceline's algorithms over Gloo's send and receive, Gloo, and the shared-memory group.

    Bandwidths are defined as in nccl-tests. Float32, in place, on the CPU.
    """
    # --help works without importing torch.
    from paceline.launch.job import resolve_nproc

    count, note = resolve_nproc(nproc)
    config = BenchConfig(parse_sizes(sizes), parse_ops(ops), json, plot)
    config.check(count)
    raise typer.Exit(start_program(["paceline.tools", "bench.measure"], config, count, sys.stderr, note))
