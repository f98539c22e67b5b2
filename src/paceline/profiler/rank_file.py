"""The file with a rank's record: a line of JSON about the rank, one for each step, and one at its end.

The file grows while the rank runs, so a killed rank leaves all steps that it had written. Times are seconds of the
rank's ``time.perf_counter``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from paceline.core.spans import Span
from paceline.core.strict_json import WrongValue, instance_of, loads, new_file, read_text, shown
from paceline.errors import UsageError
from paceline.profiler.steps import Meeting, Step

FOLDER = "ranks"
"""Folder for the files of all ranks, inside the profile's folder."""
VERSION = 6
MOST_RANKS = 2048
"""Largest world that can be reported, because a report has a figure for each pair of ranks."""
KILLED = "killed"
"""Value of ``ended`` in a record that was never closed."""
STOPPED = ("SystemExit: 143", "KeyboardInterrupt")
"""Values of ``ended`` after SIGTERM or Ctrl-C."""
MISSING = "missing"
"""Value of ``ended`` for a rank without a record."""


@dataclass
class RankRecord:
    """The record of one rank."""

    rank: int
    size: int
    """World size."""
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
    """``paceline``, ``torch``, or empty without a wrapper."""
    virtual_ranks: int = 0
    """Number of virtual ranks; 0 without them."""
    groups: dict[str, list[int]] = field(default_factory=dict)
    """Ranks of each process group that occurs in meetings, by the group's name."""
    offsets: list[tuple[float, float, float]] = field(default_factory=list)
    """Comparisons of this rank's clock with rank 0's: time, seconds that this clock is ahead, error."""
    buckets: list[int] = field(default_factory=list)
    """Bytes of each bucket in launch order."""
    parameters: list[tuple[str, int]] = field(default_factory=list)
    """Names and bytes of the wrapped parameters."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes of ``parameters``, ``gradients``, ``optimizer`` and ``peak``."""
    workers: int = 0
    """Number of workers of the DataLoader that returned the first batch."""
    own_code: dict[str, int] = field(default_factory=dict)
    """Number of stack samples in the loop's own code, by function."""
    sampled_s: float = 0.01
    """Mean seconds between two stack samples."""
    busy_cores: float | None = None
    """Mean number of the rank's cores that are busy; None if unknown."""
    own_cores: float = 0.0
    """Mean number of cores that this rank and its children keep busy."""
    loop_cores: float = 0.0
    """Mean share of a core that the loop's own thread uses."""
    switches: float = 0.0
    """Context switches per second of all threads of this rank."""
    core_numbers: list[int] = field(default_factory=list)
    """Numbers of the cores that the rank may use; empty if unknown."""
    quota: float | None = None
    """Limit that control groups set, in cores; None without a limit."""
    ended: str = ""
    """Error that ended the rank, :data:`KILLED` or :data:`MISSING`; empty after success."""
    began_ns: int = 0
    """Start of the recording as nanoseconds since the epoch."""
    ended_ns: int = 0
    """End of the recording as nanoseconds since the epoch; 0 if it was not closed."""
    profiles_itself: bool = False
    """Whether the program itself used torch's profiler."""


def path_of(folder: Path, rank: int) -> Path:
    """Return the file of `rank`."""
    # Five digits, so that sorting the names sorts the ranks.
    return folder / FOLDER / f"rank-{rank:05d}.jsonl"


def trace_of(folder: Path, rank: int) -> Path:
    """Return the file for the trace of torch's profiler on `rank`."""
    return path_of(folder, rank).with_suffix(".torch.json")


def make_folder(folder: Path) -> None:
    """Create the folder for the ranks' files. Refuse a link, because it may lead to another user's files."""
    if (folder / FOLDER).is_symlink():
        raise OSError(0, f"{FOLDER} in it is a link")
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)


def remove_ranks(folder: Path, size: int) -> None:
    """Remove files left behind by an earlier run with more than `size` ranks."""
    for path in (folder / FOLDER).glob("rank-*"):
        number = path.name.removeprefix("rank-").partition(".")[0]
        if number.isdecimal() and int(number) >= size:
            path.unlink(missing_ok=True)


def open_file(folder: Path, rank: int) -> TextIO:
    """Open an empty file for `rank`, and remove its trace from an earlier run."""
    try:
        make_folder(folder)
        trace_of(folder, rank).unlink(missing_ok=True)
        return new_file(path_of(folder, rank))
    except OSError as error:
        raise UsageError(
            f"rank {rank} cannot write to the profile's folder {folder}: {error.strerror}; choose another folder"
        ) from error


def step_of(line: dict[str, Any]) -> Step:
    """Return the step that :func:`write_steps` wrote as `line`."""
    if line["end"] <= line["start"]:
        raise WrongValue(f"step {line['number']} ends before it begins")
    meetings = [Meeting(*values) for values in line["meetings"]]
    spans = [Span(*values) for values in line["spans"]]
    return Step(**line | {"meetings": meetings, "spans": spans})


def write_steps(file: TextIO, steps: Iterable[Step]) -> None:
    """Write a line for each of `steps`."""
    for step in steps:
        line = vars(step) | {"spans": [(span.label, span.start, span.end, span.bucket) for span in step.spans]}
        file.write(json.dumps(line) + "\n")
    file.flush()


def write_facts(file: TextIO, record: RankRecord) -> None:
    """Write a line with facts about the rank. The file begins with such a line; the last one counts."""
    kind = "open" if record.ended == KILLED else "closed"
    file.write(json.dumps({"version": VERSION, kind: asdict(replace(record, steps=[]))}) + "\n")
    file.flush()


def is_open(path: Path) -> bool:
    """Return whether the record in the file `path` is not closed yet."""
    # Match only the start of a line, because a message or a name may contain the same text.
    return f'\n{{"version": {VERSION}, "closed"' not in path.read_text("utf-8")


def read_ranks(folder: Path) -> list[RankRecord]:
    """Return the records of all ranks of the profile in `folder`, by rank.

    Skips files of an earlier run, which ended before the newest record began or belong to a rank outside the world. A
    rank without a file gets a record without steps.
    """
    paths = sorted((folder / FOLDER).glob("rank-*.jsonl"))
    if not paths:
        raise UsageError(f"{folder} has no profile; give the folder that was passed to --out")
    records = list(map(_read, paths))
    newest = max(records, key=lambda record: record.began_ns)
    by_rank = {record.rank: record for record in records if not 0 < record.ended_ns < newest.began_ns}
    return [by_rank.get(rank) or replace(newest, rank=rank, steps=[], ended=MISSING) for rank in range(newest.size)]


def _read(path: Path) -> RankRecord:
    try:
        lines, facts, steps = read_text(path).splitlines(), dict[str, Any](), list[Step]()
        for number, text in enumerate(lines):
            try:
                line = loads(text)
            except json.JSONDecodeError:
                if number and number + 1 == len(lines):  # cut off when the rank was killed
                    break
                raise
            if "version" not in line:
                steps.append(step_of(line))
            elif line["version"] == VERSION:
                facts = line.get("closed") or line["open"]
            else:
                raise WrongValue(f"it has version {line['version']}, but this Paceline reads version {VERSION}")
        record: RankRecord = instance_of(RankRecord, facts | {"steps": []})
        if not 0 <= record.rank < record.size <= MOST_RANKS:
            raise WrongValue(f"it has rank {record.rank} of {record.size}; a report has at most {MOST_RANKS} ranks")
        return replace(record, steps=steps)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a valid record of a rank ({shown(error)}); profile again") from error
