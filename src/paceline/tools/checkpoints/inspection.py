"""The contents of a folder of checkpoints, read without a lock, a process group or a registered object.

A run may be using the folder: nothing in it is changed, and a checkpoint that is deleted meanwhile is passed over.
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
    """The checkpoint of `step` as it was found at `path`."""

    step: int
    path: Path
    nbytes: int
    """Size of all its files on the disk."""
    saved_at: float
    """Time at which the manifest, the last of its files, was written, in seconds since 1970; 0 if there is none."""
    manifest: Manifest | None
    """List of its files; None if it cannot be read."""
    notes: Notes
    """Notes of the run on it; empty if they cannot be read."""
    damages: tuple[str, ...]
    """Damages in words, one for each file; empty if it is complete."""
    newer: bool
    """Whether it is of a later format version; then ``damages`` says so, and whether it is complete is not known."""

    @property
    def state(self) -> Literal["complete", "damaged", "newer format"]:
        """Its condition in a word."""
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
    """Name of the tensor that shares its memory, and is stored in its place."""
    slice: Slice | None = None
    """Elements of the whole tensor that a piece in a sharded optimizer's state holds."""


@dataclass(frozen=True)
class SavedObject:
    """An object saved as `name`: of `rank` alone, or, where that is None, of all ranks."""

    name: str
    rank: int | None
    tensors: tuple[SavedTensor, ...]

    @property
    def nbytes(self) -> int:
        """Size of its tensors; tied ones count once."""
        return sum(tensor.nbytes for tensor in self.tensors)


def locate(folder: str | os.PathLike[str], step: int | None = None) -> tuple[Path, list[int]]:
    """Return a run's folder and the steps to look at: `step`, or all of them; `folder` may be a checkpoint's, too."""
    place = Path(folder)
    if not place.is_dir():
        fault = "no folder" if os.path.lexists(place) else "not there"
        raise NoCheckpoint(f"{place} is {fault}; give the folder of a run, or that of a checkpoint")
    own_step = step_of(place.resolve().name)
    if own_step is not None:
        if step not in (None, own_step):
            raise UsageError(f"{place} is the checkpoint of step {own_step}, not of step {step}; leave out --step")
        return place.resolve().parent, [own_step]
    try:
        steps = step_folders.steps_in(place)
    except CheckpointError as error:
        raise NoCheckpoint(str(error)) from None
    if not steps:
        raise NoCheckpoint(f"there is no checkpoint in {place}; check the path")
    if step is None:
        return place, steps
    if step not in steps:
        raise NoCheckpoint(
            f"there is no checkpoint of step {step} in {place}, which has {strict_json.shown(steps)}; "
            "choose one of them"
        )
    return place, [step]


def inspect(folder: Path, steps: Sequence[int], every_byte: bool) -> Iterator[Inspected]:
    """Yield the checkpoints of `steps` in the run's `folder`, without those that are deleted meanwhile.

    Args:
        folder: the run's.
        steps: the steps to look at, in this order.
        every_byte: whether to read all bytes; if not, only sizes and lists of tensors are compared.
    """
    for step in steps:
        found = _inspect(folder / step_name(step), step, every_byte)
        if found.path.is_dir():  # looked for afterwards: a run that deletes it meanwhile makes it look damaged
            yield found


def newest(folder: Path, steps: Sequence[int], every_byte: bool) -> tuple[Inspected, list[Inspected]]:
    """Return the newest of `steps` that is complete, and the newer ones that are not."""
    skipped: list[Inspected] = []
    for found in inspect(folder, steps[::-1], every_byte):
        if not found.damages:
            return found, skipped
        skipped.append(found)
    if not skipped:
        raise NoCheckpoint(f"there is no checkpoint in {folder} any more; check whether its run is deleting them")
    raise NoCheckpoint(f"the checkpoint {skipped[0].path} cannot be used: {skipped[0].damages[0]}; use another one")


