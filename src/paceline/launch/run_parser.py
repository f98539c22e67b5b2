"""The parser of ``paceline run``: torchrun's own options, with ours in front."""

from __future__ import annotations

import os
from argparse import SUPPRESS, Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from paceline.errors import UsageError
from paceline.launch import pinning, preloading
from paceline.launch.job import TIMEOUT_S
from paceline.launch.job_report import OPTION
from paceline.launch.signals import FORWARDED
from paceline.launch.supervision import FORCE_HELP, MAX_RESTARTS_HELP, PIN_HELP, REPORT_HELP, add_options
from paceline.world import TIMEOUT

USAGE = "paceline run [options] script.py [the script's arguments]"
ABOUT = """Start a script as N ranks that train together, as torchrun does.

    paceline run --nproc 2 train.py --lr 0.1      two ranks of 'python train.py --lr 0.1'
    paceline run --nproc 2 -m package.train       the same for 'python -m package.train'

Options go before the script; what follows the script is the script's. On one host nothing listens beyond loopback,
ranks end with the launcher however it dies, and the rank that failed first is named."""
TORCHRUNS = """All of torchrun's options are understood. With --nnodes, or a rendezvous on another host, torchrun's own
launcher does the work."""

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
    base.prog, base.usage = "paceline run", USAGE
    base.description, base.formatter_class = ABOUT, RawDescriptionHelpFormatter
    ours = base.add_argument_group("options")
    _add_own_options(ours)
    _set_defaults(base._option_string_actions)
    # argparse shows groups in this order: what most people need first.
    base._action_groups.sort(key=lambda group: group is not ours)
    base._optionals.title, base._optionals.description = "torchrun's options", TORCHRUNS
    for action in base._positionals._group_actions:
        action.help = SUPPRESS
    for name in NOT_OURS:
        if (known := base._option_string_actions.pop(name, None)) is not None:
            known.help = SUPPRESS

    def refuse(message: str) -> NoReturn:
        if "training_script" in message:
            message = "there is no script to run; use: paceline run [options] script.py [its arguments]"
        unknown = message.partition("unrecognized arguments: ")[2].split()
        if unknown:
            message = f"paceline run has no option {unknown[0]}{or_near(unknown[0], base._option_string_actions)}"
        raise UsageError(message)

    base.error = refuse  # type: ignore[method-assign]
    return base


def _add_own_options(group: Any) -> None:
    """Add the options that torchrun does not have to a group of its parser."""
    group.add_argument(
        "--nproc",
        dest="nproc_per_node",
        default=SUPPRESS,
        metavar="N",
        help="Number of ranks on this host: a number, gpu, cpu or auto (GPUs if there are any, else cores). Default 1.",
    )
    group.add_argument("--force", action="store_true", help=FORCE_HELP)
    group.add_argument(
        "--timeout",
        metavar="SECONDS",
        help="How long a collective waits for a rank, unless the script says otherwise; ranks get it as "
        f"{TIMEOUT}, which paceline.init() reads. Default {TIMEOUT_S}, which is 10 minutes.",
    )
    group.add_argument(
        OPTION,
        metavar="FILE",
        help=REPORT_HELP + " For one host.",
    )
    group.add_argument(
        pinning.OPTION,
        action="store_true",
        help=PIN_HELP + " For one host.",
    )
    group.add_argument(
        preloading.OPTION,
        dest="preload",
        action="store_false",
        help="Have every rank import torch itself, rather than fork ranks from a process that has imported it; for "
        "scripts that change how torch is imported.",
    )
    add_options(group)


def _set_defaults(actions: Mapping[str, Action]) -> None:
    """Give torchrun's options the defaults that they have here, unless the environment sets them."""
    if "PET_SIGNALS_TO_HANDLE" not in os.environ:
        actions["--signals-to-handle"].default = ",".join(number.name for number in FORWARDED)
    restarts = actions["--max-restarts"]
    restarts.help = MAX_RESTARTS_HELP
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


def or_near(name: str, known: Iterable[str]) -> str:
    """Return «; did you mean --nproc?», if one of the `known` names is close to `name`."""
    near = get_close_matches(name.partition("=")[0], list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""
