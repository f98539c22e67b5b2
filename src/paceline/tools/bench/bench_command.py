"""The command ``paceline bench``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paceline.core.output.commands import Commands
from paceline.tools.bench.bench_config import OPS, SIZES, BenchConfig, parse_ops, parse_sizes
from paceline.tools.shared.program import start_program

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
