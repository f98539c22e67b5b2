"""The command line: ``paceline run`` starts any script as ranks, ``paceline train`` a recipe of ours, …

A user's mistake is one line, ``error: …``, and exit code 2.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from typing import Annotated, Any, NamedTuple, NoReturn, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from paceline import __version__
from paceline.bench.bench_command import bench
from paceline.compare.modes import MODES
from paceline.errors import UsageError
from paceline.explain.explain_command import EXAMPLES, explain
from paceline.launch.program import start_program

INTERRUPTED = 130
TIMEOUT_HELP = "How long a collective waits for a rank; 600, which is 10 minutes, by default."


class Verbatim(TyperCommand):
    """A command that gets its arguments as they are, ``--help`` included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave everything to the command."""
        ctx.args = list(args)
        return []


class Recipe(NamedTuple):
    """A recipe that ``paceline train`` knows. Its module is imported only when its command is needed."""

    module: str
    config: str
    """Name of the frozen dataclass in `module` whose fields are the recipe's options."""
    summary: str
    """One sentence for ``--help``."""


RECIPES = {
    "digits": Recipe(
        "paceline.recipes.digits",
        "DigitsConfig",
        "Train a small classifier of handwritten digits, in seconds, on CPU or GPU.",
    ),
    "lm": Recipe(
        "paceline.recipes.lm",
        "LmConfig",
        "Train a language model on a text file: a compact GPT in minutes, or a causal model of Hugging Face.",
    ),
    "mnist": Recipe(
        "paceline.recipes.mnist",
        "MnistConfig",
        "Train a network with SyncBatchNorm on MNIST's files, or compare global batches from 32 to 4,096.",
    ),
    "mrpc": Recipe(
        "paceline.recipes.mrpc",
        "MrpcConfig",
        "Train a Hugging Face model to tell paraphrases, on GLUE's MRPC.",
    ),
}


class Recipes(TyperGroup):
    """The commands of ``paceline train``, each made from its recipe's configuration."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the recipes' names."""
        return list(RECIPES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the recipe's command.

        Raises:
            UsageError: if there is no such recipe.
        """
        if cmd_name not in RECIPES:
            raise UsageError(f"unknown recipe {cmd_name!r}; known recipes: {', '.join(RECIPES)}")
        return recipe_command(cmd_name)


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
    """Import the frozen dataclass that configures `recipe`."""
    return getattr(importlib.import_module(RECIPES[recipe].module), RECIPES[recipe].config)


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


def recipe_command(recipe: str) -> Any:
    """Build the command of `recipe`: the options that every recipe has, then one for each field of its configuration.

    Type and default are the field's; :func:`paceline.launch.program.option` has put the help text into its metadata.
    """
    config = config_class(recipe)

    def start(nproc: str, timeout: float | None, **options: Any) -> None:
        raise typer.Exit(start_recipe(recipe, nproc, options, timeout))

    types = get_type_hints(config)
    parameters = [
        _option("nproc", str, "auto", typer.Option(metavar="N", help="Ranks: a number, gpu, cpu, or auto.")),
        _option("timeout", float | None, None, typer.Option(metavar="SECONDS", help=TIMEOUT_HELP)),
    ]
    for field in dataclasses.fields(config):
        # A switch that is off has no --no-… beside it.
        names = [f"--{field.name.replace('_', '-')}"] if field.default is False else []
        option = typer.Option(*names, help=field.metadata.get("help"), metavar=field.metadata.get("metavar"))
        parameters.append(_option(field.name, types[field.name], field.default, option))
    start.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    start.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    built = typer.Typer(add_completion=False)
    built.command(recipe, help=RECIPES[recipe].summary)(start)
    return untyped_flags(typer.main.get_command(built))


def _option(name: str, type_: Any, default: Any, option: Any) -> inspect.Parameter:
    """Describe an option as typer reads it from a function's signature."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=Annotated[type_, option])


def start_recipe(recipe: str, nproc: str, options: dict[str, Any], timeout: float | None = None) -> int:
    """Check the configuration here, once, then run `recipe` on `nproc` ranks; returns the exit code.

    Raises:
        UsageError: for a mistake in `options`, before any rank is started.
    """
    from paceline.launch.job import resolve_nproc, say, timeout_environment

    count, note = resolve_nproc(nproc)
    environment = timeout_environment(None if timeout is None else f"{timeout:g}")
    config = config_class(recipe)(**options)
    config.check()
    code = start_program(["paceline.recipes", recipe], config, count, sys.stdout, note, environment)
    folder = options.get("checkpoint_dir")
    if code == INTERRUPTED and folder:
        say(f"the checkpoints in {folder} are kept; to continue, give the same command with --resume")
    return code


@app.command("compare", context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def compare(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="RECIPE|SCRIPT", help="A recipe, or a script that uses Paceline.")],
    modes: Annotated[
        str | None,
        typer.Option(metavar="LIST", help=f"Some of {', '.join(MODES)}, with commas; all that can run by default."),
    ] = None,
    nproc: Annotated[str, typer.Option(metavar="N", help="Devices: a number, gpu, cpu, or auto.")] = "auto",
    steps: Annotated[int, typer.Option(help="Optimizer steps to time in each mode, after a warm-up of 3.")] = 40,
    one_by_one: Annotated[
        bool, typer.Option("--one-by-one", help="End each mode before the next starts, for want of memory.")
    ] = False,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the results there as JSON.")] = None,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw them there (.svg).")] = None,
) -> None:
    """Train the same program in several ways, and compare speed, memory and weights.

    Options of the comparison come first; what follows the name goes to the recipe or the script:
    paceline compare --nproc 2 digits --batch-size 64
    """
    from paceline.compare.compare_command import Comparison, Target
    from paceline.compare.compare_command import compare as run_comparison
    from paceline.launch.job import resolve_nproc, say

    count, note = resolve_nproc(nproc)
    if note:
        say(note)
    if target in RECIPES:
        program = Target(target, _parse_config(target, context.args))
    else:
        program = Target(target, None, context.args)
    raise typer.Exit(run_comparison(program, Comparison(modes, steps, json, plot, one_by_one), count))


def _parse_config(recipe: str, arguments: list[str]) -> Any:
    """Return the configuration of `recipe` that its options on the command line describe, checked."""
    command = recipe_command(recipe)
    given = command.make_context(recipe, list(arguments)).params
    usual = {"nproc": "auto", "timeout": None, "json": None}
    if misplaced := [name for name, value in usual.items() if given[name] != value]:
        raise UsageError(
            f"--{misplaced[0]} belongs before the recipe's name: paceline compare --{misplaced[0]} … {recipe}"
        )
    del given["nproc"], given["timeout"]
    for name in ("checkpoint_dir", "metrics", "tensorboard", "wandb", "sweep"):
        if given.get(name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} keeps files of one training, and compare runs many; leave it out"
            )
    config = config_class(recipe)(**given)
    config.check()
    return config


@app.command("env")
def env() -> None:
    """Print versions, backends, cores and limits, for a report of a defect."""
    from paceline.environment import describe

    for name, value in describe().items():
        typer.echo(f"{name + ':':<15}{value}")


def untyped_flags(command: Any) -> Any:
    """Take the type out of the help of options that have no value, in `command` and below it; returns `command`."""
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
