"""The ledger of consumed samples, ``consumed.json`` in a checkpoint: which global batches led to it, run by run.

A run begins where it was started or resumed. Each checkpoint has the whole ledger, so a copy of it proves as much as
the original, and steps that were lost and done again are not in it::

    {"runs": [{"ranks": 2, "resumed_at": null, "saved": 20, "done_before": null,
               "sources": {"loader": {"settings": {"batch_size": 8, …}, "batches": ["0 0 6 6 -71…", "1 0 2 6 88…"]}}}]}

``batches`` has epoch, first batch, the batch behind the last one, the epoch's length, and a digest of its order;
``done_before`` is the highest step that is known to have been done when the run resumed, if it is a later one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from paceline import documents
from paceline.checkpoint import verify
from paceline.checkpoint.manifest import Manifest

NAME = "consumed.json"  # and its role, which no registered object can have
Batches = tuple[int, int, int, int | None, int | None]
"""Epoch, begin and end of a stretch of global batches, the epoch's length, a digest of its order."""


@runtime_checkable
class Consumes(Protocol):
    """A source of batches that knows which ones it has given away: a sampler or a stream."""

    def consumed(self) -> Sequence[Batches]:
        """Return the global batches that were consumed in this process, in order."""

    def settings(self) -> Mapping[str, Any]:
        """Return the settings that decide which samples a global batch has."""


@dataclass(frozen=True)
class Source:
    """The data that a run took from one source."""

    settings: Mapping[str, Any]
    batches: tuple[Batches, ...]


@dataclass(frozen=True)
class Run:
    """A run of `ranks`, from its start (`resumed_at` is None) or from the step it resumed to the step it `saved`."""

    ranks: int
    resumed_at: int | None
    saved: int
    done_before: int | None
    sources: Mapping[str, Source]


class Ledger:
    """The account of what the registered sources have given away since the run was started or resumed.

    Every rank keeps it, in the same words, as sources count global batches: rank 0 may be gone when it is wanted.
    """

    def __init__(self) -> None:
        self._sources: dict[str, Consumes] = {}
        self._marks: dict[str, tuple[int, int]] = {}  # stretches of each source that are not this run's, and their end
        self._before: tuple[Run, ...] = ()  # the runs that led to the checkpoint that was resumed
        self._resumed_at: int | None = None
        self._done_before: int | None = None

    def register(self, name: str, object: Any) -> None:
        """Keep account of `object`, or of the sampler that it has as ``progress``, if that knows what was consumed."""
        source = getattr(object, "progress", object)
        if isinstance(source, Consumes):
            self._sources[name] = source
            self._mark(name)

    def resume(self, before: tuple[Run, ...], step: int, done: int) -> None:
        """Begin a run at the checkpoint of `step`, to which the runs `before` led, after `done` steps were done."""
        self._before, self._resumed_at = before, step
        self._done_before = done if done > step else None
        for name in self._sources:
            self._mark(name)

    def runs(self, step: int, ranks: int, ends: Mapping[str, tuple[int, int]] | None = None) -> tuple[Run, ...]:
        """Return the runs that led to `step`; none if no source is registered.

        Args:
            step: of the checkpoint.
            ranks: that are in this run.
            ends: of some sources, the epoch and the batch in it that come next after `step`; now, of the others.
        """
        if not self._sources:
            return ()
        sources = {
            name: Source(dict(each.settings()), _up_to(self._new(name), (ends or {}).get(name)))
            for name, each in self._sources.items()
        }
        return *self._before, Run(ranks, self._resumed_at, step, self._done_before, sources)

    def _mark(self, name: str) -> None:
        consumed = self._sources[name].consumed()
        self._marks[name] = len(consumed), consumed[-1][2] if consumed else 0

    def _new(self, name: str) -> tuple[Batches, ...]:
        count, end = self._marks[name]
        consumed = self._sources[name].consumed()
        new = list(consumed[count:])
        if 0 < count <= len(consumed) and consumed[count - 1][2] > end:  # the stretch under way went on
            epoch, _, behind, length, order = consumed[count - 1]
            new.insert(0, (epoch, end, behind, length, order))
        return tuple((epoch, begin, behind, length, order) for epoch, begin, behind, length, order in new)


def _up_to(batches: tuple[Batches, ...], end: tuple[int, int] | None) -> tuple[Batches, ...]:
    """Return the stretches among `batches` ahead of `end`, an epoch and a batch in it; all if it is None."""
    if end is None:
        return batches
    last_epoch, position = end
    cut = (
        (epoch, begin, min(behind, position) if epoch == last_epoch else behind, length, order)
        for epoch, begin, behind, length, order in batches
        if epoch <= last_epoch
    )
    return tuple(each for each in cut if each[1] < each[2])


def render(runs: Sequence[Run]) -> bytes:
    """Return the bytes of ``consumed.json``.

    Raises:
        ValueError: if there are too many stretches for a document.
    """
    body = [
        {
            "ranks": run.ranks,
            "resumed_at": run.resumed_at,
            "saved": run.saved,
            "done_before": run.done_before,
            "sources": {
                name: {"settings": dict(source.settings), "batches": [_line(each) for each in source.batches]}
                for name, source in run.sources.items()
            },
        }
        for run in runs
    ]
    return documents.render({"runs": body}, indent=1) + b"\n"


def parse(raw: bytes) -> tuple[Run, ...]:
    """Parse the bytes of a ``consumed.json``.

    Raises:
        ValueError: if they hold none.
    """
    try:
        return tuple(_run_in(entry) for entry in documents.parse(raw)["runs"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"an entry is missing or malformed ({type(error).__name__}: {str(error)[:80]})") from None


def read(folder: Path, found: Manifest) -> tuple[Run, ...]:
    """Return the ledger of the checkpoint `folder`, whose manifest is `found`; none if it has no ledger.

    Raises:
        Damaged: if it is altered or malformed.
    """
    if (file := found.file(NAME)) is None:
        return ()
    return verify.read_listed(folder, file, parse, NAME)


def _line(batches: Batches) -> str:
    return " ".join("?" if number is None else str(number) for number in batches)


def _run_in(entry: Any) -> Run:
    sources = {}
    for name, source in entry["sources"].items():
        if not isinstance(source["settings"], dict):
            raise ValueError("a source's settings are no JSON object")
        sources[name] = Source(source["settings"], tuple(_batches_in(line) for line in source["batches"]))
    ranks, saved = _count(entry["ranks"]), _count(entry["saved"])
    resumed_at, done = (None if entry[key] is None else _count(entry[key]) for key in ("resumed_at", "done_before"))
    return Run(ranks, resumed_at, saved, done, sources)


def _batches_in(line: Any) -> Batches:
    parts = str(line)[:200].split(" ")
    if type(line) is not str or len(parts) != 5:
        raise ValueError(f"{documents.shown(line)} is no stretch of batches")
    epoch, begin, end = (_count(int(part)) for part in parts[:3])
    length = None if parts[3] == "?" else _count(int(parts[3]))
    order = None if parts[4] == "?" else int(parts[4])
    if not begin < end or (length is not None and not end <= length):
        raise ValueError(f"{documents.shown(line)} is no stretch of batches")
    return epoch, begin, end, length, order


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{documents.shown(value)} is no count")
    return value
