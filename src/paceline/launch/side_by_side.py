"""Several jobs on this host at the same time, which end together."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from paceline.launch.job import Job, farewell, run
from paceline.launch.signals import Caught, Stopped


def launch_side_by_side(jobs: Mapping[str, Job], has_worked: Callable[[str], bool]) -> tuple[int, str]:
    """Start `jobs` and wait for them; when one fails, the others are ended.

    Args:
        jobs: by their names.
        has_worked: tells of a job whose ranks ended without an error whether it did what it was started for.

    Returns:
        The exit code as of :func:`~paceline.launch.job.launch`, and the name of the job that failed first, if one did.
    """
    failed: list[tuple[int, str]] = []
    # In threads torchelastic warns of ranks that outlive their launcher. Ours are tied to it.
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    logger.addFilter(_is_of_interest)

    def run_one(name: str) -> None:
        try:
            code = run(jobs[name], caught)
        except Stopped:
            return
        except BaseException:
            caught.received.append(signal.SIGINT)
            raise
        if code or not has_worked(name):
            failed.append((code or 1, name))
            caught.received.append(signal.SIGINT)  # to the other jobs, as if the user had ended them

    try:
        with Caught() as caught, ThreadPoolExecutor(len(jobs)) as threads:
            for end in [threads.submit(run_one, name) for name in jobs]:
                end.result()
    finally:
        logger.removeFilter(_is_of_interest)
    if failed:
        return failed[0]
    return (farewell(caught.received[0]) if caught.received else 0), ""


def _is_of_interest(record: logging.LogRecord) -> bool:
    return "running on a child thread" not in record.msg
