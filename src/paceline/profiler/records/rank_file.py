"""The file of one rank's record: a line of JSON about the rank, one for each step, and one for its end.

It grows while the rank runs, so that a killed rank leaves the steps before its end. Times are seconds of that rank's
``time.perf_counter``; inside a step they are whole ticks since its start, which are quick to write.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from paceline.core.strict_json import shown
from paceline.core.telemetry.spans import Span
from paceline.errors import UsageError
from paceline.profiler.records.steps import Meeting, Step
from paceline.profiler.records.untrusted_files import WrongValue, instance_of, new_file, parse, read_text

FOLDER = "ranks"
"""Folder with the files of all ranks, in the profile's folder."""
VERSION = 3
MOST_RANKS = 2048
"""Largest world that has a report: it has a figure for each pair of ranks."""
TICKS = 10_000_000
"""Ticks in a second; a tick is the smallest time in the file."""
AS_THEY_ARE = ("number", "kind", "start", "end", "rows", "batches", "cells", "averages", "norms")
IN_TICKS = ("delayed", "loading", "collecting")
"""Fields of a step that its line has as they are, and as ticks."""
KILLED = "killed"
"""Value of ``ended`` for a rank whose record just stops."""
STOPPED = ("SystemExit: 143", "KeyboardInterrupt")
"""Values of ``ended`` for a rank that was told to end, by SIGTERM or Ctrl-C."""
MISSING = "missing"
"""Value of ``ended`` for a rank that left no record here."""


@dataclass
class RankRecord:
    """The record of one rank."""

    rank: int
    size: int
    """Ranks in the world."""
    title: str
    """Name of the program."""
    host: str
    device: str
    threads: int
    cores: int
    started_ns: int
    """Time of day at second 0 of ``perf_counter``, in nanoseconds."""
    steps: list[Step] = field(default_factory=list)
    backend: str = ""
    wrapper: str = ""
    """``paceline``, ``torch``, or empty where no wrapper's forward was seen."""
    virtual_ranks: int = 0
    """Slices of a batch that are the same on any number of ranks; 0 without them."""
    groups: dict[str, list[int]] = field(default_factory=dict)
    """Ranks of the groups that meetings name."""
    offsets: list[tuple[float, float, float]] = field(default_factory=list)
    """Measurements of this rank's clock against rank 0's: their time, the seconds that it is ahead, and the error."""
    buckets: list[int] = field(default_factory=list)
    """Bytes of each bucket, in the order of launch, where there is one wrapper."""
    parameters: list[tuple[str, int]] = field(default_factory=list)
    """Names and bytes of the wrapped parameters."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes of ``parameters``, ``gradients``, ``optimizer`` and ``peak``."""
    loaders_seen: bool = False
    """Whether a DataLoader gave batches."""
    workers: int = 0
    """Workers of the DataLoader that gave the first batch."""
    own_code: dict[str, int] = field(default_factory=dict)
    """Samples of the stack in the loop's own code, by function."""
    sampled_s: float = 0.01
    """Mean seconds between two samples of the stack."""
    busy_cores: float | None = None
    """Mean number of the host's cores that worked, for whomever, of those that the rank may use; None if unknown."""
    own_cores: float = 0.0
    """Mean number of cores that worked for this rank and its children."""
    loop_cores: float = 0.0
    """Share of a core that the loop's own thread took of these, on average."""
    core_numbers: list[int] = field(default_factory=list)
    """Numbers of the cores that the rank may use; empty where the system does not tell."""
    quota: float | None = None
    """Cores for which control groups give the rank and its neighbours time; None without a limit."""
    ended: str = ""
    """Error that ended the rank, :data:`KILLED` or :data:`MISSING`; empty after a good end."""
    began_ns: int = 0
    """Time of day at which the recording began, in nanoseconds."""
    ended_ns: int = 0
    """Time of day at which it ended; 0 where the record just stops."""
    profiles_itself: bool = False
    """Whether the program used a profiler of torch, beside which no other can run."""


def path_of(folder: Path, rank: int) -> Path:
    """Return the file of `rank`."""
    # Five digits, so that files in the order of their names are in that of the ranks.
    return folder / FOLDER / f"rank-{rank:05d}.jsonl"


def trace_of(folder: Path, rank: int) -> Path:
    """Return the file of torch's profiler on `rank`."""
    return path_of(folder, rank).with_suffix(".torch.json")


def make_folder(folder: Path) -> None:
    """Make the folder of the ranks' files. A link in its place could lead to the files of somebody else."""
    if (folder / FOLDER).is_symlink():
        raise OSError(0, f"{FOLDER} in it is a link")
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)


