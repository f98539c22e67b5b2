"""The context manager that profiles part of a program, and the results that it writes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from paceline.core.messages import say
from paceline.core.missing_ranks import named_ranks
from paceline.core.strict_json import new_file, shown
from paceline.errors import UsageError
from paceline.profiler.analyze import Report, read_facts, report_of, summary
from paceline.profiler.chrome_trace import write_trace
from paceline.profiler.page import page
from paceline.profiler.rank_file import FOLDER, KILLED, RankRecord, is_open
from paceline.profiler.steps import FLUSH_S, WARM_UP

RESULTS = ("summary.json", "trace.json", "report.html")
"""Files that :func:`write_results` writes."""
PATIENCE_S = 30.0
"""Seconds that rank 0 waits for the records of the other ranks."""


@contextmanager
def profile(
    folder: str | Path, steps: int | None = None, *, operators: bool = True, noise_scale: bool = False
) -> Iterator[None]:
    """Profile the block on every rank, and write the results into `folder`.

    Skips 3 warm-up steps and the 3 steps that torch's profiler records. A step ends when ``optimizer.step()`` returns.
    When the block ends, rank 0 writes ``report.html``, ``summary.json`` and ``trace.json`` (for Perfetto or
    ``chrome://tracing``). The records of all ranks are in ``ranks/``. If hosts do not share a file system, copy the
    records into one folder and run ``paceline profile report FOLDER``. After an error, the results cover the steps
    before it.

    Args:
        folder: folder for the results, created if missing.
        steps: maximum number of steps to measure; later steps run unmeasured. By default 10,000.
        operators: whether to record 3 steps with torch's profiler, for the table of operators and kernels.
        noise_scale: whether to measure the gradient noise scale, for ``paceline plan``. Every few steps this takes two
            passes over the gradients.
    """
    from paceline.profiler.recorder import Session

    path = Path(folder).absolute()  # the program may change its working directory
    session = Session(path, steps, operators=operators, noise_scale=noise_scale)
    try:
        with session:
            yield
        if session.rank == 0:
            _await_others(path)  # not after an error, because the other ranks may then never leave the block
    finally:
        if session.rank == 0:
            _write(path)


def _await_others(folder: Path) -> None:
    """Wait for the ranks that are still in the block. Not collective, because the group may already be destroyed."""
    others = sorted((folder / FOLDER).glob("rank-*.jsonl"))
    deadline = time.monotonic() + PATIENCE_S
    while any(map(is_open, others)) and time.monotonic() < deadline:
        time.sleep(0.05)


def _write(folder: Path) -> None:
    try:
        report = write_results(folder)
    except UsageError as error:  # training goes on even if no step was measured
        say(f"paceline: {error}")
    else:
        say(f"paceline: {report.headline} See {folder / 'report.html'}")


def write_results(folder: Path) -> Report:
    """Write the results into `folder`, and return the report."""
    try:
        facts = read_facts(folder)
        report = report_of(facts)
        write_trace(folder, facts)
        texts = {
            "summary.json": json.dumps(summary(report), indent=1, allow_nan=False),
            "report.html": page(report),
        }
        for name, text in texts.items():
            with new_file(folder / name) as file:
                file.write(text + "\n")
    except OSError as error:
        raise UsageError(f"the results cannot be written to {folder}: {error.strerror}; make room there") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        # Each record is valid by itself, but they do not fit together, for example because one was edited.
        raise UsageError(f"the records in {folder} contradict each other ({shown(error)}); profile again") from error
    # Raise only after writing the files, because the trace is useful even if no step was measured.
    if not facts.accounts.steps or not any(record.wrapper for record in facts.records):
        raise UsageError(_why_nothing(facts.records))
    return report


def _why_nothing(records: Sequence[RankRecord]) -> str:
    if killed := [record.rank for record in records if record.ended == KILLED]:
        return (
            f"no step was measured: {named_ranks(killed)} ended before its record was first written, "
            f"which happens every {FLUSH_S:g} s; train longer, or let the program end by itself"
        )
    if not any(record.wrapper for record in records):
        return (
            "this process trained no model in DistributedDataParallel; wrap it: model = "
            "paceline.DistributedDataParallel(model); with LocalSGD or DiLoCo, over the ranks of an island, even if it "
            "has only one (device_mesh=mesh['inside']). If the program starts its own ranks, use "
            "paceline.profiler.profile(folder) in them"
        )
    steps = max(len(record.steps) for record in records)
    return (
        f"no step was measured: the program took {steps}, and the first {WARM_UP} are only warm-up; train longer (a "
        "step ends when an optimizer of torch.optim steps after a backward)"
    )
