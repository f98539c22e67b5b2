"""Read-only inspection of a folder of checkpoints, without a process group or registered objects.

A run may be using the folder: checkpoints that it deletes during the inspection are skipped.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.checkpoint.format import manifest, state_codec, verify
from paceline.checkpoint.format import metadata as notes
from paceline.checkpoint.format.manifest import RANK_ROLE, File, Manifest
from paceline.checkpoint.format.metadata import Keep, Notes
from paceline.checkpoint.format.shard_slices import Slice, slices_of
from paceline.checkpoint.step_names import step_name, step_of
from paceline.checkpoint.storage import step_folders
from paceline.core import strict_json
from paceline.errors import CheckpointError, NoCheckpoint, UsageError


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
    newer: bool
    """Whether the format is newer than this code supports; ``damages`` then has a message about it."""

    @property
    def state(self) -> Literal["complete", "damaged", "newer format"]:
        """The state as a word or two for the user."""
        if self.newer:
            return "newer format"
        return "damaged" if self.damages else "complete"


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    tied_to: str | None = None
    """If the tensor is tied, the name of the stored tensor that shares its memory."""
    slice: Slice | None = None
    """Position in the whole tensor, if it is a piece of a sharded optimizer's state."""


@dataclass(frozen=True)
class SavedObject:
    """An object saved as `name`: the own object of `rank`, or one shared by all ranks if `rank` is None."""

    name: str
    rank: int | None
    tensors: tuple[SavedTensor, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensors; tied tensors count once."""
        return sum(tensor.nbytes for tensor in self.tensors)


def locate(folder: str | os.PathLike[str], step: int | None = None) -> tuple[Path, list[int]]:
    """Return the run's folder and the steps to inspect. `folder` may be a run or a single checkpoint."""
    place = Path(folder)
    if not place.is_dir():
        fault = "is not a folder" if os.path.lexists(place) else "does not exist"
        raise NoCheckpoint(f"{place} {fault}; give the folder of a run or of a checkpoint")
    own_step = step_of(place.resolve().name)
    if own_step is not None:
        if step not in (None, own_step):
            raise UsageError(f"{place} is the checkpoint of step {own_step}, not of step {step}; omit --step")
        return place.resolve().parent, [own_step]
    try:
        steps = step_folders.steps_in(place)
    except CheckpointError as error:
        raise NoCheckpoint(str(error)) from None
    if not steps:
        raise NoCheckpoint(f"{place} has no checkpoints; check the path")
    if step is None:
        return place, steps
    if step not in steps:
        raise NoCheckpoint(f"{place} has no checkpoint of step {step}; choose one of {strict_json.shown(steps)}")
    return place, [step]


def inspect(folder: Path, steps: Sequence[int], every_byte: bool) -> Iterator[Inspected]:
    """Yield the checkpoints of a run's `steps`, in this order.

    With `every_byte`, all bytes are read; otherwise only file sizes and lists of tensors are checked.
    """
    for step in steps:
        inspected = _inspect(folder / step_name(step), step, every_byte)
        if inspected.path.is_dir():  # checked last, because a checkpoint that is being deleted looks damaged
            yield inspected


def newest(folder: Path, steps: Sequence[int], every_byte: bool) -> tuple[Inspected, list[Inspected]]:
    """Return the newest complete checkpoint, and all newer, incomplete ones."""
    skipped: list[Inspected] = []
    for entry in inspect(folder, steps[::-1], every_byte):
        if not entry.damages:
            return entry, skipped
        skipped.append(entry)
    if not skipped:
        raise NoCheckpoint(f"the checkpoints in {folder} have just been deleted; check whether a run is deleting them")
    raise NoCheckpoint(f"the checkpoint {skipped[0].path} cannot be used: {skipped[0].damages[0]}; choose another one")


def best_of(complete: Sequence[Inspected]) -> int | None:
    """Return the best step according to the newest checkpoint with a ``keep_best`` rule, or None."""
    rule = next((entry.notes.keep_best for entry in reversed(complete) if entry.notes.keep_best), None)
    if rule is None:
        return None
    metric, better = rule
    keep = Keep(1, metric, "min" if better == "min" else "max")
    return keep.best({entry.step: entry.notes for entry in complete})


def contents(checkpoint: Inspected) -> list[SavedObject]:
    """Return the shared objects of a checkpoint, followed by the objects of each rank."""
    saved = checkpoint.manifest
    assert saved is not None, "a checkpoint without a manifest is damaged"
    try:
        if (file := saved.file("state")) is not None:
            verify.check_bytes(checkpoint.path / file.path, file)
        state = strict_json.parse(verify.read_document(checkpoint.path / manifest.STATE))
        objects = [_object(name, None, node, saved.file(name)) for name, node in state["objects"].items()]
        for rank, nodes in enumerate(state["ranks"]):
            file = saved.file(RANK_ROLE, rank)
            pieces = {} if file is None else slices_of(nodes, file.tensors)
            objects += [_object(name, rank, node, file, pieces) for name, node in nodes.items()]
    except (verify.Damaged, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoCheckpoint(
            f"the checkpoint {checkpoint.path} is damaged: {manifest.STATE}: {error}; use another one"
        ) from None
    return objects


def _inspect(path: Path, step: int, every_byte: bool) -> Inspected:
    saved, saved_notes, newer = None, Notes(), False
    damages: list[str] = []
    try:
        saved = verify.read_manifest(path, step)
        damages += [_describe(file, damage) for file, damage in verify.damages(path, saved, every_byte)]
        saved_notes = notes.read_verified(path, step)
    # Newer must come before its base class, Damaged.
    except verify.Newer as damage:
        newer = True
        damages.append(str(damage))
    except verify.Damaged as damage:
        if str(damage) not in damages:  # the manifest lists the notes, so damaged notes may already be reported
            damages.append(str(damage))
    return Inspected(step, path, _size(path), _saved_at(path), saved, saved_notes, tuple(damages), newer)


def _describe(file: File, damage: verify.Damaged) -> str:
    """Return the damage together with the affected object."""
    if not file.tensors:
        return str(damage)
    whose = repr(file.role) if file.rank is None else f"rank {file.rank}'s own objects"
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


def _object(
    name: str, rank: int | None, node: Any, file: File | None, pieces: Mapping[str, Slice] | None = None
) -> SavedObject:
    """Describe the object saved as `node`. Its tensors are in `file`; some may be `pieces` of larger tensors."""
    if type(node) is not dict:
        raise ValueError("an object's entry is not a JSON object")
    complex_ones = dict(state_codec.tensors_in([node["state"], node["metadata"], node.get("optimizer")]))
    aliases: Mapping[str, str] = {} if file is None else file.aliases
    tied: dict[str, list[str]] = {}
    for alias, target in aliases.items():
        tied.setdefault(target, []).append(alias)
    tensors = []
    for key, is_complex in complex_ones.items():
        if file is None or key not in file.tensors:
            raise ValueError(f"it names a tensor {strict_json.shown(key)} that is not in any file")
        spec = file.tensors[key]
        shape, dtype = (spec.shape[:-1], _COMPLEX.get(spec.dtype, "")) if is_complex else (spec.shape, spec.dtype)
        tensors.append(SavedTensor(key, shape, dtype, spec.nbytes, slice=(pieces or {}).get(key)))
        tensors += [SavedTensor(alias, shape, dtype, 0, tied_to=key) for alias in tied.get(key, ())]
    return SavedObject(name, rank, tuple(tensors))


_COMPLEX = {"float32": "complex64", "float64": "complex128", "float16": "complex32"}  # stored as pairs of reals
