"""Read-only inspection of a folder of checkpoints, without a process group or registered objects.

A run may be using the folder: checkpoints that it deletes during the inspection are skipped.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.checkpoint.format import manifest, verify
from paceline.checkpoint.format import metadata as notes
from paceline.checkpoint.format.manifest import File, Manifest
from paceline.checkpoint.format.metadata import Keep, Notes
from paceline.checkpoint.step_names import step_at, step_name, step_of
from paceline.checkpoint.storage import step_folders
from paceline.errors import CheckpointError, NoCheckpoint


@dataclass(frozen=True)
class Inspected:
    """State of the checkpoint at `path`."""

    step: int
    path: Path
    nbytes: int
    """Size of all files."""
    saved_at: float
    """When the manifest, the last file, was written, in seconds since 1970; 0 without a manifest."""
    manifest: Manifest | None
    """The manifest, or None if it cannot be read."""
    notes: Notes
    """The run's notes; empty if they cannot be read."""
    damages: tuple[str, ...]
    """A message for each damaged file; empty if the checkpoint is complete."""

    @property
    def state(self) -> Literal["complete", "damaged"]:
        return "damaged" if self.damages else "complete"


def locate(folder: str | os.PathLike[str]) -> tuple[Path, list[int]]:
    """Return the run's folder and the steps to inspect. `folder` may be a run or a single checkpoint."""
    place = Path(folder)
    if not place.is_dir():
        fault = "is not a folder" if os.path.lexists(place) else "does not exist"
        raise NoCheckpoint(f"{place} {fault}; give the folder of a run or of a checkpoint")
    own_step = step_at(place)
    if own_step is not None:
        return (place if step_of(place.name) is not None else place.resolve()).parent, [own_step]
    try:
        steps = step_folders.steps_in(place)
    except CheckpointError as error:
        raise NoCheckpoint(str(error)) from None
    if not steps:
        raise NoCheckpoint(f"{place} has no checkpoints; check the path")
    return place, steps


def inspect(folder: str | os.PathLike[str], every_byte: bool) -> Iterator[Inspected]:
    """Yield the checkpoints in `folder`, a run or a single checkpoint.

    With `every_byte`, all bytes are read; otherwise only file sizes and lists of tensors are checked.
    """
    is_any_left = False
    while not is_any_left:
        place, steps = locate(folder)
        for step in steps:
            path, before = place / step_name(step), None
            # Again after a change, because a checkpoint that is being deleted or replaced looks damaged.
            while (now := step_folders.identity(path)) != before:
                before, inspected = now, _inspect(path, step, every_byte)
            if before is not None:
                is_any_left = True
                yield inspected


def best_of(complete: Sequence[Inspected]) -> int | None:
    """Return the best step according to the newest checkpoint with a ``keep_best`` rule, or None."""
    rule = next((entry.notes.keep_best for entry in reversed(complete) if entry.notes.keep_best), None)
    if rule is None:
        return None
    metric, better = rule
    keep = Keep(1, metric, "min" if better == "min" else "max")
    return keep.best({entry.step: entry.notes for entry in complete})


def _inspect(path: Path, step: int, every_byte: bool) -> Inspected:
    saved, saved_notes = None, Notes()
    damages: list[str] = []
    try:
        saved = verify.read_manifest(path, step)
        damages += [_describe(file, damage) for file, damage in verify.damages(path, saved, every_byte)]
        saved_notes = notes.read_verified(path, step)
    except verify.Damaged as damage:
        if str(damage) not in damages:  # the manifest lists the notes, so damaged notes may already be reported
            damages.append(str(damage))
    return Inspected(step, path, _size(path), _saved_at(path), saved, saved_notes, tuple(damages))


def _describe(file: File, damage: verify.Damaged) -> str:
    """Return the damage together with the affected object."""
    if not file.tensors:
        return str(damage)
    whose = f"{file.role!r:.80}" if file.rank is None else f"rank {file.rank!s:.20}'s own objects"
    return f"{damage} ({len(file.tensors)} {'tensor' if len(file.tensors) == 1 else 'tensors'} of {whose})"


def _size(path: Path) -> int:
    total = 0
    # A running job may be deleting old checkpoints.
    with suppress(OSError):
        for entry in os.scandir(path):
            with suppress(OSError):
                about = entry.stat(follow_symlinks=False)
                total += about.st_size if stat.S_ISREG(about.st_mode) else 0
    return total


def _saved_at(path: Path) -> float:
    try:
        return (path / manifest.NAME).stat(follow_symlinks=False).st_mtime
    except OSError:
        return 0.0
