"""``paceline compare``: runs variants of a program in turns, and prints their results side by side."""

from __future__ import annotations

import json
import logging
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from paceline.core.host import cores
from paceline.core.messages import counted, say
from paceline.core.option_rules import whole_number
from paceline.core.output_files import check_file, write_file
from paceline.errors import UsageError
from paceline.launch.agent import run
from paceline.launch.hook.run_module import module_command
from paceline.launch.job import Job, report_stop
from paceline.launch.signals import Caught, Stopped
from paceline.tools.compare import report
from paceline.tools.compare.modes import MODES, Run, Way
from paceline.tools.compare.report import figures


@dataclass(frozen=True)
class Comparison:
    """Settings of a comparison."""

    target: str
    """Name of a recipe, or path of a script."""
    config: Any
    """Validated configuration of a recipe, a ``ProgramConfig``; None for a script."""
    arguments: Sequence[str]
    """Arguments of a script."""
    steps: int
    json: str | None

    def check(self, ways: Sequence[Way]) -> None:
        """Reject invalid settings before anything runs."""
        whole_number("--steps", self.steps)
        devices = max(way.devices for way in ways)
        if self.config is not None and devices > (samples := self.config.batch_size // self.config.micro_batches):
            raise UsageError(
                f"--nproc {devices} is more than the {samples} samples of a batch; give fewer ranks or a larger "
                "--batch-size"
            )
        check_file("--json", self.json)


def compare(comparison: Comparison, ways: Sequence[Way]) -> int:
    """Run all variants, print the table and write the files. Return the exit code of the first failed variant, or 0."""
    comparison.check(ways)
    # All variants use the same number of threads per device, so that a single process has as many cores as a rank.
    threads = max(1, cores() // max(way.devices for way in ways))
    for number, way in enumerate(ways, 1):
        say(f"{number}/{len(ways)} {way.mode} on {counted(way.devices, 'device')}: {MODES[way.mode]}")
    with tempfile.TemporaryDirectory(prefix="paceline-compare-") as name:
        folder = Path(name)
        if code := _run_ways(comparison, ways, threads, folder):
            return code
        records = [json.loads((folder / f"{way.name}.json").read_text("utf-8")) for way in ways]
        rows = figures(ways, records, [load_file(folder / f"{way.name}.json.safetensors") for way in ways])
    title = Path(comparison.target).name
    report.show(rows, title, threads, comparison.steps)
    write_file("--json", comparison.json, json.dumps(report.document(rows, title, threads), indent=2) + "\n")
    return 0


def _run_ways(comparison: Comparison, ways: Sequence[Way], threads: int, folder: Path) -> int:
    """Run the variants in turns. Return the exit code of the first failed variant, or 0."""
    turns = folder / "turns"
    turns.write_bytes(b"")
    ranks = sum(way.ranks for way in ways)
    program = [comparison.target, *comparison.arguments]
    if comparison.config is not None:
        program = ["-m", "paceline.tools", f"recipes.{comparison.target}", comparison.config.to_json()]
    jobs = {}
    offset = 0
    for way in ways:
        run = Run(
            way.mode,
            way.devices,
            comparison.steps,
            record=str(folder / f"{way.name}.json"),
            program=program,
            turns=(str(turns), offset, ranks),
        )
        command = module_command("paceline.tools", "compare.measured_run", run.to_json())
        jobs[way.name] = Job(command, way.ranks, env={"OMP_NUM_THREADS": str(threads)})
        offset += way.ranks
    code, failed = launch_together(jobs, lambda name: (folder / f"{name}.json").is_file())
    if failed:
        [way] = [way for way in ways if way.name == failed]
        others = ",".join(dict.fromkeys(other.mode for other in ways if other.mode != way.mode))
        remedy = f"; to compare the others, give --modes {others}" if others else ""
        say(f"mode {way.mode} on {counted(way.devices, 'device')} ended with exit code {code}{remedy}")
    return code


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
    return (report_stop(caught.received[0]) if caught.received else 0), ""
