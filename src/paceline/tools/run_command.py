"""``paceline run``: build the job that the options describe, and launch it."""

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

from paceline.core.command_line import or_near
from paceline.core.messages import say
from paceline.errors import UsageError
from paceline.launch.agent import launch
from paceline.launch.fork_client import source
from paceline.launch.job import Job, resolve_nproc, timeout_environment
from paceline.launch.job_report import OPTION
from paceline.launch.options import GRACE_S, Supervision, supervision_of
from paceline.launch.output import Logs
from paceline.tools.run_options import parse, parser

LOOPBACKS = ("", "localhost", "127.0.0.1", "::1", "0:0:0:0:0:0:0:1")


def start(arguments: Sequence[str]) -> int:
    """Run ``paceline run`` with these `arguments`; return the exit code."""
    options = parse(arguments)
    nproc, note = resolve_nproc(options.nproc_per_node)
    command = rank_command(options)
    text = None if options.no_python else source(command[2:])[1]
    if passed_on := own_options_in(options.training_script_args, text):
        say(
            f"warning: {' '.join(passed_on)} after the script's name is passed to the script; to give it to paceline "
            f"run, write: paceline run {' '.join(passed_on)} … {options.training_script}"
        )
    if several_hosts(options):
        others = supervision_of(vars(options)) != Supervision()
        for name, is_given in (
            (OPTION, options.report is not None),
            ("--prefix-ranks", options.prefix_ranks),
            ("--min-nproc (torchrun's --nnodes MIN:MAX is for hosts)", options.min_nproc is not None),
            ("--requeue-exit-code or --hang-timeout", others),
        ):
            if is_given:
                raise UsageError(f"{name} works on one host only; omit it, or omit --nnodes and the rendezvous")
        from paceline.launch.multi_host import launch_hosts

        single_host(options, command, nproc)  # refuses invalid values
        # torchrun's launcher passes this process's environment to the ranks.
        os.environ.update(timeout_environment(options.timeout))
        return launch_hosts(options, command, nproc)
    job = single_host(options, command, nproc)
    if note:
        say(note)
    return launch(job)


def rank_command(options: Namespace) -> list[str]:
    """Return the command that each rank runs, after checking that it exists."""
    script = options.training_script
    if options.run_path:
        raise UsageError("--run-path is not supported; omit it")
    if options.logs_specs:
        raise UsageError("--logs-specs is not supported; use --log-dir, --redirects and --tee")
    if options.no_python:
        if options.module:
            raise UsageError("--no-python and --module contradict each other; give one of them")
        if shutil.which(script) is None:
            raise UsageError(f"the command {script!r} does not exist or is not executable; check its name")
        return [script, *options.training_script_args]
    # torchrun uses the interpreter in PYTHON_EXEC.
    interpreter = os.environ.get("PYTHON_EXEC", sys.executable)
    if options.module:
        # Only the top-level name, because finding a submodule would import its package in the launcher.
        top = script.partition(".")[0]
        if interpreter == sys.executable and PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
            raise UsageError(f"no module named {top!r}; install it, or change to its folder")
        # Unbuffered, as with torchrun, so that the last output of a killed rank is not lost.
        return [interpreter, "-u", "-m", script, *options.training_script_args]
    if not os.path.exists(script):
        near = or_near(script, glob("*.py"))
        raise UsageError(f"the script {script!r} does not exist{near}")
    return [interpreter, "-u", script, *options.training_script_args]


def own_options_in(arguments: Sequence[str], text: str | None) -> list[str]:
    """Return the `arguments` of a script that are options of ``paceline run`` and do not appear in its `text`."""
    options = parser()._option_string_actions
    misplaced: list[str] = []
    for index, word in enumerate(arguments):
        name, equals, _ = word.partition("=")
        # --help after the script's name is for the script.
        if not name.startswith("--") or name == "--help" or name not in options:
            continue
        if text is None or not re.search(rf"\b{name[2:].replace('-', '[-_]')}\b", text):
            has_value = not equals and options[name].nargs is None
            misplaced += arguments[index : index + 1 + has_value]
    return misplaced


def several_hosts(options: Namespace) -> bool:
    """Return whether the options describe a job on several hosts."""
    try:
        low, _, high = options.nnodes.partition(":")
        minimum, maximum = int(low), int(high or low)
    except ValueError:
        raise UsageError(f"--nnodes={options.nnodes!r} is neither a number nor MIN:MAX; give one such as 2") from None
    if not 1 <= minimum <= maximum:
        raise UsageError(f"--nnodes={options.nnodes} is out of range; give MIN:MAX with 1 <= MIN <= MAX")
    if maximum == 1 and options.node_rank != 0:
        raise UsageError(f"--node-rank={options.node_rank}, but --nnodes is 1; give the number of hosts")
    if options.standalone:
        return False
    # The port is optional, and an IPv6 address is in brackets.
    host = options.rdzv_endpoint.rpartition(":")[0] or options.rdzv_endpoint
    return (
        maximum > 1
        # etcd implies several hosts; c10d and static on loopback are common on a single host.
        or options.rdzv_backend not in ("static", "c10d")
        or host.strip("[]") not in LOOPBACKS
        or options.master_addr.strip("[]") not in LOOPBACKS
    )


def single_host(options: Namespace, command: Sequence[str], nproc: int) -> Job:
    """Return the job that the options describe."""
    grace = options.shutdown_timeout
    if grace is None:
        name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        # Same variable and default as in torch, so that a job shuts down as under torchrun.
        grace = _number(name, os.environ.get(name, str(GRACE_S)))
    only = options.local_ranks_filter
    logs = Logs(
        options.log_dir,
        options.redirects,
        options.tee,
        frozenset(_number("--local-ranks-filter", part) for part in only.split(",")) if only else frozenset(),
        # The option was added in torch 2.15.
        getattr(options, "log_line_prefix_template", "") or os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", ""),
        options.prefix_ranks,
    )
    return Job(
        command,
        nproc,
        max_restarts=options.max_restarts,
        grace=grace,
        interval=options.monitor_interval,
        # torchrun's default "none" is not unique, so an empty id requests a random one.
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
            raise UsageError(f"--duplicate-{stream}-filters needs a folder for the logs; give --log-dir")
        wanted_options[f"duplicate_{stream}_filters"] = wanted or None
    if options.numa_binding:
        from torch.numa.binding import AffinityMode, NumaOptions

        wanted_options["numa_options"] = NumaOptions(affinity_mode=AffinityMode(options.numa_binding))
    return wanted_options


def _signal(name: str) -> signal.Signals:
    try:
        number = signal.Signals[name]
    except KeyError:
        raise UsageError(
            f"--signals-to-handle: {name!r} is not a signal on this system; give names such as SIGTERM"
        ) from None
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise UsageError(f"--signals-to-handle: no process can handle {name}; remove it")
    return number


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"{name}: {value!r} is not an integer; give a number such as 30") from None
