"""The command line: ``paceline run`` starts any script as ranks, ``paceline train`` a recipe of ours, …

A mistake of the user's is one line, ``error: …``, and exit code 2.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from paceline import __version__
from paceline.bench.bench_command import bench
from paceline.errors import UsageError
from paceline.explain.explain_command import EXAMPLES, explain

RECIPES = {"digits": ("paceline.recipes.digits", "DigitsConfig")}
INTERRUPTED = 130
TIMEOUT_HELP = "How long a collective waits for a rank; 600, which is 10 minutes, by default."


class Verbatim(TyperCommand):
    """A command that gets its arguments as they are, ``--help`` included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave everything to the command."""
        ctx.args = list(args)
        return []


class Recipes(TyperGroup):
    """The recipes. Their options' defaults are those of the recipe's configuration."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The recipe's command.

        Raises:
            UsageError: if there is no such recipe.
        """
        command = super().get_command(ctx, cmd_name)
        if command is None:
            raise UsageError(f"unknown recipe {cmd_name!r}; known recipes: {', '.join(self.commands)}")
        defaults = {field.name: field.default for field in dataclasses.fields(config_class(cmd_name))}
        for parameter in command.params:
            if parameter.name in defaults and parameter.default is None:
                parameter.default = defaults[parameter.name]
        return command


app = typer.Typer(
    name="paceline",
    help="Data-parallel training for PyTorch that is exact, fast, visible and hard to break.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
train = typer.Typer(cls=Recipes, help="Train one of the recipes that come with Paceline.")
app.add_typer(train, name="train")
app.add_typer(bench, name="bench")
app.command("explain", epilog=EXAMPLES)(explain)


def config_class(recipe: str) -> Any:
    """The frozen dataclass that configures `recipe`; imported only when it is needed."""
    module, name = RECIPES[recipe]
    return getattr(importlib.import_module(module), name)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def paceline(
    show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Data-parallel training for PyTorch that is exact, fast, visible and hard to break."""


@app.command("run", cls=Verbatim)
def run(context: typer.Context) -> None:
    """Start a script as N ranks: paceline run --nproc 2 script.py"""
    from paceline.launch.options import start

    raise typer.Exit(start(context.args))


@train.command("digits")
def digits(
    nproc: Annotated[str, typer.Option(metavar="N", help="Ranks: a number, gpu, cpu, or auto.")] = "auto",
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help=TIMEOUT_HELP)] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training data.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Global batch: samples per step, all ranks.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides initial weights and the order of samples.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Micro-batches per step and rank.")] = None,
    checkpoint_dir: Annotated[str | None, typer.Option(metavar="DIR", help="Where checkpoints go.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between two checkpoints.")] = None,
    resume: Annotated[bool | None, typer.Option("--resume", help="Go on from the newest checkpoint.")] = None,
    allow_changed_settings: Annotated[
        bool | None,
        typer.Option("--allow-changed-settings", help="Resume although settings differ: this run's are taken over."),
    ] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the results there as JSON.")] = None,
    backend: Annotated[str | None, typer.Option(help="Process group: paceline, gloo, nccl, …")] = None,
) -> None:
    """Train a small classifier of handwritten digits, in seconds, on CPU or GPU."""
    ours = ("nproc", "timeout")
    options = {name: value for name, value in locals().items() if name not in ("ours", *ours) and value is not None}
    raise typer.Exit(start_recipe("digits", nproc, options, timeout))


def start_recipe(recipe: str, nproc: str, options: dict[str, Any], timeout: float | None = None) -> int:
    """Check the configuration here, once, then run `recipe` on `nproc` ranks; the exit code.

    Raises:
        UsageError: for a mistake in `options`, before any rank is started.
    """
    from paceline.launch.job import Job, launch, resolve_nproc, say, timeout_environment

    count, note = resolve_nproc(nproc)
    environment = timeout_environment(None if timeout is None else f"{timeout:g}")
    config = config_class(recipe)(**options)
    config.check()
    if note:
        say(note)
    command = [sys.executable, "-u", "-m", "paceline.recipes", recipe, config.to_json()]
    try:
        code = launch(Job(command, count, env=environment))
    finally:
        # Rank 0's progress bar hides the cursor, and a rank that is killed cannot bring it back.
        Console(file=sys.stdout).show_cursor()
    folder = options.get("checkpoint_dir")
    if code == INTERRUPTED and folder:
        say(f"the checkpoints in {folder} are kept; to continue, give the same command with --resume")
    return code


@app.command("env")
def env() -> None:
    """Print versions, backends, cores and limits, for a report of a defect."""
    from paceline.environment import describe

    for name, value in describe().items():
        typer.echo(f"{name + ':':<15}{value}")


def untyped_flags(command: Any) -> Any:
    """`command`, with no type in the help of options that take no value, here and in its subcommands; returns it."""
    for parameter in command.get_params(typer.Context(command)):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for below in getattr(command, "commands", {}).values():
        untyped_flags(below)
    return command


def main() -> NoReturn:
    """Entry point of ``paceline`` and ``python -m paceline``."""
    arguments = sys.argv[1:]
    if not arguments or arguments in (["train"], ["bench"]):
        arguments.append("--help")
    try:
        command = untyped_flags(typer.main.get_command(app))
        code = command.main(args=arguments, prog_name="paceline", standalone_mode=False)
    except UsageError as error:
        code = _refuse(str(error))
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    except Exception as error:
        # click's own, such as for an unknown option; some versions of typer bring their own click
        if not hasattr(error, "format_message"):
            raise
        code = _refuse(error.format_message())
    sys.exit(code or 0)


def _refuse(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2
