"""The parser of ``paceline run``: torchrun's own options, with ours in front."""

from __future__ import annotations

import os
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import NoReturn

from paceline.core.output.commands import or_near
from paceline.errors import UsageError
from paceline.launch.watching.signals import FORWARDED
from paceline.tools.cli.run_help import add_own_options, help_parser

# Of torch 2.15: prints a shell's completions of the command torchrun.
NOT_OURS = ("--print-completion", "--print_completion")


def parser() -> ArgumentParser:
    """Return torchrun's parser with our own options in front; mistakes become :class:`UsageError`."""
    from torch.distributed.argparse_util import env
    from torch.distributed.run import get_args_parser

    base: ArgumentParser = get_args_parser()
    if "--shutdown-timeout" not in base._option_string_actions:  # torch 2.11, whose own launcher always waits 30 s
        base.add_argument(
            *("--shutdown-timeout", "--shutdown_timeout"),
            action=env,
            type=int,
            help="Seconds that ranks have to end after a signal to the launcher. Default 30.",
        )
    add_own_options(base)
    _set_defaults(base._option_string_actions)
    base.format_help = help_parser().format_help  # type: ignore[method-assign]
    for name in NOT_OURS:
        base._option_string_actions.pop(name, None)

    def refuse(message: str) -> NoReturn:
        if "training_script" in message:
            message = "there is no script to run; use: paceline run [options] script.py [its arguments]"
        unknown = message.partition("unrecognized arguments: ")[2].split()
        if unknown:
            message = f"paceline run has no option {unknown[0]}{or_near(unknown[0], base._option_string_actions)}"
        raise UsageError(message)

    base.error = refuse  # type: ignore[method-assign]
    return base


def _set_defaults(actions: Mapping[str, Action]) -> None:
    """Give torchrun's options the defaults that they have here, unless the environment sets them."""
    if "PET_SIGNALS_TO_HANDLE" not in os.environ:
        actions["--signals-to-handle"].default = ",".join(number.name for number in FORWARDED)
    restarts = actions["--max-restarts"]
    if "PET_MAX_RESTARTS" not in os.environ:
        restarts.default = None


def parse(arguments: Sequence[str]) -> Namespace:
    """Parse the options before the script; the script and its own arguments are kept as they are.

    Raises:
        UsageError: for an option that does not exist or has no value, or if there is no script.
    """
    option_parser = parser()
    own_arguments, rest = split(arguments, option_parser._option_string_actions)
    options = option_parser.parse_args(own_arguments)
    options.training_script_args = rest
    return options


def split(arguments: Sequence[str], known: Mapping[str, Action]) -> tuple[list[str], list[str]]:
    """Split `arguments` behind the script.

    argparse looks at all of them, and would take a script's ``--log x`` for an ambiguous option of the launcher.
    """
    index = 0
    while index < len(arguments) and arguments[index].startswith("-") and arguments[index] not in ("-", "--"):
        name, _, _ = arguments[index].partition("=")
        abbreviated = {full for full in known if name.startswith("--") and full.startswith(name)}
        actions = {known[full] for full in ({name} if name in known else abbreviated)}
        # argparse refuses those that are unknown or ambiguous; "-t3" is "-t" with its value.
        takes_next = "=" not in arguments[index] and len(actions) == 1 and actions.pop().nargs is None
        index += 2 if takes_next else 1
    if arguments[index : index + 1] == ["--"]:
        index += 1
    return list(arguments[: index + 1]), list(arguments[index + 1 :])
