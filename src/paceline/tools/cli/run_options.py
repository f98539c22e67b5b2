"""The work of ``paceline run``: from its options to the job that they describe."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from glob import glob
from importlib.machinery import PathFinder
from typing import Any

from paceline.core.output.commands import or_near
from paceline.core.output.messages import say
from paceline.core.torch_internals.versions import is_command_line, warn_if_untested
from paceline.errors import UsageError
from paceline.launch.failures.job_report import OPTION
from paceline.launch.fork_server.policy import source
from paceline.launch.job import Job, launch, resolve_nproc, timeout_environment
from paceline.launch.rank.channels import Logs
from paceline.launch.watching.settings import Supervision, supervision_of
from paceline.tools.cli.run_parser import parse, parser

LOOPBACKS = ("", "localhost", "127.0.0.1", "::1", "0:0:0:0:0:0:0:1")
UNUSED = (
    *("rdzv_backend", "rdzv_endpoint", "rdzv_conf", "master_port", "local_addr"),
    *("start_method", "event_log_handler"),
)
"""Options without a meaning on one host: the store is ours, on a free port, ranks are commands, not functions, and
nothing is an event of torchelastic's agent."""


def start(arguments: Sequence[str]) -> int:
    """Run ``paceline run`` with these `arguments`; return the exit code.

    Raises:
        UsageError: for a mistake in the arguments, before anything is started.
    """
    options = parse(arguments)
    nproc, note = resolve_nproc(options.nproc_per_node)
    command = rank_command(options)
    text = None if options.no_python else source(command[2:])[1]
    if passed_on := own_options_in(options.training_script_args, text):
        say(
            f"warning: {' '.join(passed_on)} after the script's name goes to the script; for paceline run, write: "
            f"paceline run {' '.join(passed_on)} … {options.training_script}"
        )
    if several_hosts(options):
        others = supervision_of(vars(options)) != Supervision()
        for name, given in (
            (OPTION, options.report is not None),
            ("--prefix-ranks", options.prefix_ranks),
            ("--min-nproc (torchrun's --nnodes MIN:MAX is for hosts)", options.min_nproc is not None),
            ("--requeue-exit-code, or --hang-timeout,", others),
        ):
            if given:
                raise UsageError(f"{name} is for jobs on one host; leave it out, or --nnodes and the rendezvous")
        from paceline.launch.multi_host import check_meeting_point, launch_hosts

        single_host(options, command, nproc)  # which refuses values that are wrong on any number of hosts
        check_meeting_point(options, int(options.nnodes.rpartition(":")[2]))
        if is_command_line():
            warn_if_untested()
        # torchrun's launcher starts ranks with this process's environment.
        os.environ.update(timeout_environment(options.timeout))
        return launch_hosts(options, command, nproc)
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
    # PYTHON_EXEC is the variable by which torchrun takes another interpreter.
    interpreter = os.environ.get("PYTHON_EXEC", sys.executable)
    if options.module:
        # Only the top-level name is looked for: to find a module inside would import its package in the launcher.
        top = script.partition(".")[0]
        if interpreter == sys.executable and PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
            raise UsageError(f"there is no module {top!r} to run; is it installed, or in this folder?")
        # Unbuffered, as torchrun starts ranks: the last prints of one that is killed are not lost.
        return [interpreter, "-u", "-m", script, *options.training_script_args]
    if not os.path.exists(script):
        near = or_near(script, glob("*.py"))
        raise UsageError(f"the script {script!r} does not exist{near}")
    return [interpreter, "-u", script, *options.training_script_args]


def own_options_in(arguments: Sequence[str], text: str | None) -> list[str]:
    """Return those of a script's `arguments` that are options of ours, unless its `text` has a word for them, too."""
    known = parser()._option_string_actions
    found: list[str] = []
    for index, word in enumerate(arguments):
        name, equals, _ = word.partition("=")
        # --help behind a script's name is meant for the script.
        if not name.startswith("--") or name == "--help" or name not in known:
            continue
        if text is None or not re.search(rf"\b{name[2:].replace('-', '[-_]')}\b", text):
            has_value = not equals and known[name].nargs is None
            found += arguments[index : index + 1 + has_value]
    return found


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
    # The port may be missing, and an IPv6 address stands in brackets.
    host = options.rdzv_endpoint.rpartition(":")[0] or options.rdzv_endpoint
    return (
        most > 1
        # A rendezvous by etcd is for hosts; c10d and static on loopback are what a single one is often started with.
        or options.rdzv_backend not in ("static", "c10d")
        or host.strip("[]") not in LOOPBACKS
        or options.master_addr.strip("[]") not in LOOPBACKS
    )


def single_host(options: Namespace, command: Sequence[str], nproc: int) -> Job:
    """Return the job that the options describe."""
    grace = options.shutdown_timeout
    if grace is None:
        name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        # torch's own variable and default, so that a job moved from torchrun ends in the same way.
        grace = _number(name, os.environ.get(name, "30"))
    only = options.local_ranks_filter
    logs = Logs(
        options.log_dir,
        options.redirects,
        options.tee,
        frozenset(_number("--local-ranks-filter", part) for part in only.split(",")) if only else frozenset(),
        # The option exists since torch 2.15.
        getattr(options, "log_line_prefix_template", "") or os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", ""),
        options.prefix_ranks,
    )
    return Job(
        command,
        nproc,
        max_restarts=options.max_restarts,
        grace=grace,
        interval=options.monitor_interval,
        # "none" is torchrun's default, which would be the same for all jobs; ours is random.
        run_id="" if options.rdzv_id == "none" or options.standalone else options.rdzv_id,
        logs=logs,
        signals=[_signal(name.strip()) for name in options.signals_to_handle.split(",")],
        env=timeout_environment(options.timeout),
        role=options.role,
        virtual_local_rank=options.virtual_local_rank,
        start_options=_start_options(options),
        report=options.report,
        supervision=supervision_of(vars(options)),
    )


def _start_options(options: Namespace) -> dict[str, Any]:
    wanted_options: dict[str, Any] = {}
    filters = {"stdout": options.duplicate_stdout_filters, "stderr": options.duplicate_stderr_filters}
    for stream, wanted in filters.items():
        if wanted and not options.log_dir:
            raise UsageError(f"--duplicate-{stream}-filters needs a folder; give one with --log-dir")
        wanted_options[f"duplicate_{stream}_filters"] = wanted or None
    if options.numa_binding:
        from torch.numa.binding import AffinityMode, NumaOptions

        wanted_options["numa_options"] = NumaOptions(affinity_mode=AffinityMode(options.numa_binding))
    return wanted_options


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
