"""The command-line interface of ``paceline checkpoint``; :mod:`.actions` implements the subcommands.

The functions import :mod:`.actions`, so that ``--help`` does not load torch.
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
Folder = Annotated[str, typer.Argument(metavar="FOLDER", help="The folder of a run or of one checkpoint.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@checkpoint.callback(epilog=EXAMPLES)
def _group() -> None:
    """List, verify and show checkpoints, and export weights. No pickle is loaded, and no checkpoint is changed."""


@checkpoint.command("list")
def list_checkpoints(
    folder: Folder,
    quick: Annotated[bool, typer.Option("--quick", help="Compare only sizes instead of reading every byte.")] = False,
    json: Json = False,
) -> None:
    """List the checkpoints: step, size, age, whether it is complete, and metadata.

    The newest complete checkpoint, from which a run resumes, is marked latest; keep_best of the run decides which is
    best.
    """
    from paceline.tools.checkpoints import actions

    actions.list_checkpoints(folder, quick, json)


@checkpoint.command("verify")
def verify_checkpoints(
    folders: Annotated[
        list[str],
        typer.Argument(
            metavar="FOLDER…", help="Folders of runs or of checkpoints; several folders are copies of one run."
        ),
    ],
    step: Annotated[int | None, typer.Option(help="Step to verify; all by default.")] = None,
    json: Json = False,
) -> None:
    """Read every byte and compare checksums, which cover every tensor. The exit code is 1 if anything is damaged.

    Each damaged file is listed with the object whose tensors it holds. If several folders have a checkpoint of the
    same step, these are compared tensor by tensor, and the exit code is 1 if any tensor differs.
    """
    from paceline.tools.checkpoints import actions

    actions.verify_checkpoints(folders, step, json)


@checkpoint.command("show")
def show_checkpoint(
    folder: Folder,
    step: Annotated[int | None, typer.Option(help="Step to show; by default the newest complete one.")] = None,
    json: Json = False,
) -> None:
    """Show the contents of a checkpoint: objects by name, tensors with shape, dtype and bytes, versions, metadata.

    This is quick, because tensors are not read; use verify to check them.
    """
    from paceline.tools.checkpoints import actions

    actions.show_checkpoint(folder, step, json)


@checkpoint.command("export")
def export_object(
    folder: Folder,
    out: Annotated[str, typer.Option(metavar="FILE", help="New file to write, whole or not at all.")],
    step: Annotated[int | None, typer.Option(help="Step to export from; by default the newest complete one.")] = None,
    name: Annotated[str, typer.Option(help="Name under which the module was registered.")] = "model",
) -> None:
    """Write a module's state_dict into a file for safetensors or torch.load.

    A file that ends in .pt, .pth, .bin or .ckpt is for torch.load. The checkpoint is verified first. Tied weights are
    stored under each of their names.
    """
    from paceline.tools.checkpoints import actions

    actions.export_object(folder, out, step, name)
