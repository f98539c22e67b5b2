"""Launches jobs on several hosts with torchrun's launcher, except that ranks exit when the launcher does.

Tested with two network namespaces on one machine, and with two launchers on one host; ``docs/gpu-status.md`` lists the
tests on GPUs. As with torchrun, the rendezvous listens on all interfaces, without authentication.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from torch.distributed import DistError

from paceline.core.output.messages import say
from paceline.core.processes.missing_ranks import reason_of
from paceline.core.telemetry.flight_record import FOLDER
from paceline.core.torch_internals.distributed.elastic import making_agents_with
from paceline.errors import UsageError
from paceline.launch.failures import root_cause
from paceline.launch.host_limits import cores
from paceline.launch.job import black_boxes, escaped, farewell, hooked, tied
from paceline.launch.multi_host.host_agent import HostAgent
from paceline.launch.rank.failure_record import LAUNCHER


def launch_hosts(options: Namespace, command: Sequence[str], nproc: int) -> int:
    """Run this host's part of a job that spans several hosts.

    Args:
        options: torchrun's parsed options.
        command: the command of each rank.
        nproc: number of ranks on this host.

    Returns:
        The exit code of :func:`paceline.launch.job.launch`.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import run

    _prepare_environment(nproc)
    boxes = black_boxes(options.rdzv_id, command, nproc)
    os.environ[FOLDER] = str(boxes.path) if boxes is not None else ""
    temporary = None if options.log_dir else tempfile.mkdtemp(prefix="paceline-")
    options.log_dir = options.log_dir or temporary
    options.max_restarts = options.max_restarts or 0  # torchrun's default
    options.nproc_per_node, options.no_python, options.module = str(nproc), True, False
    options.training_script, options.training_script_args = sys.executable, escaped(tied(command))
    agents: list[HostAgent] = []

    def make_agent(**arguments: Any) -> HostAgent:
        agents.append(HostAgent(**arguments))
        return agents[-1]

    try:
        with making_agents_with(make_agent):
            run(options)
        return 0
    except ChildFailedError:
        mistake = root_cause.usage(agents[-1].ends)
        say(f"error: {mistake}" if mistake is not None else agents[-1].report())
        return 1 if mistake is None else 2
    except (RendezvousError, DistError) as error:
        meeting = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
        say(
            f"error: the hosts could not meet at {meeting} ({reason_of(error.__cause__ or error)}); check that the "
            "launcher on that host runs, that this host can reach the address, and that all have the same --nnodes and "
            "--rdzv-id"
        )
        return 1
    except ValueError as error:
        if agents:
            raise
        raise _refusal(error) from None  # torch checks its options before it makes the agent
    except SignalException as stop:
        return farewell(stop.sigval)
    finally:
        if boxes is not None:
            boxes.remove()
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)


def _prepare_environment(nproc: int) -> None:
    """Set the variables that ranks inherit from this process."""
    # With a shared store, restarted ranks read the addresses of dead ranks, which makes half of all restarts fail.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // nproc)))
    os.environ["PYTHONPATH"] = hooked(os.environ.get("PYTHONPATH", ""))
    os.environ[LAUNCHER] = str(os.getpid())


def _refusal(error: ValueError) -> UsageError:
    reason = " ".join(str(error).split())
    return UsageError(f"the rendezvous cannot be made: {reason}; check --rdzv-backend, --rdzv-endpoint and --rdzv-conf")