def remove_ranks(folder: Path, size: int) -> None:
    """Remove the files of ranks that a world of `size` does not have, which an earlier run left."""
    for path in (folder / FOLDER).glob("rank-*"):
        number = path.name.removeprefix("rank-").partition(".")[0]
        if number.isdecimal() and int(number) >= size:
            path.unlink(missing_ok=True)


def open_file(folder: Path, rank: int) -> TextIO:
    """Open the file of `rank`, empty; its trace of an earlier run goes."""
    try:
        make_folder(folder)
        trace_of(folder, rank).unlink(missing_ok=True)
        return new_file(path_of(folder, rank))
    except OSError as error:
        raise UsageError(
            f"rank {rank}: the profile's folder {folder} cannot be written to: {error.strerror}; choose another"
        ) from error


def step_line(step: Step) -> dict[str, Any]:
    """Return `step` as the values of its line."""
    zero = step.start

    def ticks(seconds: float) -> int:
        return round(seconds * TICKS)

    return {
        **{name: getattr(step, name) for name in AS_THEY_ARE},
        **{name: ticks(getattr(step, name)) for name in IN_TICKS},
        "seconds": {part: ticks(seconds) for part, seconds in step.seconds.items()},
        "meetings": [(group, ticks(came - zero), ticks(left - zero)) for group, came, left in step.meetings],
        "spans": [(s.label, ticks(s.start - zero), ticks(s.end - zero), s.bucket) for s in step.spans],
    }


def step_of(line: dict[str, Any]) -> Step:
    """Return the step that :func:`step_line` wrote."""
    zero = line["start"]
    if line["end"] <= zero:
        raise WrongValue(f"step {line['number']} ends before it begins")
    return Step(
        **{name: line[name] for name in AS_THEY_ARE},
        **{name: line[name] / TICKS for name in IN_TICKS},
        seconds={part: ticks / TICKS for part, ticks in line["seconds"].items()},
        meetings=[Meeting(group, zero + came / TICKS, zero + left / TICKS) for group, came, left in line["meetings"]],
        spans=[Span(label, zero + at / TICKS, zero + end / TICKS, bucket) for label, at, end, bucket in line["spans"]],
    )


def write_head(file: TextIO, record: RankRecord) -> None:
    """Write the first line."""
    _write(file, {"version": VERSION, "rank": _without_steps(record)})


def write_steps(file: TextIO, steps: Iterable[Step]) -> None:
    """Write a line for each of `steps`."""
    file.writelines(json.dumps(step_line(step)) + "\n" for step in steps)
    file.flush()


def write_state(file: TextIO, record: RankRecord) -> None:
    """Write a line with the facts that became known after the first line; the last one closes the record."""
    _write(file, {"known" if record.ended == KILLED else "closed": _without_steps(record)})


def _without_steps(record: RankRecord) -> dict[str, Any]:
    return asdict(replace(record, steps=[]))


def _write(file: TextIO, line: dict[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


def is_open(path: Path) -> bool:
    """Return whether the record in the file `path` has no end yet."""
    # As the begin of a line, because an error's message or a name could hold the same word.
    return '\n{"closed"' not in path.read_text("utf-8")


def read_ranks(folder: Path) -> list[RankRecord]:
    """Return the records of all ranks of the profile in `folder`, in their order; at least one.

    Files that ended before another began, and those of ranks that the world does not have, are of an earlier run, and
    left out. Ranks without a file get a record without steps.
    """
    paths = sorted((folder / FOLDER).glob("rank-*.jsonl"))
    if not paths:
        raise UsageError(f"{folder} holds no profile; give the folder that --out named")
    records = list(map(_read, paths))
    newest = max(records, key=lambda record: record.began_ns)
    there = {record.rank: record for record in records if not 0 < record.ended_ns < newest.began_ns}
    return [there.get(rank) or replace(newest, rank=rank, steps=[], ended=MISSING) for rank in range(newest.size)]


def _read(path: Path) -> RankRecord:
    try:
        head, *lines = read_text(path).splitlines()
        first = parse(head)
        if first["version"] != VERSION:
            raise WrongValue(f"it is of version {first['version']}, and this Paceline reads {VERSION}")
        end: dict[str, Any] = first["rank"] | {"ended": KILLED}
        steps = []
        for number, text in enumerate(lines):
            try:
                line = parse(text)
            except json.JSONDecodeError:
                if number + 1 == len(lines):  # cut off when the rank was killed
                    break
                raise
            if known := line.get("closed") or line.get("known"):
                end = known
            else:
                steps.append(step_of(line))
        record: RankRecord = instance_of(RankRecord, end | {"steps": []})
        if not 0 <= record.rank < record.size <= MOST_RANKS:
            raise WrongValue(f"it is of rank {record.rank} of {record.size}; a report has at most {MOST_RANKS} ranks")
        return replace(record, steps=steps)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is no record of a rank ({shown(error)}); profile again") from error
