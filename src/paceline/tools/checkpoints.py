"""The subcommands of ``paceline checkpoint``: list, verify and export.

Modules that need torch are imported inside functions, so that ``--help`` does not load it. So are tables, because every
``paceline`` command imports this module.
"""

from __future__ import annotations

import json as json_text
import math
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.core.command_line import Commands
from paceline.core.messages import counted, nbytes
from paceline.errors import CheckpointError, NoCheckpoint, UsageError

if TYPE_CHECKING:
    from paceline.tools.checkpoint_files import Inspected

EXAMPLES = """Examples:

paceline checkpoint list runs/7

paceline checkpoint verify runs/7/step-00000120

paceline checkpoint export runs/7 --out model.safetensors
"""


checkpoint = typer.Typer(cls=Commands, help="List and verify checkpoints, and export weights.")
Folder = Annotated[str, typer.Argument(metavar="FOLDER", help="The folder of a run or of one checkpoint.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@checkpoint.callback(epilog=EXAMPLES)
def _group() -> None:
    """List and verify checkpoints, and export weights. No pickle is loaded, and no checkpoint is changed."""


@checkpoint.command("list")
def list_checkpoints(
    folder: Folder,
    quick: Annotated[bool, typer.Option("--quick", help="Compare only sizes instead of reading every byte.")] = False,
    json: Json = False,
) -> None:
    """List the checkpoints with step, size, age, state and metadata.

    A run resumes from the newest complete checkpoint, which is marked latest. The best one according to the run's
    keep_best is marked best.
    """
    from rich.table import Table
    from rich.text import Text

    from paceline.core.tables import print_table
    from paceline.tools import checkpoint_files

    place, _ = checkpoint_files.locate(folder)
    checkpoints = list(checkpoint_files.inspect(folder, every_byte=not quick))
    complete = [entry for entry in checkpoints if not entry.damages]
    latest = complete[-1].step if complete else None
    best = checkpoint_files.best_of(complete)
    if json:
        rows = [_summary(entry) for entry in checkpoints]
        print_json({"folder": str(place), "latest": latest, "best": best, "checkpoints": rows})
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("step", "size", "age", "state", "", "metadata"):
        table.add_column(heading, justify="right" if heading in ("step", "size", "age") else "left")
    for entry in checkpoints:
        roles = {"latest": entry.step == latest, "best": entry.step == best, "protected": entry.notes.protected}
        marks = ", ".join(role for role, holds in roles.items() if holds)
        metadata = ", ".join(f"{key}={_short(value)}" for key, value in entry.notes.metadata.items())
        age = _age(time.time() - entry.saved_at) if entry.saved_at else ""
        row = (str(entry.step), nbytes(entry.nbytes), age, entry.state, marks, metadata)
        table.add_row(*(Text(printable(cell)) for cell in row))
    print_table(table)
    for entry in checkpoints:
        for damage in entry.damages:
            warn(f"step {entry.step} is damaged: {damage}")


@checkpoint.command("verify")
def verify_checkpoints(folder: Folder, json: Json = False) -> None:
    """Read every byte and compare checksums, which cover every tensor. The exit code is 1 if anything is damaged.

    Each damaged file is listed with the object whose tensors it holds.
    """
    from paceline.tools import checkpoint_files

    entries = []
    for entry in checkpoint_files.inspect(folder, every_byte=True):
        entries.append(entry)
        if not json:
            _echo_verdict(entry)
    damaged = [entry.step for entry in entries if entry.damages]
    if json:
        print_json({"damaged": damaged, "checkpoints": [_summary(entry) for entry in entries]})
    if damaged:
        raise typer.Exit(1)


@checkpoint.command("export")
def export_object(
    folder: Folder,
    out: Annotated[str, typer.Option(metavar="FILE", help="New file, written completely or not at all.")],
    name: Annotated[str, typer.Option(help="Name under which the module was registered.")] = "model",
) -> None:
    """Write a module's state_dict into a file for safetensors or torch.load.

    For a run, exports its newest complete checkpoint. A name that ends in .pt, .pth, .bin or .ckpt selects torch.load,
    any other name safetensors. The checkpoint is verified first. Tied weights are stored under each of their names.
    """
    from paceline.tools import checkpoint_files

    target = checkpoint_files.check_target(out)
    checkpoint_files.locate(folder)  # refuses a folder without checkpoints
    with warnings.catch_warnings(record=True) as skipped:
        warnings.simplefilter("always")
        try:
            step, count, size = checkpoint_files.export(Path(folder), name, target)
        # Must come first, because NoCheckpoint is also a CheckpointError.
        except UsageError:
            raise
        except CheckpointError as error:
            raise NoCheckpoint(str(error)) from error
        finally:
            for warning in skipped:
                warn(str(warning.message))
    typer.echo(f"{out}: {name!r} of step {step}, {_tensors(count)}, {nbytes(size)}")


def _echo_verdict(entry: Inspected) -> None:
    if entry.manifest is not None and not entry.damages:
        files = len(entry.manifest.files) + 1  # including the manifest
        count = _tensors(sum(len(file.tensors) for file in entry.manifest.files))
        typer.echo(printable(f"step {entry.step}: complete ({count} in {files} files, {nbytes(entry.nbytes)})"))
    for damage in entry.damages:
        typer.echo(printable(f"step {entry.step}: damaged: {damage}"))


def _summary(entry: Inspected) -> dict[str, Any]:
    """Return the overview of a checkpoint for JSON, without its contents."""
    return {
        "step": entry.step,
        "path": str(entry.path),
        "state": entry.state,
        "damages": entry.damages,
        "nbytes": entry.nbytes,
        "saved_at": entry.saved_at or None,
        "protected": entry.notes.protected,
        "metadata": entry.notes.metadata,
    }


def _tensors(count: int) -> str:
    return counted(count, "tensor") if count else "plain values"


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        # At least two of a unit, because rounding fewer loses too much precision.
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def printable(text: str) -> str:
    """Return `text` with control characters escaped."""
    # Names and metadata come from untrusted files, and a terminal would execute escape sequences in them.
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def print_json(value: dict[str, Any]) -> None:
    """Print `value` as JSON on stdout."""
    typer.echo(json_text.dumps({"version": 1} | _plain(value), indent=1))


def _plain(value: Any) -> Any:
    """Return `value` with strings in place of values that JSON does not support."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)


def warn(text: str) -> None:
    """Print a warning on stderr."""
    print(f"warning: {printable(text)}", file=sys.stderr)
