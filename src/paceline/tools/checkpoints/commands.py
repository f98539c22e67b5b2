"""The commands and options of ``paceline checkpoint``; :mod:`.actions` does the work.

Importing this needs no torch, so that ``--help`` needs none: each command imports its work when it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.core.output.commands import Commands

EXAMPLES = """Examples:

paceline checkpoint list runs/7

paceline checkpoint verify runs/7 --step 120

paceline checkpoint verify runs/7 copies/7

paceline checkpoint export runs/7 --out model.safetensors
"""


checkpoint = typer.Typer(cls=Commands, help="List, verify and show checkpoints, and export weights.")
Folder = Annotated[str, typer.Argument(metavar="FOLDER", help="A run's folder, or that of one checkpoint.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@checkpoint.callback(epilog=EXAMPLES)
def _group() -> None:
    """List, verify and show checkpoints, and export weights. No pickle is loaded, and no checkpoint is changed."""


@checkpoint.command("list")
def list_checkpoints(
    folder: Folder,
    quick: Annotated[bool, typer.Option("--quick", help="Compare sizes alone, instead of reading every byte.")] = False,
    json: Json = False,
) -> None:
    """List the checkpoints: step, size, age, whether it is complete, and metadata.

    The newest complete one, which a run resumes from, is marked as latest; best is by what the run gave as keep_best.
    """
    from paceline.tools.checkpoints import actions

    actions.list_checkpoints(folder, quick, json)


@checkpoint.command("verify")
def verify_checkpoints(
    folders: Annotated[
        list[str],
        typer.Argument(metavar="FOLDER…", help="Folders of runs, or of checkpoints; several are copies of one run."),
    ],
    step: Annotated[int | None, typer.Option(help="Verify this one; all by default.")] = None,
    json: Json = False,
) -> None:
    """Read every byte and compare checksums, which cover every tensor. The exit code is 1 if anything is damaged.

    Every damaged file is named, with the object whose tensors it holds. Checkpoints of one step in several folders are
    copies: of one run, or of runs that should be equal. They are compared tensor by tensor, and the exit code is 1 if
    any differs.
    """
    from paceline.tools.checkpoints import actions

    actions.verify_checkpoints(folders, step, json)


@checkpoint.command("show")
def show_checkpoint(
    folder: Folder,
    step: Annotated[int | None, typer.Option(help="Show this one; the newest complete one by default.")] = None,
    json: Json = False,
) -> None:
    """Show the contents of a checkpoint: objects by name, tensors with shape, dtype and bytes, versions, metadata.

    Tensors are not read, so that this is quick: verify finds out whether they are intact.
    """
    from paceline.tools.checkpoints import actions

    actions.show_checkpoint(folder, step, json)


@checkpoint.command("export")
def export_object(
    folder: Folder,
    out: Annotated[str, typer.Option(metavar="FILE", help="A new file, which appears whole or not at all.")],
    step: Annotated[int | None, typer.Option(help="Export from this one; the newest complete one by default.")] = None,
    name: Annotated[str, typer.Option(help="Under which the module was registered.")] = "model",
) -> None:
    """Write a module's state_dict into a file that needs no Paceline: for safetensors, or for torch.load.

    A file that ends in .pt, .pth, .bin or .ckpt is for torch.load. The checkpoint is verified first. Tied weights are
    stored under each of their names.
    """
    from paceline.tools.checkpoints import actions

    actions.export_object(folder, out, step, name)
