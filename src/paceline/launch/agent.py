"""torchelastic's agent for one host, with a loopback store per start, and failures ordered by cause.

torchelastic provides the environment of the ranks, their processes, logs and restarts. These things differ here:
every (re)start gets its own store, which listens on loopback only; ranks end with the launcher; failures
are ordered by cause; and signals are handled between two polls of the ranks, never in the middle of a start.

Decision 0005 says why.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline.core.output.messages import end_echo
from paceline.core.processes.private_store import STORE
from paceline.core.telemetry.flight_record import FOLDER
from paceline.core.telemetry.job_directory import JobFolder
from paceline.core.telemetry.step_progress import STOP_SIGNALS
from paceline.launch.failures import root_cause
from paceline.launch.failures.exit_diagnosis import LastMoments
from paceline.launch.failures.job_report import JobReport
from paceline.launch.failures.root_cause import End
from paceline.launch.failures.slow_errors import SlowErrors
from paceline.launch.fork_server.client import ForkServer
from paceline.launch.rank import failure_record as record
from paceline.launch.rank.channels import RankFiles
from paceline.launch.rendezvous.loopback import LoopbackRendezvous
from paceline.launch.restart_policy import Restarts
from paceline.launch.watching.hang_detection import HangWatch
from paceline.launch.watching.preemption import Preemption
from paceline.launch.watching.signals import SPARE, Caught, Stopped
from paceline.launch.watching.termination import Ending

INTERRUPT_GRACE_S = 1.0  # after Ctrl-C everything must be gone within 2 s
FAILURE_GRACE_S = 3.0  # after a failure the others must be gone within 5 s
_STARTING = threading.Lock()  # os.environ is shared by all threads, and jobs may start concurrently


class Agent(LocalElasticAgent):
    """Starts the ranks, watches them, ends them.

    Single host, so that a rank's local and global numbers agree. Must run in the thread that created it: the
    kernel ends ranks when the thread that started them ends.
    """

    #: how the ranks of the present life ended, by rank; filled as they end
    ends: dict[int, End]

    def __init__(
        self,
        spec: WorkerSpec,
        files: RankFiles,
        caught: Caught,
        environment: Mapping[str, str],
        say: Callable[[str], None],
        restarts: Restarts,
        hangs: HangWatch,
        boxes: JobFolder | None = None,
        report: JobReport | None = None,
    ) -> None:
        super().__init__(spec, files, log_line_prefix_template=files.prefix)
        self.ends = {}
        self.grace = 30.0
        self.interval = 0.1
        self.fork_server: ForkServer | None = None  # None: every rank is a new interpreter
        self._files = files
        self._caught = caught
        self._environment = environment
        self._say = say
        self._boxes = boxes
        self._restarts = restarts
        self._report = report
        self._moments = LastMoments(boxes)
        self._hangs = hangs
        self._preemption = Preemption(None if boxes is None else boxes.path)
        self._ending = Ending(self._handlers, self._running, self._poll, caught, say)
        self._watched: dict[int, int] = {}  # rank -> pidfd, readable when the rank has ended
        self._signalled: set[int] = set()  # ranks that the launcher itself told to end
        self._slow = SlowErrors(say)  # of the present life
        self._makes_room = False  # ranks were told to save a step and end, so that more of them can be started

    # start

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._close_watched()
        if self.fork_server is not None:
            self.fork_server.prepare(lambda: bool(self._caught.received))
            self._obey()  # importing takes seconds
        self.ends, self._signalled, self._makes_room = {}, set(), False
        self._slow = SlowErrors(self._say)
        self._moments.begin()
        self._restarts.begin()
        self._hangs.begin()
        # torchelastic's handlers raise wherever they interrupt; SPARE, which is never sent, keeps them away.
        name = "TORCHELASTIC_SIGNALS_TO_HANDLE"
        with _STARTING:
            before = os.environ.get(name)
            os.environ[name] = SPARE.name
            try:
                with self.fork_server.starting() if self.fork_server is not None else nullcontext():
                    pids: dict[int, Any] = super()._start_workers(worker_group)
            finally:
                if before is None:
                    del os.environ[name]
                else:
                    os.environ[name] = before
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):  # an old kernel: the ranks are polled instead
                for rank, pid in pids.items():
                    self._watched[rank] = os.pidfd_open(pid)
        if self._boxes is not None:
            self._boxes.began(pids)
        return pids

    def _set_local_rank_env(self, worker_env: dict[str, str | None], local_rank: int, spec: WorkerSpec) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        for name, value in self._environment.items():
            worker_env.setdefault(name, value)
        worker_env.update(self._restarts.environment(self._environment))
        worker_env[FOLDER] = str(self._boxes.path) if self._boxes is not None else ""  # not an enclosing job's
        worker_env[STORE] = cast(LoopbackRendezvous, spec.rdzv_handler).private

    def _construct_event(self, state: str, source: EventSource, *arguments: Any, **options: Any) -> Event:
        """Return an event without the host's full name, because looking that up can block for seconds."""
        return Event(f"torchelastic.worker.status.{state}", source=source)

    # watch

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._obey()
        self._poll(self._hangs.pause(self.interval))
        self._hangs.check(self._pids(), self._say)
        size = worker_group.spec.local_world_size
        if self._check_stop():
            return RunResult(state=WorkerState.FAILED)
        if not any(end.code for end in self.ends.values()):
            if len(self.ends) < size:
                self._slow.show({rank: self._files.errors[rank] for rank in self._running()})
                self._make_room()
                return RunResult(state=WorkerState.HEALTHY)
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(range(size)))
        self._await_more_failures()
        self._obey()  # a SIGTERM to the launcher may also have gone to the ranks
        self._restarts.wait_for_rescue(self._running, self._poll, self._report_failure)
        self._obey()
        # While they still run: a rank that kept the others waiting can tell where it is only before it is ended.
        self._hangs.request_absent([*self._recorded_ends(), *self._ends_of_running()], self._pids())
        self._end_ranks(signal.SIGTERM, FAILURE_GRACE_S)
        self._obey()
        ends = self.outcome()  # only now, because ranks write their records while they end
        if self._report is not None:
            self._report.note_progress(*self._restarts.progress())
            self._report.failed(ends)
        # A user's mistake would happen again.
        restart = None if root_cause.usage(ends) is not None else self._restarts.decide(root_cause.cause(ends))
        self._remaining_restarts = 0
        if self._restarts.refusal is not None:
            self._say(self._restarts.refusal)
        if restart is not None:
            self._start_again("\n".join([*root_cause.details(ends), f"{root_cause.headline(ends)}; {restart}"]))
        return RunResult(
            state=WorkerState.FAILED,
            failures={end.rank: ProcessFailure(end.rank, 0, end.code, "") for end in root_cause.failures(ends)},
        )

    def _start_again(self, message: str) -> None:
        """Have torchelastic start the ranks again, as many as there is room for; the `message` says so."""
        self._remaining_restarts = 1  # torchelastic restarts if this is positive
        self.get_worker_group().spec.local_world_size = self._restarts.size
        self._say(message)
        if self._report is not None:
            self._report.restarted(self._restarts.change)

    def outcome(self) -> list[End]:
        """Return how each rank that has ended did so, with the record that it left."""
        return self._hangs.with_hangs(self._moments.with_diagnosis(self._recorded_ends()))

    def _recorded_ends(self) -> list[End]:
        return [self._with_record(end) for end in self.ends.values()]

    def _with_record(self, end: End) -> End:
        path = self._files.errors[end.rank]
        return replace(end, record=record.read(path), leaving=record.read_leaving(path))

    def _poll(self, timeout: float) -> None:
        """Note which ranks have ended; wait up to `timeout` seconds for the next one."""
        running = self._running()
        if all(rank in self._watched for rank in running):
            wait([self._watched[rank] for rank in running], timeout)
        else:
            time.sleep(min(timeout, 0.05))
        for rank in running:
            code = self._handlers()[rank].proc.poll()
            if code is not None:
                self.ends[rank] = End(rank, code, time.time(), rank in self._signalled)
                if code != 0:
                    self._moments.note_failure()

    def _await_more_failures(self) -> None:
        """Wait while more ranks may fail: those that fail together, or the cause if only consequences have shown."""
        begin = time.monotonic()
        while self._running() and not self._caught.received:
            # The records of running ranks count as well: they may need long to end, or never end.
            running = self._ends_of_running()
            told = self._recorded_ends()
            if root_cause.usage([*told, *running]) is not None:
                return
            if time.monotonic() - begin > root_cause.patience(told, running):
                return
            self._poll(0.02)

    def _ends_of_running(self) -> list[End]:
        """Return the ends of ranks that still run, as if the launcher had ended them."""
        return [self._with_record(End(rank, 1, time.time(), stopped=True)) for rank in self._running()]

    def _running(self) -> list[int]:
        return [rank for rank in self._handlers() if rank not in self.ends]

    def _handlers(self) -> dict[int, Any]:
        return self._pcontext.subprocess_handlers if self._pcontext is not None else {}  # type: ignore[attr-defined]

    # end

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end_ranks(signal.SIGTERM, FAILURE_GRACE_S)
        if self._pcontext is not None:
            # Its ranks are gone; this ends the threads that copy their output.
            self._pcontext.close(signal.SIGKILL, 1)
        self._close_watched()

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
            if not any(end.code for end in self.ends.values()):
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

    def _check_stop(self) -> bool:
        """If ranks were told to end, and all have agreed on a step and saved it, let them end, and end the launcher.

        Returns whether they have ended to be started again, because the launcher told them.
        """
        saved = self._preemption.saved() if self._failed() else None
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

    def _failed(self) -> list[int]:
        return [rank for rank, end in self.ends.items() if end.code != 0]

    def _pids(self) -> dict[int, int]:
        """Return the processes of the ranks that run."""
        return {rank: self._handlers()[rank].proc.pid for rank in self._running()}

    def _close_watched(self) -> None:
        for descriptor in self._watched.values():
            os.close(descriptor)
        self._watched = {}
