"""Diagnosis of ended ranks from outside: their last activity, and whether the kernel killed them for memory."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paceline.core.processes.control_groups import MOUNT, OWN, folders_of
from paceline.core.telemetry.flight_record import Snapshot, path_of, read_box
from paceline.core.telemetry.job_directory import JobFolder
from paceline.launch.failures.rank_state import State, state_of
from paceline.launch.failures.root_cause import End


class LastMoments:
    """The states of the ranks of the present start when the first one failed."""

    def __init__(self, boxes: JobFolder | None) -> None:
        self._boxes = boxes
        self._seen: dict[int, Snapshot | None] = {}
        """The boxes of all ranks when the first failure was noticed, by rank; empty before."""
        self._seen_at = 0.0
        """Time of that, on ``time.monotonic``."""
        self._kills: int | None = None
        """:func:`memory_kills` before the start."""

    def begin(self) -> None:
        """Forget the ranks of the previous start, which have ended."""
        if self._boxes is not None:
            self._boxes.clear()
        self._seen, self._kills = {}, memory_kills()

    def note_failure(self) -> None:
        """Read all boxes at the first call of a start, because the other ranks fail or are ended later."""
        if self._boxes is not None and not self._seen:
            self._seen_at = time.monotonic()
            ranks = range(self._boxes.note.nproc)
            self._seen = {rank: box for rank in ranks for box in self._read(rank)}

    def with_diagnosis(self, ends: Sequence[End]) -> list[End]:
        """Return `ends` with the diagnosis added, after the ranks have ended."""
        kills = memory_kills()
        rise = 0 if kills is None or self._kills is None else kills - self._kills
        return [replace(end, state=self._state(end)) for end in charged(ends, rise)]

    def _state(self, end: End) -> State | None:
        if not any(self._seen.values()):  # no rank uses its box, so nothing follows from one that is empty
            return None
        now, epoch = time.monotonic(), time.time()
        if end.stopped:  # its box also records its end
            return state_of(self._seen[end.rank], self._seen_at) if end.rank in self._seen else None
        has_told = end.record is not None or end.leaving is not None
        when = end.when if has_told else end.at
        for box in self._read(end.rank):
            return state_of(box, min(now - (epoch - when), now), raised=has_told or end.code >= 0)
        return None

    def _read(self, rank: int) -> list[Snapshot | None]:
        """Return the content of the box; an empty list if it is damaged or gone."""
        assert self._boxes is not None
        try:
            return [read_box(path_of(self._boxes.path, rank))]
        except (OSError, ValueError):
            return []


def charged(ends: Sequence[End], rise: int) -> list[End]:
    """Return `ends` with the ranks marked that the kernel killed for memory, if it killed at least as many processes.

    Args:
        ends: the ends of one start.
        rise: how many processes of the job's control group the kernel killed for memory meanwhile.
    """
    killed = {end.rank for end in ends if end.code == -signal.SIGKILL and not end.stopped}
    if not killed or rise < len(killed):
        return list(ends)
    return [replace(end, lacked_memory=True) if end.rank in killed else end for end in ends]


def memory_kills(mount: Path = MOUNT, own: Path = OWN) -> int | None:
    """Return how many processes of this control group were killed so far; None if there is no counter.

    Args:
        mount: the folder in which control groups are mounted.
        own: lists the groups of this process, as ``/proc/self/cgroup`` does.
    """
    try:
        groups = folders_of("memory", mount, own)
    except OSError:
        return None
    for file in _counters(groups, mount):
        # A host has cgroups of version 1, 2 or both, and only one of the files may be there and count kills.
        with suppress(OSError, ValueError):
            counts = dict(line.split(" ", 1) for line in file.read_text().splitlines() if " " in line)
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return None


def _counters(groups: Sequence[tuple[Path, Path]], mount: Path) -> list[Path]:
    """Return the files that may have the count, of version 1 and 2, the group's own before that of its hierarchy."""
    files = []
    for group, root in groups:
        name = "memory.events" if root == mount else "memory.oom_control"
        files += [group / name, root / name]
    return files
