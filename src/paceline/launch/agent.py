"""Starts the ranks of a job on this host, watches them, and restarts them if a restart may help.

torchelastic starts the processes and redirects their output. This module decides which rank failed first, whether to
restart, and how ranks are terminated. Every start uses new stores, which listen on loopback only. Signals are handled
between two polls of the ranks, never during a start. Decision 0005 explains why.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from string import Template
from typing import Any

from torch.distributed.elastic.multiprocessing import start_processes

from paceline.core.black_box import FOLDER
from paceline.core.job_directory import JobFolder
from paceline.core.messages import end_echo, say
from paceline.core.step_progress import STOP_SIGNALS
from paceline.core.stores import STORE
from paceline.core.torch_elastic import close_outputs
from paceline.errors import UsageError
from paceline.launch import root_cause
from paceline.launch.fork_client import ForkServer
from paceline.launch.hang_detection import HangWatch
from paceline.launch.job import (
    Job,
    LoopbackStores,
    black_boxes,
    child_arguments,
    fork_server,
    rank_environment,
    report_stop,
    torchrun_environment,
)
from paceline.launch.job_report import JobReport
from paceline.launch.output import PrintedLines, RankFiles
from paceline.launch.rank_processes import Ending, RankProcesses
from paceline.launch.restart_policy import Restarts
from paceline.launch.root_cause import End, LastMoments
from paceline.launch.signals import SPARE, Caught, Preemption, Stopped
from paceline.launch.verdict import Verdict

INTERRUPT_GRACE_S = 1.0  # after Ctrl-C every process must end within 2 s
FAILURE_GRACE_S = 3.0  # after a failure the other ranks must end within 5 s
_STARTING = threading.Lock()  # os.environ is shared by all threads, and jobs may start concurrently


class Agent:
    """Starts the ranks, watches them, and terminates them.

    Must run in the thread that created it, because the kernel kills ranks when the thread that started them exits.
    """

    def __init__(
        self,
        job: Job,
        files: RankFiles,
        caught: Caught,
        say: Callable[[str], None],
        restarts: Restarts,
        fork_server: ForkServer,
        boxes: JobFolder,
        report: JobReport,
    ) -> None:
        self._job = job
        self._files = files
        self._caught = caught
        self._say = say
        self._boxes = boxes
        self._restarts = restarts
        self._report = report
        self._fork_server = fork_server
        self._preemption = Preemption(boxes.path)
        self.shown: set[object] = set()
        """Tracebacks that have been printed, and ranks whose stderr the user sees; see :func:`root_cause.once`."""
        self._context: Any = None
        """torchelastic's context, which holds the processes and the threads that copy their logs."""
        self._begin()

    def _begin(self) -> None:
        """Reset the state before the ranks of the next start run."""
        self._makes_room = False  # whether ranks were signaled to save a step and exit so that more ranks can start
        self._moments = LastMoments(self._boxes)
        self._watch_processes({})
        self._hangs = HangWatch(self._boxes.path, self._job.supervision.hang_timeout)

    def _watch_processes(self, processes: Mapping[int, Any]) -> None:
        self._ranks = RankProcesses(processes, self._files.errors, self._moments.note_failure)
        self._ending = Ending(self._ranks, self._caught, self._say)

    def run(self) -> bool:
        """Run the ranks, restarting them after failures; return whether all ranks finally succeeded."""
        while True:
            stores = LoopbackStores()
            try:
                self._start(stores)
                if not self._watch():
                    return not self._ranks.failed()
            finally:
                self._close()
                stores.close()

    # start

    def _start(self, stores: LoopbackStores) -> None:
        self._fork_server.prepare(lambda: bool(self._caught.received))
        self._handle_signal()  # importing takes seconds
        self._begin()
        self._boxes.clear(range(self._boxes.note.nproc))
        self._restarts.begin()
        job, ranks, size = self._job, range(self._restarts.size), self._restarts.size
        of_job = rank_environment(job)
        of_start = {
            **self._restarts.environment(of_job),
            FOLDER: str(self._boxes.path),  # overrides the folder of an enclosing job
            STORE: stores.private,
        }
        prefixes: dict[int, str] | None = None
        if self._files.prefix:
            template = Template(self._files.prefix)
            prefixes = {
                rank: template.safe_substitute(role_name=job.role, rank=rank, local_rank=rank) for rank in ranks
            }
        with _STARTING, self._fork_server.starting(), self._files.teeing():
            # torchelastic's signal handlers may raise at any point, so give it a signal that is never sent.
            os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = SPARE.name
            self._context = start_processes(
                job.role,
                sys.executable,
                dict.fromkeys(ranks, tuple(child_arguments(job.command))),
                {rank: of_job | torchrun_environment(job, rank, size, stores.port) | of_start for rank in ranks},
                self._files,
                prefixes,
                **job.start_options,
            )
        self._watch_processes({rank: handler.proc for rank, handler in self._context.subprocess_handlers.items()})
        self.shown |= self._files.teed
        self._boxes.began(self._ranks.pids())

    # watch

    def _watch(self) -> bool:
        """Watch the ranks until all have exited; return whether to start them again."""
        while True:
            self._handle_signal()
            self._ranks.poll(self._hangs.pause(self._job.interval))
            self._hangs.check(self._ranks.pids(), self._say)
            if self._ranks.failed():
                return self._has_made_room() or self._decide()
            if not self._ranks.running():
                return self._has_made_room()  # a SystemExit in a thread does not change the exit code
            self._ranks.show_slow_errors(self._say, self.shown)
            self._make_room()

    def _decide(self) -> bool:
        """Find out why a rank failed, and terminate the other ranks; return whether to start all ranks again."""
        ranks = self._ranks
        ranks.await_cause(lambda: bool(self._caught.received))
        self._handle_signal()  # a SIGTERM to the launcher may also have reached the ranks
        self._restarts.wait_for_rescue(ranks.running, ranks.poll, self._report_failure)
        self._handle_signal()
        # Before terminating the ranks, because a rank that kept the others waiting can still report its stacks.
        self._hangs.request_absent([*ranks.reported_ends(), *ranks.ends_of_running()], ranks.pids())
        self._end_ranks(signal.SIGTERM, FAILURE_GRACE_S)
        self._handle_signal()
        ends = self.outcome()  # only now, because ranks write their records while they exit
        self._report.note_progress(*self._restarts.progress())
        self._report.failed(ends)
        # After a restart, a usage error would occur again.
        restart = None if root_cause.usage(ends) is not None else self._restarts.decide(root_cause.cause(ends))
        if self._restarts.refusal is not None:
            self._say(self._restarts.refusal)
        if restart is not None:
            details = root_cause.details(ends, self.shown)
            self._start_again("\n".join([*details, f"{root_cause.headline(ends)}; {restart}"]))
        return restart is not None

    def _start_again(self, message: str) -> None:
        self._say(message)
        self._report.restarted(self._restarts.change)

    def outcome(self) -> list[End]:
        """Return how each rank that has exited ended, with its record."""
        return self._hangs.with_hangs(self._moments.with_diagnosis(self._ranks.reported_ends()))

    # end

    def _close(self) -> None:
        """Terminate the ranks that are still running, and release the resources of this start."""
        if self._ranks.running():
            self._end_ranks(signal.SIGTERM, FAILURE_GRACE_S)
        if self._context is not None:
            self._context.close(signal.SIGKILL, 1)  # ends the threads that copy logs
            close_outputs(self._context.subprocess_handlers.values())
            self._context = None
        self._ranks.close()

    def _handle_signal(self) -> None:
        """If the launcher has received a signal, let the ranks save a step if they can, terminate them, and raise."""
        if not self._caught.received:
            return
        number = self._caught.received[0]
        if number == signal.SIGINT:
            end_echo()
        pids = self._ranks.pids().values()
        if number in STOP_SIGNALS and self._preemption.would_save(pids):
            self._say(f"{number.name}: the ranks end after this step and save it; another signal ends them at once")
            self._ranks.signalled.update(self._ranks.running())
            self._preemption.request_stop(number, pids)
            self._ending.wait(number, self._job.grace)
            if not self._ranks.failed() and self._preemption.saved() is None:
                return  # the ranks had already ended
        elif number == signal.SIGINT:
            self._end_ranks(signal.SIGTERM, INTERRUPT_GRACE_S, quiet=True)
        else:
            if number in STOP_SIGNALS and self._preemption.is_in_vain():
                self._say("nothing is saved, because the training has no checkpoint folder")
            self._ending.end(number, self._job.grace)
        saved = self._preemption.saved()
        raise Stopped(number, None if saved is None else saved[1])

    def _make_room(self) -> None:
        """If more ranks can start than are running, signal the running ranks to save a step and exit."""
        pids = self._ranks.pids().values()
        if not self._makes_room and self._restarts.can_grow() and self._preemption.are_ready(pids):
            self._makes_room = True
            self._preemption.request_stop(signal.SIGTERM, pids)

    def _has_made_room(self) -> bool:
        """If all ranks have saved a step after a signal, wait until they have exited, and then raise :class:`Stopped`.

        Returns True instead of raising if the launcher itself sent the signal; the ranks then start again.
        """
        saved = self._preemption.saved()
        if saved is None:
            return False
        self._ending.wait(saved[0], self._job.grace)
        if any(end.code not in (0, 128 + saved[0]) for end in self._ranks.ends.values()):
            return False
        if not self._makes_room:
            raise Stopped(*saved)
        self._handle_signal()
        self._report.note_progress(*self._restarts.progress())
        self._start_again(self._restarts.grow(saved[1]))
        return True

    def _end_ranks(self, number: signal.Signals, grace: float, quiet: bool = False) -> None:
        """Terminate the running ranks at once, including ranks that would otherwise complete a step first."""
        without_grace = [rank for rank, pid in self._ranks.pids().items() if self._preemption.would_save([pid])]
        self._ending.end(number, grace, without_grace, quiet)

    def _report_failure(self) -> None:
        """Signal the ranks that mark their steps, so that they check whether another rank has exited."""
        self._ranks.signalled.update(self._ranks.running())
        self._preemption.request_stop(signal.SIGTERM, self._ranks.pids().values())


