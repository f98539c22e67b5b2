"""The file of one rank's record: a line of JSON about the rank, one for each step, and one for its end.

It grows as the rank goes on, so that a rank that is killed leaves what it has recorded. Times are seconds of that
rank's ``time.perf_counter``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from paceline.core.telemetry.spans import Span
from paceline.errors import UsageError
from paceline.profiler.records.steps import Meeting, Step

FOLDER = "ranks"
"""In the profile's folder: holds the files of all ranks."""
VERSION = 2
TICKS = 10_000_000
"""Ticks of a second; a tick is the smallest time in the file."""
KILLED = "killed"
"""The end of a rank whose record just stops."""
MISSING = "missing"
"""The end of a rank that left no record here."""


@dataclass
class RankRecord:
    """The record of one rank."""

    rank: int
    size: int
    """Ranks in the world."""
    title: str
    """The program."""
    host: str
    device: str
    threads: int
    cores: int
    started_ns: int
    """The time of day, as ``time.time_ns`` has it, at ``perf_counter`` second 0."""
    steps: list[Step] = field(default_factory=list)
    backend: str = ""
    wrapper: str = ""
    """``paceline``, ``torch``, or empty where no wrapper's forward was seen."""
    groups: dict[str, list[int]] = field(default_factory=dict)
    """Ranks of the groups that meetings name."""
    offsets: list[tuple[float, float, float]] = field(default_factory=list)
    """Measurements of this rank's clock against rank 0's: when, by how many seconds it is ahead, and their error."""
    buckets: list[int] = field(default_factory=list)
    """Bytes of each bucket, in the order of launch, where there is one wrapper."""
    parameters: list[tuple[str, int]] = field(default_factory=list)
    """Names and bytes of the wrapped parameters."""
    embeddings: list[str] = field(default_factory=list)
    """Names of the parameters that are tables of embeddings with dense gradients."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes: parameters, gradients, optimizer, peak."""
    loaders_seen: bool = False
    """Whether a DataLoader gave batches."""
    ended: str = ""
    """How it ended: empty for well, else the error, :data:`KILLED` or :data:`MISSING`."""
    began_ns: int = 0
    """When the recording began, as ``time.time_ns`` has it."""
    ended_ns: int = 0
    """When it ended; 0 where the record just stops."""
    profiles_itself: bool = False
    """Whether the program used a profiler of torch, beside which no other can run."""


def path_of(folder: Path, rank: int) -> Path:
    """Return the file of `rank`."""
    return folder / FOLDER / f"rank-{rank:05d}.jsonl"


def trace_of(folder: Path, rank: int) -> Path:
    """Return the file of torch's profiler on `rank`."""
    return folder / FOLDER / f"rank-{rank:05d}.torch.json"


def remove_ranks(folder: Path, size: int) -> None:
    """Remove the files of ranks that a world of `size` does not have, which an earlier run left."""
    for path in (folder / FOLDER).glob("rank-*"):
        number = path.name.removeprefix("rank-").partition(".")[0]
        if number.isdecimal() and int(number) >= size:
            path.unlink(missing_ok=True)


def open_file(folder: Path, rank: int) -> TextIO:
    """Open the file of `rank`, empty; its trace of an earlier run goes.

    Raises:
        UsageError: if the folder cannot be written to.
    """
    try:
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        trace_of(folder, rank).unlink(missing_ok=True)
        return path_of(folder, rank).open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"rank {rank}: the profile's folder {folder} cannot be written to: {error.strerror}; choose another"
        ) from error


def step_line(step: Step) -> dict[str, Any]:
    """Return `step` as its line says it; times relative to its start, in whole ticks, as those are quick to write."""
    zero = step.start
    line: dict[str, Any] = {
        "step": step.number,
        "kind": step.kind,
        "start": step.start,
        "end": step.end,
        "ticks": {part: round(seconds * TICKS) for part, seconds in step.seconds.items()},
        "meetings": [
            (group, round((came - zero) * TICKS), round((left - zero) * TICKS)) for group, came, left in step.meetings
        ],
        "rows": step.rows,
        "batches": step.batches,
    }
    if step.norms is not None:
        line["norms"] = step.norms
    if step.spans:
        line["spans"] = [
            (label, round((start - zero) * TICKS), round((end - zero) * TICKS), bucket)
            for label, start, end, bucket, _, _ in step.spans
        ]
    return line


def step_of(line: dict[str, Any]) -> Step:
    """Return the step that :func:`step_line` wrote."""
    zero = line["start"]
    return Step(
        line["step"],
        line["kind"],
        zero,
        line["end"],
        {part: ticks / TICKS for part, ticks in line["ticks"].items()},
        [Meeting(group, zero + came / TICKS, zero + left / TICKS) for group, came, left in line["meetings"]],
        line["rows"],
        line["batches"],
        tuple(line["norms"]) if "norms" in line else None,
        [
            Span(label, zero + start / TICKS, zero + end / TICKS, bucket)
            for label, start, end, bucket in line.get("spans", ())
        ],
    )


def write_head(file: TextIO, record: RankRecord) -> None:
    """Write the first line."""
    _write(file, {"version": VERSION, "rank": _without_steps(record)})


def write_steps(file: TextIO, steps: Iterable[Step]) -> None:
    """Write a line for each of `steps`."""
    file.writelines(json.dumps(step_line(step)) + "\n" for step in steps)
    file.flush()


def write_state(file: TextIO, record: RankRecord) -> None:
    """Write a line with all that became known on the way; the last one also says that the record is whole."""
    _write(file, {"known" if record.ended == KILLED else "closed": _without_steps(record)})


def _without_steps(record: RankRecord) -> dict[str, Any]:
    values = vars(record) | {"steps": []}
    return asdict(RankRecord(**values))


def _write(file: TextIO, line: dict[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


def is_open(path: Path) -> bool:
    """Return whether the record in the file `path` has no end yet."""
    return '\n{"closed"' not in path.read_text("utf-8")


def read_ranks(folder: Path) -> list[RankRecord]:
    """Return the records of all ranks of the profile in `folder`, in their order; at least one.

    Files that ended before another began, and those of ranks that the world does not have, are of an earlier run, and
    left out; for ranks without a file there is
    a record without steps.

    Raises:
        UsageError: if there are none, or one cannot be read; names the file.
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
        head, *lines = path.read_text("utf-8").splitlines()
        first = json.loads(head)
        if first["version"] != VERSION:
            raise UsageError(
                f"{path} is of version {first['version']}, and this Paceline reads {VERSION}; profile again"
            )
        end: dict[str, Any] = first["rank"] | {"ended": KILLED}
        steps = []
        for number, text in enumerate(lines):
            try:
                line = json.loads(text)
            except ValueError:
                if number + 1 == len(lines):  # cut off when the rank was killed
                    break
                raise
            if known := line.get("closed") or line.get("known"):
                end = known
            else:
                steps.append(step_of(line))
        return RankRecord(**end | {"steps": steps, "offsets": [tuple(one) for one in end["offsets"]]})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no record of a rank ({error!r}); profile again") from error
