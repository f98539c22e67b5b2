"""Records a rank's ``torch.distributed`` collectives for the test process.

In a rank, :class:`Recorder` wraps torch's functions. It keeps each call for the comparison at the end of the test, and
writes the latest call to memory shared with the test process. The test process can therefore locate a rank that waits
in C++ or has ended. Messages that a wrapper itself sends are not recorded.
"""

from __future__ import annotations

import functools
import json
import mmap
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.core.spans import COLLECTIVES
from paceline.core.torch_distributed import cell_of

ONE_TO_ONE = ("send", "recv")
"""Functions whose calls are written to shared memory but not compared, because they are not collectives."""
SIZE = 4096


@dataclass
class GroupCalls:
    """The collectives that a rank called on one process group."""

    ranks: list[int]
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Name and place of each call."""
    has_failed: bool = False
    """Whether a call raised. If so, the calls may legitimately differ from those of other ranks."""


Calls = dict[str, GroupCalls]


class Note:
    """The latest call, in memory that the rank shares with the test process."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, SIZE)

    def write(self, **entry: Any) -> None:
        """Replace the entry, unless the new entry is too long, which happens only with hundreds of ranks."""
        text = json.dumps(entry).encode()
        if len(text) < SIZE - 1:
            self._memory[: len(text) + 1] = text + b"\0"

    def read(self) -> dict[str, Any]:
        """Return the entry; empty if it is incomplete."""
        try:
            return dict(json.loads(self._memory[:].partition(b"\0")[0] or b"{}"))
        except ValueError:
            return {}


class Recorder:
    """Records the calls of this process."""

    def __init__(self, note: Note) -> None:
        self.groups: Calls = {}
        self._note = note
        self._inside = False
        """Whether a recorded call is running; nested calls are not recorded."""
        self._works: dict[str, Any] = {}
        """The latest asynchronous call of each group."""

    def install(self) -> None:
        """Start recording calls to torch's functions. Skip ``monitored_barrier``, which itself names missing ranks."""
        for name in (*COLLECTIVES, *ONE_TO_ONE):
            if (cell := cell_of(name)) is not None:
                cell.cell_contents = self._wrap(name, cell.cell_contents)

    def result(self) -> Calls:
        """Return the calls by group, after checking asynchronous calls for failures."""
        for name, work in self._works.items():
            try:
                if work.is_completed():
                    work.wait()  # raises if the call failed; exception() is deprecated
            except RuntimeError:
                self.groups[name].has_failed = True
        return self.groups

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*arguments: Any, **options: Any) -> Any:
            if self._inside or not dist.is_initialized():
                return original(*arguments, **options)
            group = options.get("group") or next((a for a in arguments if isinstance(a, dist.ProcessGroup)), None)
            if group == dist.GroupMember.NON_GROUP_MEMBER:
                return original(*arguments, **options)
            key, place = self._key(group), place_of(sys._getframe(1))
            calls = self.groups[key]
            if name in COLLECTIVES:
                calls.calls.append((name, place))
            entry = {"call": name, "place": place, "group": key, "number": len(calls.calls), "ranks": calls.ranks}
            self._note.write(**entry, inside=True, since=time.monotonic())
            self._inside = True
            try:
                result = original(*arguments, **options)
            # Including Ctrl-C, which may abandon a collective that the other ranks have joined.
            except BaseException:
                calls.has_failed = True
                raise
            finally:
                self._inside = False
                self._note.write(**entry, inside=False)
            if isinstance(result, dist.Work):
                self._works[key] = result
            return result

        return call

    def _key(self, group: Any) -> str:
        group = group or dist.group.WORLD
        name = str(getattr(group, "group_name", "") or "the world")
        if name not in self.groups:
            self.groups[name] = GroupCalls(list(dist.get_process_group_ranks(group)))
        return name


def place_of(frame: Any) -> str:
    """Return the file and line of the innermost caller outside of torch and Paceline."""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "paceline"):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "?"


def unmatched(calls: Mapping[int, Calls]) -> str:
    """Return one sentence that says how the ranks' calls differ; empty if they do not."""
    groups = sorted({name for groups in calls.values() for name in groups})
    for name in groups:
        members = next(groups[name].ranks for groups in calls.values() if name in groups)
        by_rank = {rank: calls[rank].get(name, GroupCalls(members)) for rank in members if rank in calls}
        if len(by_rank) < len(members) or any(log.has_failed for log in by_rank.values()):
            continue
        for number in range(max(len(log.calls) for log in by_rank.values())):
            called = {rank: log.calls[number] if number < len(log.calls) else None for rank, log in by_rank.items()}
            names = {call[0] if call else None for call in called.values()}
            if len(names) > 1:
                return f"collective {number + 1} of {_group(members)} differs: " + "; ".join(
                    f"rank {rank} called {call[0]} at {call[1]}" if call else f"rank {rank} called none"
                    for rank, call in called.items()
                )
    return ""


def _group(members: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, members))}"