def launch(job: Job) -> int:
    """Start the ranks and wait for them. Restarts and failures are reported on stderr.

    Returns:
        0 if every rank succeeded. 2 after a :class:`UsageError` or an error that the script raised before the first
        step. 130 after Ctrl-C and 128 + n after another signal n, or ``requeue_exit_code`` if the last step was saved.
        Otherwise 1.
    """
    report = JobReport(job.report, say)
    with Caught(job.signals) as caught:
        try:
            code = run(job, caught, report)
        except Stopped as stop:
            code = report_stop(stop.number, stop.saved)
            if stop.saved is not None:
                code = job.supervision.requeue_exit_code or code
        except Exception as error:
            report.end(2 if isinstance(error, UsageError) else 1)
            raise
    return report.end(code)


def run(job: Job, caught: Caught, report: JobReport | None = None) -> int:
    """Do the work of :func:`launch`, in any thread. The caller catches signals and completes the report."""
    report = report or JobReport(None, say)
    job = replace(job, run_id=job.run_id or uuid.uuid4().hex)
    with (
        PrintedLines(job.logs.prefix_ranks, lambda: bool(caught.received)) as printed,
        closing(RankFiles(job.logs, printed)) as files,
        black_boxes(job.run_id, job.command, job.nproc) as boxes,
        closing(fork_server(job, printed.say)) as server,
    ):
        restarts = Restarts(boxes.path, job.max_restarts, job.supervision.slots(job.nproc))
        agent = Agent(job, files, caught, printed.say, restarts, server, boxes, report)
        try:
            has_succeeded = agent.run()
        except Stopped as stop:  # all ranks have exited
            if raised := root_cause.raised(agent.outcome(), agent.shown):
                printed.say("\n".join(raised))
            rescued = restarts.keep_rescued(printed.say)
            raise stop if stop.saved is not None else Stopped(stop.number, rescued) from None
        finally:  # before the job's folder, with the ranks' records, is removed
            report.note_progress(*restarts.progress())
        ends = agent.outcome()
        if not has_succeeded:
            restarts.keep_rescued(printed.say)
        lost = restarts.unsaved()
        printed.end_start()  # print the ranks' last output before the messages below
        if has_succeeded:
            if lost is not None:
                printed.say(f"error: the job ended, but no step is saved in {lost}; see its first warning")
            return 0 if lost is None else 1
        mistake = root_cause.usage(ends)
        printed.say(f"error: {mistake}" if mistake is not None else root_cause.report(ends, agent.shown))
        return 2 if mistake is not None or restarts.verdict is Verdict.MISTAKE else 1
