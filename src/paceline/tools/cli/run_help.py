"""The options of ``paceline run`` that torchrun does not have, and its help. Importing this needs no torch."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

from paceline.launch.watching.settings import (
    FORCE_HELP,
    MAX_RESTARTS_HELP,
    PIN_HELP,
    REPORT_HELP,
    TIMEOUT_S,
    add_options,
)

USAGE = "paceline run [options] script.py [the script's arguments]"
ABOUT = """Start a script as N ranks that train together, as torchrun does.

    paceline run --nproc 2 train.py --lr 0.1      two ranks of 'python train.py --lr 0.1'
    paceline run --nproc 2 -m package.train       the same for 'python -m package.train'

Options go before the script; what follows the script is the script's. On one host nothing listens beyond loopback,
ranks end with the launcher however it dies, and the rank that failed first is named."""
TORCHRUNS = """torchrun's options:
  All of them are understood; 'torchrun --help' describes them. With --nnodes, or a rendezvous on another host,
  torchrun's own launcher does the work.

  several hosts    --nnodes --node-rank --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --master-addr --master-port
  the program      -m, --module --no-python --role
  the output       --log-dir --redirects --tee --local-ranks-filter"""


def add_own_options(group: Any) -> None:
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
        f"PACELINE_TIMEOUT, which paceline.init() reads. Default {TIMEOUT_S}, which is 10 minutes.",
    )
    group.add_argument("--report", metavar="FILE", help=REPORT_HELP + " For one host.")
    group.add_argument("--pin", action="store_true", help=PIN_HELP + " For one host.")
    group.add_argument(
        "--no-preload",
        dest="preload",
        action="store_false",
        help="Have every rank import torch itself, rather than fork ranks from a process that has imported it; for "
        "scripts that change how torch is imported.",
    )
    add_options(group)


def help_parser() -> ArgumentParser:
    """Return a parser that knows what most people need, and prints the help."""
    parser = ArgumentParser(
        "paceline run", USAGE, ABOUT, TORCHRUNS, formatter_class=RawDescriptionHelpFormatter, add_help=False
    )
    group = parser.add_argument_group("options")
    add_own_options(group)
    group.add_argument("--max-restarts", type=int, metavar="N", help=MAX_RESTARTS_HELP)
    group.add_argument("-h", "--help", action="store_true", help="Show this and exit.")
    return parser


def asks_for_help(arguments: list[str]) -> bool:
    """Return whether ``--help`` is among the options before the script, as far as that is known without torchrun's."""
    actions = help_parser()._option_string_actions
    index = 0
    while index < len(arguments) and arguments[index].startswith("-") and arguments[index] not in ("-", "--"):
        if arguments[index] in ("-h", "--help"):
            return True
        action = actions.get(arguments[index])
        index += 2 if action is not None and action.nargs is None else 1
    return False
