"""``paceline train``: a command for each recipe, with an option for each field of its configuration."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from paceline.checkpoint.step_names import newest_step
from paceline.core.command_line import INTERRUPTED, Commands, load_torch
from paceline.core.messages import say
from paceline.core.option_rules import flag_of
from paceline.errors import UsageError
from paceline.launch.options import MAX_RESTARTS_HELP, TYPES, Supervision, supervision_of
from paceline.tools.program import start_program
from paceline.tools.recipes.configs import OWN_PANEL, DigitsConfig, LmConfig, MrpcConfig, TrainingOptions, panel_of

PROFILE_HELP = "Record every rank's steps, and write a profile to this folder."
LAUNCHER_OPTIONS: tuple[tuple[str, Any, Any, Any], ...] = (
    ("nproc", str, "auto", typer.Option(metavar="N", help="Ranks: a number, gpu, cpu, or auto.")),
    ("profile", str | None, None, typer.Option(metavar="FOLDER", help=PROFILE_HELP)),
    ("max_restarts", int | None, None, typer.Option(metavar="N", help=MAX_RESTARTS_HELP)),
    *(
        (field.name, TYPES[field.name], field.default, typer.Option(**field.metadata))
        for field in dataclasses.fields(Supervision)
    ),
)
"""Options of ``paceline train`` that are not in a recipe's configuration: name, type, default and help."""


RECIPES: dict[str, type[TrainingOptions]] = {"digits": DigitsConfig, "lm": LmConfig, "mrpc": MrpcConfig}
"""Configurations of the recipes. The recipe modules take seconds to import, so only ranks import them."""


class AroundRecipe(TyperCommand):
    """A command that also accepts its options after the name of a recipe, but not after a script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        values, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        if values.get("target") in RECIPES:
            # Keep parsing after the name, and leave unknown options to the recipe.
            ctx.allow_interspersed_args = ctx.ignore_unknown_options = True
            if not values.get("help"):
                ctx.help_option_names = []  # after the recipe's name, --help shows the recipe's help
        return list(super().parse_args(ctx, args))


class Recipes(Commands):
    """The commands of ``paceline train``."""

    noun = "recipe"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move the recipe's name, which may come after options, to the front."""
        place = next((index for index, word in enumerate(args) if word in RECIPES), 0)
        if args and args[place].startswith("-") and "--help" not in args:
            raise UsageError(f"{args[place]} needs a recipe; name one: {', '.join(RECIPES)}")
        return list(super().parse_args(ctx, [*args[place : place + 1], *args[:place], *args[place + 1 :]]))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(RECIPES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return recipe_command(cmd_name) if cmd_name in RECIPES else None


def recipe_command(recipe: str) -> Any:
    """Build the command of `recipe`: the launcher's options, and one for each field of its configuration."""
    config = RECIPES[recipe]

    def start(**options: Any) -> None:
        raise typer.Exit(start_recipe(recipe, options))

    types = get_type_hints(config)
    parameters = []
    for field in dataclasses.fields(config):
        # Name flags explicitly; otherwise, typer would add a --no-… form.
        names = [flag_of(field.name)] if field.default is False else []
        option = typer.Option(*names, help=field.metadata.get("help"), metavar=field.metadata.get("metavar"))
        parameters.append(_option(field.name, types[field.name], field.default, option))
    parameters += [_option(*option) for option in LAUNCHER_OPTIONS]
    # --help lists the recipe's own options first.
    parameters.sort(key=lambda parameter: panel_of(parameter.name) != OWN_PANEL)
    # typer reads the options from the function's signature.
    start.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    start.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    built = typer.Typer(add_completion=False)
    built.command(recipe, help=config.summary)(start)
    return untyped_flags(typer.main.get_command(built))


def _option(name: str, type_: Any, default: Any, option: Any) -> inspect.Parameter:
    """Return a parameter that typer turns into an option."""
    option.rich_help_panel = panel_of(name)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=Annotated[type_, option])


def start_recipe(recipe: str, options: dict[str, Any]) -> int:
    """Check the configuration, run `recipe` on ranks, and return the exit code."""
    load_torch()
    from paceline.launch.job import resolve_nproc, timeout_environment
    from paceline.tools.profile_command import ProfileSettings, rank_program, show_results

    launcher = {name: options.pop(name) for name, *_ in LAUNCHER_OPTIONS}  # leaves only the recipe's options
    job = {"max_restarts": launcher["max_restarts"], "supervision": supervision_of(launcher)}
    count, note = resolve_nproc(launcher["nproc"])
    job["supervision"].slots(count)  # raises an error if --min-nproc is out of range
    environment = timeout_environment(None)
    config = RECIPES[recipe](**options)
    config.check()
    environment |= config.environment(count)
    program = ["paceline.tools", f"recipes.{recipe}"]
    if (profile := launcher["profile"]) is not None:
        settings = ProfileSettings(profile, title=command_line(recipe, config))
        settings.check()  # after the recipe's options, because this deletes an earlier profile in the folder
        program = rank_program(settings, ["-m", *program])
    # Look up only the top-level name, because find_spec() of a submodule imports its package.
    needs = (name for name in config.needs if find_spec(name.partition(".")[0]))
    modules = [f"paceline.tools.recipes.{recipe}", *needs]
    code = start_program(program, config, count, sys.stdout, note, environment, modules, **job)
    if profile is not None:
        show_results(Path(profile), code)
    folder = config.checkpoint_dir
    if code == INTERRUPTED and folder and newest_step(Path(folder)) is not None:
        say(f"the checkpoints in {folder} are kept; to continue, give the same command with --resume")
    return code


def command_line(recipe: str, config: Any) -> str:
    """Return the command for this configuration, without options that have default values."""
    words = ["paceline", "train", recipe]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            words += [flag_of(field.name)] if value is True else [flag_of(field.name), str(value)]
    return shlex.join(words)


def parse_recipe(recipe: str, arguments: list[str], caller: str, *, keeps_files: bool = False) -> Any:
    """Return the checked configuration of `recipe` from its options on the command line of `caller`."""
    # Pass a copy, because click removes arguments from the list.
    values = recipe_command(recipe).make_context(recipe, list(arguments)).params
    reasons = {name: f"is an option of paceline train, not of paceline {caller}" for name, *_ in LAUNCHER_OPTIONS}
    defaults = {name: default for name, _, default, _ in LAUNCHER_OPTIONS}
    if not keeps_files:
        files = ("checkpoint_dir", "metrics", "tensorboard")
        reasons |= dict.fromkeys(files, f"writes files for one training, and {caller} runs several")
    if caller == "compare":
        reasons |= dict.fromkeys(
            ("virtual_ranks", "sync_every"), "needs Paceline's wrapper, and compare also runs torch's"
        )
    for name, reason in reasons.items():
        if values.get(name) != defaults.get(name):
            raise UsageError(f"{flag_of(name)} {reason}; leave it out")
    config = RECIPES[recipe](**{name: value for name, value in values.items() if name not in defaults})
    config.check()
    return config


def untyped_flags(command: Any) -> Any:
    """Do not show a type for flags in the help of `command` and its subcommands. Return `command`."""
    for parameter in command.get_params(typer.Context(command)):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for below in getattr(command, "commands", {}).values():
        untyped_flags(below)
    return command