def best_of(complete: Sequence[Inspected]) -> int | None:
    """Return the best step of `complete`, in ascending order, by the rule that the newest was saved with, or None."""
    rule = next((found.notes.keep_best for found in reversed(complete) if found.notes.keep_best), None)
    if rule is None:
        return None
    metric, better = rule
    keep = Keep(1, metric, "min" if better == "min" else "max")
    return keep.best({found.step: found.notes for found in complete})


def contents(found: Inspected) -> list[SavedObject]:
    """Return the checkpoint's contents: the objects that all ranks share, then those of each rank."""
    known = found.manifest
    assert known is not None, "a checkpoint without a manifest is damaged"
    try:
        if (file := known.file("state")) is not None:
            verify.check_bytes(found.path / file.path, file)
        state = strict_json.parse(verify.read_document(found.path / manifest.STATE))
        objects = [_object(name, None, node, known.file(name)) for name, node in state["objects"].items()]
        for rank, nodes in enumerate(state["ranks"]):
            file = known.file(RANK_ROLE, rank)
            pieces = {} if file is None else slices_of(nodes, file.tensors)
            objects += [_object(name, rank, node, file, pieces) for name, node in nodes.items()]
    except (verify.Damaged, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoCheckpoint(
            f"the checkpoint {found.path} is damaged: {manifest.STATE}: {error}; use another one"
        ) from None
    return objects


def _inspect(path: Path, step: int, every_byte: bool) -> Inspected:
    known, given, newer = None, Notes(), False
    damages: list[str] = []
    try:
        known = verify.read_manifest(path, step)
        damages += [_describe(file, damage) for file, damage in verify.damages(path, known, every_byte)]
        given = notes.read_verified(path, step)
    # Before Damaged, of which it is a kind.
    except verify.Newer as damage:
        newer = True
        damages.append(str(damage))
    except verify.Damaged as damage:
        if str(damage) not in damages:  # the notes are among the manifest's files, and named already
            damages.append(str(damage))
    return Inspected(step, path, _size(path), _saved_at(path), known, given, tuple(damages), newer)


def _describe(file: File, damage: verify.Damaged) -> str:
    """Return `damage` with the object whose tensors the file holds."""
    if not file.tensors:
        return str(damage)
    whose = repr(file.role) if file.rank is None else f"rank {file.rank}'s own objects"
    return f"{damage} ({len(file.tensors)} {'tensor' if len(file.tensors) == 1 else 'tensors'} of {whose})"


def _size(path: Path) -> int:
    total = 0
    # The folder may be a running job's, which removes old checkpoints meanwhile.
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
    """Describe the object of `node`, whose tensors are in `file`, some of them `pieces`."""
    if type(node) is not dict:
        raise ValueError("an object's entry is no JSON object")
    complex_ones = dict(state_codec.tensors_in([node["state"], node["metadata"], node.get("optimizer")]))
    aliases: Mapping[str, str] = {} if file is None else file.aliases
    tied: dict[str, list[str]] = {}
    for alias, target in aliases.items():
        tied.setdefault(target, []).append(alias)
    tensors = []
    for key, is_complex in complex_ones.items():
        if file is None or key not in file.tensors:
            raise ValueError(f"it names a tensor {strict_json.shown(key)}, which is in no file")
        spec = file.tensors[key]
        shape, dtype = (spec.shape[:-1], _COMPLEX.get(spec.dtype, "")) if is_complex else (spec.shape, spec.dtype)
        tensors.append(SavedTensor(key, shape, dtype, spec.nbytes, slice=(pieces or {}).get(key)))
        tensors += [SavedTensor(alias, shape, dtype, 0, tied_to=key) for alias in tied.get(key, ())]
    return SavedObject(name, rank, tuple(tensors))


_COMPLEX = {"float32": "complex64", "float64": "complex128", "float16": "complex32"}  # stored as pairs of reals
