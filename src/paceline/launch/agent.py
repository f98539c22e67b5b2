"""Starts the ranks of a job on this host, watches them, and starts them again if that may help.

torchelastic opens the processes and redirects their output. Which rank failed first, whether ranks start again and how
they end is decided here. Each start has its own stores, which listen on loopback only. Signals are handled between
two polls of the ranks, never in the middle of a start.

Decision 0005 says why.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from string import Template
from typing import Any

from torch.distributed.elastic.multiprocessing import start_processes

from paceline.core.output.messages import end_echo
from paceline.core.processes.private_store import STORE
from paceline.core.telemetry.flight_record import FOLDER
from paceline.core.telemetry.job_directory import JobFolder
from paceline.core.telemetry.step_progress import STOP_SIGNALS
from paceline.core.torch_internals.distributed.elastic import close_outputs
from paceline.errors import UsageError
from paceline.launch.failures import root_cause
from paceline.launch.failures.exit_diagnosis import LastMoments
from paceline.launch.failures.job_report import JobReport
from paceline.launch.failures.reported_errors import SlowErrors, await_cause, with_report
from paceline.launch.failures.root_cause import End
from paceline.launch.fork_server.client import ForkServer
from paceline.launch.loopback import LOOPBACK, LoopbackStores
from paceline.launch.rank.channels import RankFiles
from paceline.launch.restart_policy import Restarts
from paceline.launch.watching.hang_detection import HangWatch
from paceline.launch.watching.preemption import Preemption
from paceline.launch.watching.signals import SPARE, Caught, Stopped
from paceline.launch.watching.termination import Ending

INTERRUPT_GRACE_S = 1.0  # after Ctrl-C everything must be gone within 2 s
FAILURE_GRACE_S = 3.0  # after a failure the others must be gone within 5 s
_STARTING = threading.Lock()  # os.environ is shared by all threads, and jobs may start concurrently


@dataclass(frozen=True)
class RankProgram:
    """What each rank runs, and how: fields of :class:`paceline.launch.job.Job`."""

    command: Sequence[str]
    """The program and its arguments."""
    environment: Mapping[str, str]
    """Variables of all ranks, beside torchrun's."""
    run_id: str
    max_restarts: int
    role: str = "default"
    virtual_local_rank: bool = False
    start_options: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of torchelastic's ``start_processes``."""

    def environment_of(self, rank: int, size: int, port: int) -> dict[str, str]:
        """Return the environment of a rank by torchrun's contract, and by the settings of the job."""
        variables = {
            **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(size)),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": self.role,
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": str(True),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        if self.virtual_local_rank:  # each rank sees its own GPU alone
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            gpus = list(map(str, range(size))) if visible is None else visible.split(",")
            if len(gpus) < size:
                raise UsageError(f"--virtual-local-rank: {size} ranks, but CUDA_VISIBLE_DEVICES={visible}; start fewer")
            variables |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": gpus[rank].strip()}
        return {**self.environment, **variables}


