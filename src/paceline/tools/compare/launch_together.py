"""Several jobs on this host at the same time, which end together."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from paceline.launch.host_limits import check_files
from paceline.launch.job import Job, farewell, run
from paceline.launch.watching.signals import Caught, Stopped


def launch_together(jobs: Mapping[str, Job], has_worked: Callable[[str], bool]) -> tuple[int, str]:
    """Start `jobs` and wait for them; when one fails, the others are ended.

    Args:
        jobs: by their names.
        has_worked: returns whether the job of a name did its work, given that its ranks ended without an error.

    Returns:
        The exit code as of :func:`~paceline.launch.job.launch`, and the name of the job that failed first, if one did.
    """
    for job in jobs.values():
        check_files(job.nproc)
    failed: list[tuple[int, str]] = []
    errors: list[BaseException] = []

    def run_one(name: str) -> None:
        try:
            code = run(jobs[name], caught)
            if code == 0 and has_worked(name):
                return
            failed.append((code or 1, name))
        except Stopped:  # another job failed, or the user pressed Ctrl-C
            return
        except BaseException as error:  # a thread would print it and go on; it is raised below
            errors.append(error)
        caught.received.append(signal.SIGINT)  # ends the other jobs, as if the user had

    with _quiet_torchelastic(), Caught() as caught:
        # A thread for each job, because torchelastic waits for a job in its caller.
        threads = [threading.Thread(target=run_one, args=(name,)) for name in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    if failed:
        return failed[0]
    return (farewell(caught.received[0]) if caught.received else 0), ""


@contextmanager
def _quiet_torchelastic() -> Iterator[None]:
    """Keep torchelastic from warning in threads that ranks may outlive their launcher: ours are tied to it."""
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    logger.addFilter(_is_of_interest)
    try:
        yield
    finally:
        logger.removeFilter(_is_of_interest)


def _is_of_interest(record: logging.LogRecord) -> bool:
    return "running on a child thread" not in str(record.msg)
