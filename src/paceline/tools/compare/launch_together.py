"""Several jobs on this host at the same time, which end together."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack

from paceline.launch.host_limits import check_files
from paceline.launch.job import Job, farewell, run
from paceline.launch.watching.signals import Caught, Stopped

LOOK_S = 0.2
"""Seconds between two calls of `look`."""


def launch_together(
    jobs: Mapping[str, Job], has_worked: Callable[[str], bool], look: Callable[[], None]
) -> tuple[int, str]:
    """Start `jobs` and wait for them; when one fails, the others are ended.

    Args:
        jobs: by their names.
        has_worked: returns whether the job of a name did its work, given that its ranks ended without an error.
        look: called from time to time.

    Returns:
        The exit code as of :func:`~paceline.launch.job.launch`, and the name of the job that failed first, if one did.
    """
    for job in jobs.values():
        check_files(job.nproc)
    # torchelastic warns in threads that ranks may outlive their launcher; ours are tied to it.
    torchelastic = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    torchelastic.addFilter(lambda record: "running on a child thread" not in str(record.msg))
    failed: list[tuple[int, str]] = []

    def run_into(future: Future[int], job: Job) -> None:
        try:
            future.set_result(run(job, caught))
        except BaseException as error:  # a thread would print it and go on
            future.set_exception(error)

    with Caught() as caught, ExitStack() as ends:
        running = {Future[int](): name for name in jobs}
        # A thread for each job, because torchelastic waits for a job in its caller. (Not of a pool, whose threads a
        # forked rank would join.)
        for future, name in running.items():
            thread = threading.Thread(target=run_into, args=(future, jobs[name]))
            thread.start()
            ends.callback(thread.join)  # also after an error, so that signals are caught until all jobs have ended
        while running:
            for ended in wait(running, LOOK_S, FIRST_COMPLETED).done:
                name = running.pop(ended)
                if isinstance(ended.exception(), Stopped):  # another job failed, or the user pressed Ctrl-C
                    continue
                if ended.exception() or ended.result() or not has_worked(name):
                    caught.received.append(signal.SIGINT)  # ends the other jobs, as if the user had
                    failed.append((ended.result() or 1, name))
            look()
    if failed:
        return failed[0]
    return (farewell(caught.received[0]) if caught.received else 0), ""