class Agent:
    """Starts the ranks, watches them, ends them.

    Must run in the thread that created it: the kernel ends ranks when the thread that started them ends.
    """

    def __init__(
        self,
        program: RankProgram,
        files: RankFiles,
        caught: Caught,
        say: Callable[[str], None],
        restarts: Restarts,
        hangs: HangWatch,
        fork_server: ForkServer,
        boxes: JobFolder | None = None,
        report: JobReport | None = None,
    ) -> None:
        self.ends: dict[int, End] = {}
        """How the ranks of the present start ended, by rank; filled as they end."""
        self.grace = 30.0
        self.interval = 0.1
        self._program = program
        self._files = files
        self._caught = caught
        self._say = say
        self._boxes = boxes
        self._restarts = restarts
        self._report = report
        self._moments = LastMoments(boxes)
        self._hangs = hangs
        self._fork_server = fork_server
        self._preemption = Preemption(None if boxes is None else boxes.path)
        self._ending = Ending(self._all_pids, self._running, self._poll, caught, say)
        self._context: Any = None
        """torchelastic's: the processes, and the threads that copy their logs."""
        self._processes: dict[int, Any] = {}
        """The ranks' processes, as ``Popen`` or as forked ranks."""
        self._watched: dict[int, int] = {}  # rank -> pidfd, readable when the rank has ended
        self._signalled: set[int] = set()  # ranks that the launcher itself told to end
        self._slow = SlowErrors(say)  # of the present start
        self._makes_room = False  # ranks were told to save a step and end, so that more of them can be started

    def run(self) -> bool:
        """Run the ranks, again as long as that may help; return whether all have succeeded in the end."""
        while True:
            stores = LoopbackStores()
            try:
                self._start(stores)
                if not self._watch():
                    return not self._failed()
            finally:
                self._close()
                stores.close()

    # start

    def _start(self, stores: LoopbackStores) -> None:
        self._fork_server.prepare(lambda: bool(self._caught.received))
        self._obey()  # importing takes seconds
        self.ends, self._processes, self._signalled, self._makes_room = {}, {}, set(), False
        self._slow = SlowErrors(self._say)
        self._moments.begin()
        self._restarts.begin()
        self._hangs.begin()
        program, ranks, size = self._program, range(self._restarts.size), self._restarts.size
        of_start = {
            **self._restarts.environment(program.environment),
            FOLDER: "" if self._boxes is None else str(self._boxes.path),  # not an enclosing job's
            STORE: stores.private,
        }
        prefixes: dict[int, str] | None = None
        if self._files.prefix:
            words = Template(self._files.prefix)
            prefixes = {
                rank: words.safe_substitute(role_name=program.role, rank=rank, local_rank=rank) for rank in ranks
            }
        with _STARTING, self._fork_server.starting():
            # torchelastic's handlers raise wherever they interrupt; this signal is never sent.
            os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = SPARE.name
            self._context = start_processes(
                program.role,
                program.command[0],
                dict.fromkeys(ranks, tuple(program.command[1:])),
                {rank: program.environment_of(rank, size, stores.port) | of_start for rank in ranks},
                self._files,
                prefixes,
                **program.start_options,
            )
        self._processes = {rank: handler.proc for rank, handler in self._context.subprocess_handlers.items()}
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):  # an old kernel: the ranks are polled instead
                for rank, process in self._processes.items():
                    self._watched[rank] = os.pidfd_open(process.pid)
        if self._boxes is not None:
            self._boxes.began(self._pids())

    # watch

    def _watch(self) -> bool:
        """Watch the ranks until all have ended; return whether they are to be started again."""
        while True:
            self._obey()
            self._poll(self._hangs.pause(self.interval))
            self._hangs.check(self._pids(), self._say)
            if self._failed():
                return self._has_made_room() or self._decide()
            if not self._running():
                return False
            self._slow.show({rank: self._files.errors[rank] for rank in self._running()})
            self._make_room()

    def _decide(self) -> bool:
        """Find out why a rank has failed, and end the others; return whether all are to be started again."""
        await_cause(self._reported_ends, self._ends_of_running, lambda: self._poll(0.02))
        self._obey()  # a SIGTERM to the launcher may also have gone to the ranks
        self._restarts.wait_for_rescue(self._running, self._poll, self._report_failure)
        self._obey()
        # While they still run: a rank that kept the others waiting can tell where it is only before it is ended.
        self._hangs.request_absent([*self._reported_ends(), *self._ends_of_running()], self._pids())
        self._end_ranks(signal.SIGTERM, FAILURE_GRACE_S)
        self._obey()
        ends = self.outcome()  # only now, because ranks write their records while they end
        if self._report is not None:
            self._report.note_progress(*self._restarts.progress())
            self._report.failed(ends)
        # A user's mistake would happen again.
        restart = None if root_cause.usage(ends) is not None else self._restarts.decide(root_cause.cause(ends))
        if self._restarts.refusal is not None:
            self._say(self._restarts.refusal)
        if restart is not None:
            self._start_again("\n".join([*root_cause.details(ends), f"{root_cause.headline(ends)}; {restart}"]))
        return restart is not None

    def _start_again(self, message: str) -> None:
        self._say(message)
        if self._report is not None:
            self._report.restarted(self._restarts.change)

    def outcome(self) -> list[End]:
        """Return how each rank that has ended did so, with the record that it left."""
        return self._hangs.with_hangs(self._moments.with_diagnosis(self._reported_ends()))

    def _reported_ends(self) -> list[End]:
        return [with_report(end, self._files.errors[end.rank]) for end in self.ends.values()]

    def _ends_of_running(self) -> list[End]:
        """Return the ends of ranks that still run, as if the launcher had ended them; none once it was told to end."""
        if self._caught.received:
            return []
        ends = [End(rank, 1, time.time(), stopped=True) for rank in self._running()]
        return [with_report(end, self._files.errors[end.rank]) for end in ends]

    def _poll(self, timeout: float) -> None:
        """Note which ranks have ended; wait up to `timeout` seconds for the next one."""
        running = self._running()
        if all(rank in self._watched for rank in running):
            wait([self._watched[rank] for rank in running], timeout)
        else:
            time.sleep(min(timeout, 0.05))
        for rank in running:
            code = self._processes[rank].poll()
            if code is not None:
                self.ends[rank] = End(rank, code, time.time(), rank in self._signalled)
                if code != 0:
                    self._moments.note_failure()

    def _running(self) -> list[int]:
        return [rank for rank in self._processes if rank not in self.ends]

    def _failed(self) -> list[int]:
        return [rank for rank, end in self.ends.items() if end.code != 0]

    def _pids(self) -> dict[int, int]:
        """Return the processes of the ranks that run."""
        return {rank: self._processes[rank].pid for rank in self._running()}

    def _all_pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    # end

    def _close(self) -> None:
        """End the ranks of this start that still run, and release what belongs to it."""
        if self._running():
            self._end_ranks(signal.SIGTERM, FAILURE_GRACE_S)
        if self._context is not None:
            self._context.close(signal.SIGKILL, 1)  # ends the threads that copy the ranks' logs
            close_outputs(self._context.subprocess_handlers.values())
            self._context = None
        for descriptor in self._watched.values():
            os.close(descriptor)
        self._watched = {}

    def _obey(self) -> None:
        """If the launcher was told to end, end the ranks, after their step if they save it, and then the launcher."""
        if not self._caught.received:
            return
        number = self._caught.received[0]
        if number == signal.SIGINT:
            end_echo()
        if number in STOP_SIGNALS and self._preemption.would_save(self._pids().values()):
            self._say(f"{number.name}: the ranks end after this step and save it; another signal ends them at once")
            self._signalled.update(self._running())
            self._preemption.request_stop(number, self._pids().values())
            self._ending.wait(number, self.grace)
            if not self._failed():
                return  # the ranks had already ended
        elif number == signal.SIGINT:
            self._end_ranks(signal.SIGTERM, INTERRUPT_GRACE_S, quiet=True)
        else:
            if number in STOP_SIGNALS and self._preemption.is_in_vain():
                self._say("nothing is saved, as the training has no checkpoint folder")
            self._signalled.update(self._running())
            self._ending.end(number, self.grace, self._failed(), (), quiet=False)
        saved = self._preemption.saved()
        raise Stopped(number, None if saved is None else saved[1])

    def _make_room(self) -> None:
        """Once more ranks can be started than are running, tell these to save a step and end."""
        pids = self._pids().values()
        if not self._makes_room and self._restarts.can_grow() and self._preemption.are_ready(pids):
            self._makes_room = True
            self._preemption.request_stop(signal.SIGTERM, pids)

    def _has_made_room(self) -> bool:
        """If ranks were told to end, and all have agreed on a step and saved it, let them end, and end the launcher.

        Returns whether they have ended to be started again, because the launcher told them.
        """
        saved = self._preemption.saved()
        if saved is None:
            return False
        self._ending.wait(saved[0], self.grace)
        if any(end.code not in (0, 128 + saved[0]) for end in self.ends.values()):
            return False
        if not self._makes_room:
            raise Stopped(*saved)
        self._obey()
        if self._report is not None:
            self._report.note_progress(*self._restarts.progress())
        self._start_again(self._restarts.grow(saved[1]))
        return True

    def _end_ranks(self, number: signal.Signals, grace: float, quiet: bool = False) -> None:
        """End the ranks that still run at once, including those that would end after a step."""
        self._signalled.update(self._running())
        heedless = [rank for rank, pid in self._pids().items() if self._preemption.would_save([pid])]
        self._ending.end(number, grace, self._failed(), heedless, quiet)

    def _report_failure(self) -> None:
        """Signal ranks that mark their steps, so that they check whether another rank is gone."""
        self._signalled.update(self._running())
        self._preemption.request_stop(signal.SIGTERM, self._pids().values())
