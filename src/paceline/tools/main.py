"""The ``paceline`` command and its subcommands. A usage error prints one line and exits with code 2 (decision 46)."""

from __future__ import annotations

import dataclasses
import signal
import sys
from contextlib import suppress
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperCommand

from paceline import __version__
from paceline.core.command_line import INTERRUPTED, Commands, load_torch, options_of, or_near
from paceline.core.host import reached
from paceline.core.messages import drop_unwritten, end_echo, say
from paceline.errors import UsageError
from paceline.tools.bench.bench_command import bench
from paceline.tools.checkpoints import checkpoint
from paceline.tools.compare.modes import MODES, choose_ways
from paceline.tools.explain.explain_command import EXAMPLES, explain
from paceline.tools.memory_estimate import estimate_command
from paceline.tools.plan import plan_command
from paceline.tools.program import validate_script
from paceline.tools.recipes.commands import RECIPES, AroundRecipe, Recipes, command_line, parse_recipe, untyped_flags


class Completion(NamedTuple):
    """A shell completion, with the attributes of click's ``CompletionItem``."""

    value: str
    type: str = "plain"
    help: str | None = None


class Run(TyperCommand):
    """The command ``run``. Its arguments, including ``--help``, are parsed by argparse."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave all parsing to the command."""
        ctx.args = list(args)
        return []

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return the options that begin with `incomplete`."""
        from paceline.tools.run_options import help_parser

        names = help_parser()._option_string_actions if incomplete.startswith("-") else {}
        return [Completion(name) for name in names if name.startswith(incomplete)]


app = typer.Typer(
    name="paceline",
    cls=Commands,
    help="Data-parallel training for PyTorch that is exact, fast, visible and hard to break.",
    pretty_exceptions_enable=False,
)
train = typer.Typer(cls=Recipes, help="Train one of the recipes that come with Paceline.")
app.add_typer(train, name="train")
app.add_typer(bench, name="bench")
app.add_typer(checkpoint, name="checkpoint")
app.command("explain", epilog=EXAMPLES)(explain)
app.command("estimate-memory", epilog=estimate_command.EXAMPLES)(estimate_command.estimate_memory)
app.command("plan", epilog=plan_command.EXAMPLES)(plan_command.plan)


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


@app.command("run", cls=Run)
def run(context: typer.Context) -> None:
    """Start a script as N ranks: paceline run --nproc 2 script.py"""
    from paceline.tools.run_options import asks_for_help, help_parser

    if asks_for_help(context.args):
        help_parser().print_help()
        return
    load_torch()
    from paceline.tools.run_command import start

    raise typer.Exit(start(context.args))


# Options after the name belong to the recipe or script, so typer stops parsing at the name.
@app.command("compare", cls=AroundRecipe, context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def compare(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="RECIPE|SCRIPT", help="A recipe or a script that uses Paceline.")],
    modes: Annotated[
        str | None,
        typer.Option(metavar="LIST", help=f"Comma-separated list of {', '.join(MODES)}; by default all that can run."),
    ] = None,
    nproc: Annotated[
        str,
        typer.Option(
            metavar="N", help="Devices: a number, gpu, cpu or auto. Or the numbers of ranks to compare: 1,2,4."
        ),
    ] = "auto",
    steps: Annotated[int, typer.Option(help="Optimizer steps to time in each mode, after 3 warm-up steps.")] = 40,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the results as JSON.")] = None,
) -> None:
    """Train a program in several modes or with different numbers of ranks, and compare speed, memory and weights.

    Arguments after the name are passed to the recipe or script: paceline compare --nproc 2 digits --batch-size 64.
    Options of the comparison go before a script's name; with a recipe, they can go anywhere.
    """
    load_torch()
    from paceline.launch.job import resolve_nproc
    from paceline.tools.compare.compare_command import Comparison
    from paceline.tools.compare.compare_command import compare as run_comparison

    resolved = [resolve_nproc(number) for number in nproc.split(",")]
    if notes := [note for _, note in resolved if note]:
        say(notes[-1])
    if target not in RECIPES:
        validate_script(target, RECIPES)
    config = parse_recipe(target, context.args, "compare") if target in RECIPES else None
    comparison = Comparison(target, config, context.args, steps, json)
    raise typer.Exit(run_comparison(comparison, choose_ways(modes, [count for count, _ in resolved])))


@app.command("profile", cls=AroundRecipe, context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def profile(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE|SCRIPT", help="A recipe or a script that uses DistributedDataParallel. Or: report FOLDER."
        ),
    ] = None,
    nproc: Annotated[str, typer.Option(metavar="N", help="Ranks: a number, gpu, cpu, or auto.")] = "auto",
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps to measure before ending the program; all by default.")
    ] = None,
    out: Annotated[
        str, typer.Option(metavar="FOLDER", help="Folder for the report, the trace and the records.")
    ] = "profile",
    noise_scale: Annotated[
        bool, typer.Option("--noise-scale", help="Measure the gradient noise scale, for paceline plan.")
    ] = False,
) -> None:
    """Run a program on N ranks, and report the time of each part of a step, which ranks wait, and what to change.

    Arguments after the name are passed to the recipe or script: paceline profile --nproc 2 train.py --epochs 3.
    Options of the profile go before a script's name; with a recipe, they can go anywhere.

    paceline profile report FOLDER writes the results again, for example after adding the records of other hosts.
    """
    load_torch()
    from paceline.launch.job import resolve_nproc
    from paceline.tools import profile_command

    if target is None:
        raise UsageError("no program given; name a recipe or a script to profile (see paceline profile --help)")
    if target == "report":
        raise typer.Exit(profile_command.report_again(context.args))
    count, note = resolve_nproc(nproc)
    if noise_scale and count < 2:
        raise UsageError("--noise-scale compares the gradients of ranks, but there is only one; use --nproc 2 or more")
    settings, environment = profile_command.ProfileSettings(out, steps, noise_scale=noise_scale), {}
    if target in RECIPES:
        # Unlike in a comparison, only one training runs, so it may write its files.
        config = parse_recipe(target, context.args, "profile", keeps_files=True)
        program = ["-m", "paceline.tools", f"recipes.{target}", config.to_json()]
        settings = dataclasses.replace(settings, title=command_line(target, config))
        environment = config.environment(count)
    else:
        validate_script(target, RECIPES)
        program = [target, *context.args]
    # Must come after the other checks, because it deletes an earlier profile in the folder.
    settings.check()
    if note:
        say(note)
    raise typer.Exit(profile_command.run_profiled(program, settings, count, environment))


@app.command("top")
def top(
    job: Annotated[
        int | None, typer.Option(metavar="PID", help="Process ID of the launcher or of a rank, to choose between jobs.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the values once as JSON.")] = False,
) -> None:
    """Show the ranks of a running job live: step, phase, step time, waiting time, and the rank that others wait for.

    Shows jobs of paceline run, train, compare and profile that run on this host alone. If stdout is not a terminal, the
    table is printed once. Ctrl-C ends the view, not the job.
    """
    from paceline.tools.top import run_top

    raise typer.Exit(run_top(job, json))


@app.command("env")
def env() -> None:
    """Print versions, backends, cores and torch's environment report, for a bug report."""
    from torch.utils.collect_env import get_pretty_env_info

    from paceline.tools.env import describe

    for name, value in describe().items():
        typer.echo(f"{name + ':':<15}{value}")
    typer.echo(f"\n{get_pretty_env_info()}")


