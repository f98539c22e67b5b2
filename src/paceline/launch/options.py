"""The command line of ``paceline run``: torchrun's own options, plus ``--nproc``."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from glob import glob
from importlib.machinery import PathFinder
from typing import Any, NoReturn

from paceline.errors import UsageError
from paceline.launch import pinning, preloading
from paceline.launch.files import Logs
from paceline.launch.job import TIMEOUT_S, Job, launch, resolve_nproc, say, timeout_environment
from paceline.launch.job_report import OPTION
from paceline.launch.restarts import LIMIT
from paceline.launch.signals import FORWARDED
from paceline.launch.supervision import Supervision, add_options, supervision_of
from paceline.world import TIMEOUT

USAGE = "paceline run [options] script.py [the script's arguments]"
ABOUT = """Start a script as N ranks that train together, as torchrun does.

    paceline run --nproc 2 train.py --lr 0.1      two ranks of 'python train.py --lr 0.1'
    paceline run --nproc 2 -m package.train       the same for 'python -m package.train'

Options go before the script; what follows the script is the script's. On one host nothing listens beyond loopback,
ranks end with the launcher however it dies, and the rank that failed first is named."""
TORCHRUNS = """All of torchrun's options are understood. With --nnodes, or a rendezvous on another host, torchrun's own
launcher does the work."""

LOOPBACKS = ("", "localhost", "127.0.0.1", "::1", "0:0:0:0:0:0:0:1")
# What one host has no use for: the store is ours, on a free port, and ranks are commands, not functions.
UNUSED = ("rdzv_backend", "rdzv_endpoint", "rdzv_conf", "master_port", "local_addr", "start_method")
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
            message = f"paceline run has no option {unknown[0]}{_or_near(unknown[0], base._option_string_actions)}"
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
    group.add_argument(
        "--timeout",
        metavar="SECONDS",
        help="How long a collective waits for a rank, unless the script says otherwise; ranks get it as "
        f"{TIMEOUT}, which paceline.init() reads. Default {TIMEOUT_S}, which is 10 minutes.",
    )
    group.add_argument(
        OPTION,
        metavar="FILE",
        help="Write there as JSON how the job ended: exit code, restarts, and for each failure the first rank with its "
        "error, step and phase, and what the others did. For one host.",
    )
    group.add_argument(
        pinning.OPTION,
        action="store_true",
        help="Keep each rank to cores of its own, of one NUMA node where that is possible. For one host.",
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
    restarts.help = (
        "How often all ranks are started again after a failure, counted only while no step is completed. Default "
        f"{LIMIT} for ranks that mark their steps with a Checkpointer, and 0 for others."
    )
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


def _or_near(name: str, known: Iterable[str]) -> str:
    """Return «; did you mean --nproc?», if one of the `known` names is close to `name`."""
    near = get_close_matches(name.partition("=")[0], list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def start(arguments: Sequence[str]) -> int:
    """Run ``paceline run`` with these `arguments`; return the exit code.

    Raises:
        UsageError: for a mistake in the arguments, before anything is started.
    """
    options = parse(arguments)
    nproc, note = resolve_nproc(options.nproc_per_node)
    command = rank_command(options)
    if several_hosts(options):
        others = supervision_of(options) != Supervision()
        for name, given in (
            (OPTION, options.report is not None),
            (pinning.OPTION, options.pin),
            ("--requeue-exit-code, or --hang-…,", others),
        ):
            if given:
                raise UsageError(f"{name} is for jobs on one host; leave it out, or --nnodes and the rendezvous")
        from paceline.launch.rendezvous_hosts import launch_hosts

        os.environ.update(timeout_environment(options.timeout))
        return launch_hosts(options, command, nproc)
    if options.pin:
        pinning.pinned(nproc)  # which refuses more ranks than cores
    job = single_host(options, command, nproc)
    for remark in (note, unused(options)):
        if remark:
            say(remark)
    return launch(job)


def rank_command(options: Namespace) -> list[str]:
    """Return the command of each rank, checked to exist."""
    script = options.training_script
    if options.run_path:
        raise UsageError("--run-path is not supported; leave it out")
    if options.logs_specs:
        raise UsageError("--logs-specs is not supported; use --log-dir, --redirects and --tee")
    if options.no_python:
        if options.module:
            raise UsageError("--no-python and --module contradict each other; give one of them")
        if shutil.which(script) is None:
            raise UsageError(f"the command {script!r} is not found, or may not be executed")
        return [script, *options.training_script_args]
    interpreter = os.environ.get("PYTHON_EXEC", sys.executable)
    if options.module:
        top = script.partition(".")[0]
        if interpreter == sys.executable and PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
            raise UsageError(f"there is no module {top!r} to run; is it installed, or in this folder?")
        return [interpreter, "-u", "-m", script, *options.training_script_args]
    if not os.path.exists(script):
        near = _or_near(script, glob("*.py"))
        raise UsageError(f"the script {script!r} does not exist{near}")
    return [interpreter, "-u", script, *options.training_script_args]


def several_hosts(options: Namespace) -> bool:
    """Return whether the options describe more than this host.

    Raises:
        UsageError: if ``--nnodes`` is malformed.
    """
    try:
        low, _, high = options.nnodes.partition(":")
        least, most = int(low), int(high or low)
    except ValueError:
        raise UsageError(f"--nnodes={options.nnodes!r} is neither a number nor MIN:MAX") from None
    if not 1 <= least <= most:
        raise UsageError(f"--nnodes={options.nnodes} must satisfy 1 <= MIN <= MAX")
    if most == 1 and options.node_rank != 0:
        raise UsageError(f"--node-rank={options.node_rank}, but --nnodes is 1; give the number of hosts")
    if options.standalone:
        return False
    host = options.rdzv_endpoint.rpartition(":")[0] or options.rdzv_endpoint
    return (
        most > 1
        or options.rdzv_backend not in ("static", "c10d")
        or host.strip("[]") not in LOOPBACKS
        or options.master_addr.strip("[]") not in LOOPBACKS
    )


def single_host(options: Namespace, command: Sequence[str], nproc: int) -> Job:
    """Return the job that the options describe."""
    grace = options.shutdown_timeout
    if grace is None:
        name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        grace = _number(name, os.environ.get(name, "30"))
    only = options.local_ranks_filter
    logs = Logs(
        options.log_dir,
        options.redirects,
        options.tee,
        frozenset(_number("--local-ranks-filter", part) for part in only.split(",")) if only else frozenset(),
        # The option is torch 2.15's.
        getattr(options, "log_line_prefix_template", "") or os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", ""),
    )
    return Job(
        command,
        nproc,
        max_restarts=options.max_restarts,
        grace=grace,
        interval=options.monitor_interval,
        run_id="" if options.rdzv_id == "none" or options.standalone else options.rdzv_id,
        logs=logs,
        signals=[_signal(name.strip()) for name in options.signals_to_handle.split(",")],
        env=timeout_environment(options.timeout),
        worker_spec=_worker_spec(options),
        report=options.report,
        pin=options.pin,
        supervision=supervision_of(options),
        preload=options.preload,
    )


def _worker_spec(options: Namespace) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "role": options.role,
        "virtual_local_rank": options.virtual_local_rank,
        "event_log_handler": options.event_log_handler,
    }
    filters = {"stdout": options.duplicate_stdout_filters, "stderr": options.duplicate_stderr_filters}
    for stream, wanted in filters.items():
        if wanted and not options.log_dir:
            raise UsageError(f"--duplicate-{stream}-filters needs a folder; give one with --log-dir")
        spec[f"duplicate_{stream}_filters"] = wanted or None
    if options.numa_binding:
        from torch.numa.binding import AffinityMode, NumaOptions

        spec["numa_options"] = NumaOptions(affinity_mode=AffinityMode(options.numa_binding))
    return spec


def unused(options: Namespace) -> str | None:
    """Return a remark that names the given options that mean nothing on one host; None if there is none."""
    option_parser = parser()
    # --standalone says that all of these are to be chosen by the launcher.
    ignored = [name for name in UNUSED if getattr(options, name) != option_parser.get_default(name)]
    if not ignored or options.standalone:
        return None
    names = ", ".join("--" + name.replace("_", "-") for name in ignored)
    return f"note: {names}: not used on one host; every start gets a store of its own on a free loopback port"


def _signal(name: str) -> signal.Signals:
    try:
        number = signal.Signals[name]
    except KeyError:
        raise UsageError(f"--signals-to-handle names {name!r}, which is no signal here") from None
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise UsageError(f"--signals-to-handle names {name}, which no process can handle")
    return number


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"{name}: {value!r} is not a whole number") from None
