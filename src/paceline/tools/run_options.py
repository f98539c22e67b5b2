"""The parser of ``paceline run``: torchrun's options, Paceline's options, and the help.

The help comes from a small separate parser, so that ``--help`` does not load torch.
"""

from __future__ import annotations

import os
import re
from argparse import SUPPRESS, Action, ArgumentParser, HelpFormatter, Namespace
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import NoReturn

from paceline.core.command_line import or_near
from paceline.errors import UsageError
from paceline.launch.options import MAX_RESTARTS_HELP, REPORT_HELP, SHUTDOWN_HELP, TIMEOUT_S, add_options
from paceline.launch.signals import FORWARDED

USAGE = "paceline run [options] script.py [the script's arguments]"
ABOUT = """Start a script as N ranks that train together, as torchrun does.

    paceline run --nproc 2 train.py --lr 0.1   as 'python train.py --lr 0.1'
    paceline run --nproc 2 -m package.train    as 'python -m package.train'

Options go before the script; arguments after it are passed to the script. On one host, only the loopback interface is \
used, ranks end when the launcher ends, and the first rank to fail is reported."""
TORCHRUNS = """torchrun's options:
  All torchrun options are accepted; see 'torchrun --help'. With --nnodes, or a rendezvous on another host, torchrun's \
launcher starts the ranks.

  several hosts    --nnodes --node-rank --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --master-addr --master-port
  the program      -m, --module --no-python --role
  the output       --tee (3 prefixes each line with its rank) --log-dir --redirects --local-ranks-filter"""


class LinesFormatter(HelpFormatter):
    """Keeps the line breaks of the description, and aligns wrapped lines with the text after a gap."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(self._filled(line, width) for line in text.splitlines())

    @staticmethod
    def _filled(line: str, width: int) -> str:
        start = re.match(r" *(\S+( \S+)* {2,})?", line)
        assert start is not None
        # Do not break options such as --node-rank at the hyphen.
        indent = " " * min(start.end(), width // 3)
        return fill(line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def add_own_options(parser: ArgumentParser) -> None:
    """Add to `parser` the options that torchrun does not have."""
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument(
        "--nproc",
        dest="nproc_per_node",
        default=SUPPRESS,
        metavar="N",
        help="Number of ranks on this host: a number, gpu, cpu or auto (GPUs if there are any, else cores). Default 1.",
    )
    ranks.add_argument(
        "--timeout",
        metavar="SECONDS",
        help=f"Timeout of collectives, unless the script sets one. Default {TIMEOUT_S} (10 minutes).",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--report", metavar="FILE", help=REPORT_HELP + " For one host.")
    output.add_argument(
        "--prefix-ranks", action="store_true", help="Begin each printed line with its rank (rank 0 | …). For one host."
    )
    add_options(parser.add_argument_group("failures"))


def help_parser() -> ArgumentParser:
    """Return the parser that prints the help: Paceline's options and torchrun's most common options."""
    parser = ArgumentParser("paceline run", USAGE, ABOUT, TORCHRUNS, formatter_class=LinesFormatter, add_help=False)
    add_own_options(parser)
    failures = parser._action_groups[-1]
    failures.add_argument("--max-restarts", type=int, metavar="N", help=MAX_RESTARTS_HELP)
    failures.add_argument("--shutdown-timeout", type=int, metavar="SECONDS", help=SHUTDOWN_HELP)
    parser.add_argument("-h", "--help", action="store_true", help="Show this message and exit.")
    return parser


def asks_for_help(arguments: list[str]) -> bool:
    """Return whether ``--help`` is among the options before the script. Recognizes only options in the help."""
    before_script, _ = split(arguments, help_parser()._option_string_actions)
    return not {"-h", "--help"}.isdisjoint(before_script)


NOT_OURS = ("--print-completion", "--print_completion")
"""Options of torch 2.15 that print shell completions for torchrun. Not supported."""


def parser() -> ArgumentParser:
    """Return torchrun's parser with Paceline's options added. Parsing errors become :class:`UsageError`."""
    from torch.distributed.argparse_util import env
    from torch.distributed.run import get_args_parser

    base: ArgumentParser = get_args_parser()
    if "--shutdown-timeout" not in base._option_string_actions:  # torch 2.11, whose launcher always waits 30 s
        base.add_argument("--shutdown-timeout", "--shutdown_timeout", action=env, type=int, help=SHUTDOWN_HELP)
    add_own_options(base)
    _set_defaults(base._option_string_actions)
    # Otherwise, the help would list all options of torchrun.
    base.format_help = help_parser().format_help  # type: ignore[method-assign]
    for name in NOT_OURS:
        base._option_string_actions.pop(name, None)

    def refuse(message: str) -> NoReturn:
        if "training_script" in message:
            message = "no script given; use: paceline run [options] script.py [its arguments]"
        unknown = message.partition("unrecognized arguments: ")[2].split()
        if unknown:
            message = f"paceline run has no option {unknown[0]}{or_near(unknown[0], base._option_string_actions)}"
        raise UsageError(message)

    base.error = refuse  # type: ignore[method-assign]
    return base


def _set_defaults(actions: Mapping[str, Action]) -> None:
    """Change the defaults of torchrun's options, unless the environment sets them."""
    # torchrun's parser has already read defaults from the PET_… variables.
    if "PET_SIGNALS_TO_HANDLE" not in os.environ:
        actions["--signals-to-handle"].default = ",".join(number.name for number in FORWARDED)
    if "PET_MAX_RESTARTS" not in os.environ:
        # None lets the job choose. torchrun's default of 0 is indistinguishable from an explicit 0.
        actions["--max-restarts"].default = None
    if "PET_MASTER_ADDR" not in os.environ:
        actions["--master-addr"].default = ""  # required on several hosts, so there is no default


def parse(arguments: Sequence[str]) -> Namespace:
    """Parse the options before the script; keep the script and its arguments unchanged."""
    option_parser = parser()
    own_arguments, rest = split(arguments, option_parser._option_string_actions)
    options = option_parser.parse_args(own_arguments)
    options.training_script_args = rest
    return options


def split(arguments: Sequence[str], options: Mapping[str, Action]) -> tuple[list[str], list[str]]:
    """Split `arguments` after the script.

    argparse alone would also parse the script's arguments, and treat ``--log x`` as an ambiguous launcher option.
    """
    index = 0
    while index < len(arguments) and arguments[index].startswith("-") and arguments[index] not in ("-", "--"):
        name, _, _ = arguments[index].partition("=")
        abbreviated = {full for full in options if name.startswith("--") and full.startswith(name)}
        actions = {options[full] for full in ({name} if name in options else abbreviated)}
        # argparse reports unknown and ambiguous options later. "-t3" is "-t" with its value.
        takes_next = "=" not in arguments[index] and len(actions) == 1 and actions.pop().nargs is None
        index += 2 if takes_next else 1
    if arguments[index : index + 1] == ["--"]:
        index += 1
    return list(arguments[: index + 1]), list(arguments[index + 1 :])