def main() -> NoReturn:
    """Entry point of ``paceline`` and ``python -m paceline``."""
    arguments = sys.argv[1:]
    # The parent process may ignore SIGCHLD, which discards the exit codes of ranks, or block signals such as SIGTERM.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with suppress(AttributeError, OSError):  # not a file, or opened before its file was replaced
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a path may not be UTF-8
    # For a group without a command, typer reports an error; show the help instead.
    if not arguments or arguments in (["train"], ["bench"], ["checkpoint"]):
        arguments.append("--help")
    try:
        command = untyped_flags(typer.main.get_command(app))
        # In standalone mode, click would print multi-line usage errors and exit.
        code = command.main(args=arguments, prog_name="paceline", standalone_mode=False)
    except UsageError as error:
        code = _refuse(str(error))
    # click converts a Ctrl-C in a command into an Abort.
    except (KeyboardInterrupt, typer.Abort):
        end_echo()
        say("interrupted")
        code = INTERRUPTED
    except Exception as error:
        # A click error, such as an unknown option. Check an attribute instead of the class, because some versions of
        # typer bundle their own copy of click.
        if limit := reached(error):
            say(f"error: {limit}")
            code = 1
        elif not hasattr(error, "format_message"):
            raise
        elif (option := getattr(error, "option_name", None)) and hasattr(error, "possibilities"):
            code = _refuse(f"No such option: {option}{_near_option(option, error)}")
        else:
            code = _refuse(error.format_message())
    drop_unwritten()
    sys.exit(code or 0)


def _near_option(option: str, error: Any) -> str:
    """Return a hint for an unknown option."""
    context = getattr(error, "ctx", None)
    options = [] if context is None else options_of(context)
    if (hint := or_near(option, options)) or "--nproc" in options or not or_near(option, ["--nproc"]):
        return hint
    return "; options go after a command, as in: paceline run --nproc 2 script.py"


def _refuse(message: str) -> int:
    say(f"error: {' '.join(message.split())}")
    return 2
