"""Hands jobs on several hosts over to torchrun's launcher.

The ranks, restarts and the failure report are torchrun's, except that ranks exit when the launcher does. As with
torchrun, the rendezvous listens on all interfaces, without authentication.
"""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence

from torch.distributed import DistError

from paceline.core.black_box import FOLDER
from paceline.core.host import cores
from paceline.core.messages import say
from paceline.core.missing_ranks import reason_of
from paceline.core.step_progress import ECHO_S
from paceline.core.torch_elastic import ignore_echoes, leave_together
from paceline.errors import UsageError
from paceline.launch.failure_record import LAUNCHER
from paceline.launch.job import child_arguments, report_stop, title_of


def launch_hosts(options: Namespace, command: Sequence[str], nproc: int) -> int:
    """Run this host's part of a job that spans several hosts.

    Args:
        options: torchrun's parsed options.
        command: the command of each rank.
        nproc: number of ranks on this host.

    Returns:
        0 if the ranks succeeded, 1 if they failed, and 128 + n after signal n.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import run

    _check_meeting_point(options)
    _prepare_environment(nproc)
    ignore_echoes(ECHO_S)
    leave_together(10)
    with tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True) as temporary:
        options.log_dir = options.log_dir or temporary
        options.max_restarts = options.max_restarts or 0  # torchrun's default
        options.nproc_per_node, options.no_python, options.module = str(nproc), True, False
        # torchelastic substitutes ${local_rank} in the arguments.
        escaped = [argument.replace("$", "$$") for argument in child_arguments(command)]
        options.training_script, options.training_script_args = sys.executable, escaped
        try:
            run(options)
        except ChildFailedError as error:
            for failure in error.failures.values() if options.log_dir == temporary else ():
                failure.error_file = "<N/A>"  # torch's name for none: the folder is about to be removed
            say(str(ChildFailedError(title_of(command), error.failures)))
            return 1
        except (RendezvousError, DistError) as error:
            meeting_point = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
            say(
                f"error: the hosts could not meet at {meeting_point} ({reason_of(error.__cause__ or error)}); check "
                "that the launcher on that host runs, that this host can reach the address, and that all have the same "
                "--nnodes and --rdzv-id"
            )
            return 1
        except ValueError as error:
            if type(error) is not ValueError:  # not about an option, such as a JSONDecodeError
                raise
            reason = " ".join(str(error).split())
            raise UsageError(f"torchrun's launcher refuses these options: {reason}; correct them") from None
        except SignalException as stop:
            return report_stop(stop.sigval)
    return 0


def _prepare_environment(nproc: int) -> None:
    """Set the variables that ranks inherit from this process."""
    # With a shared store, restarted ranks read the addresses of dead ranks, which makes half of all restarts fail.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // nproc)))
    # The launcher of an enclosing job does not watch these ranks.
    for name in (LAUNCHER, FOLDER):
        os.environ.pop(name, None)


def _check_meeting_point(options: Namespace) -> None:
    """Check that with these options the launchers can find each other."""
    is_static = options.rdzv_backend == "static"
    hosts = int(options.nnodes.rpartition(":")[2])
    if is_static and not 0 <= options.node_rank < hosts:
        raise UsageError(
            f"--node-rank={options.node_rank} is not in 0..{hosts - 1} (--nnodes={options.nnodes}); give each host a "
            "different number, and 0 to the first"
        )
    if not options.rdzv_endpoint and not (is_static and options.master_addr):
        remedy = "--master-addr FIRST_HOST and --node-rank N" if is_static else "--rdzv-endpoint FIRST_HOST:PORT"
        raise UsageError(
            f"--nnodes={options.nnodes} does not say where the hosts meet; give {remedy} on each of them (127.0.0.1 if "
            "all launchers are on this one)"
        )
