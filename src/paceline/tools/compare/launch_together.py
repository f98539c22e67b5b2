"""Several jobs on this host that run at the same time and end together."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack

from paceline.launch.agent import run
from paceline.launch.job import Job, farewell
from paceline.launch.watching.signals import Caught, Stopped


def launch_together(jobs: Mapping[str, Job], has_worked: Callable[[str], bool]) -> tuple[int, str]:
    """Start `jobs` and wait for them. If one fails, stop the others.

    Args:
        jobs: the jobs, by name.
        has_worked: returns whether the job with this name did its work; called only if its ranks ended without errors.

    Returns:
        The exit code as from :func:`~paceline.launch.agent.launch`, and the name of the first job to fail, if any.
    """
    # In a thread, torchelastic warns that ranks may outlive their launcher, but Paceline's are tied to it.
    torchelastic = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    torchelastic.addFilter(lambda record: "running on a child thread" not in str(record.msg))
    failed: list[tuple[int, str]] = []

    def run_into(future: Future[int], job: Job) -> None:
        try:
            future.set_result(run(job, caught))
        except BaseException as error:
            future.set_exception(error)

    with Caught() as caught, ExitStack() as ends:
        running = {Future[int](): name for name in jobs}
        # Use a thread per job, because torchelastic blocks its caller. Do not use a thread pool, because a forked rank
        # would try to join the threads of the pool.
        for future, name in running.items():
            thread = threading.Thread(target=run_into, args=(future, jobs[name]))
            thread.start()
            ends.callback(thread.join)  # even after an error, so that signals are caught until all jobs have ended
        while running:
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                name = running.pop(ended)
                if isinstance(ended.exception(), Stopped):  # another job failed, or the user pressed Ctrl-C
                    continue
                if ended.exception() or ended.result() or not has_worked(name):
                    caught.received.append(signal.SIGINT)  # stops the other jobs like a Ctrl-C
                    failed.append((ended.result() or 1, name))
    if failed:
        return failed[0]
    return (farewell(caught.received[0]) if caught.received else 0), ""
