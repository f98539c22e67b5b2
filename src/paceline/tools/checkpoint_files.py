"""Inspection of a folder of checkpoints, and export of one saved object, without a process group.

A run may be using the folder: checkpoints that it deletes during the inspection are skipped.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.checkpoint import manifest, safetensors_file, state_codec, step_folders
from paceline.checkpoint.manifest import File, Manifest
from paceline.checkpoint.metadata import Keep, Notes
from paceline.checkpoint.step_names import step_at, step_name, step_of
from paceline.checkpoint.weights import read_folder
from paceline.core.output_files import check_file
from paceline.errors import CheckpointError, NoCheckpoint, UsageError

TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")


def check_target(file: str) -> Path:
    """Check that `file` can be written and does not exist yet, and return its path."""
    if not file:
        raise UsageError("--out is empty; name a file")
    check_file("--out", file)
    if os.path.lexists(file):  # exists() is False for a dangling link
        raise UsageError(f"--out {file} already exists; remove it or choose another file")
    path = Path(os.path.realpath(file))
    if step_at(Path(file).parent) is not None and (path.parent / manifest.NAME).exists():
        raise UsageError(f"--out {file} is inside the checkpoint {path.parent}; choose another folder")
    return path


def export(folder: Path, name: str, target: Path) -> tuple[int, int, int]:
    """Write the state of the object `name` to `target`; return its step, number of tensors, and bytes.

    The `folder` of a run selects its newest intact checkpoint, and the suffix of `target` selects the format. The file
    is written whole or not at all. A safetensors file stores each tied weight under all of its names.
    """
    step, node, tensors = read_folder(folder, name)
    state = state_codec.decode(node["state"], tensors)
    is_torch = target.suffix in TORCH_ENDINGS
    if is_torch:
        # Like Module.state_dict(), store the versions of the submodules.
        metadata = state_codec.decode(node["metadata"], tensors)
        if metadata is not None and isinstance(state, OrderedDict):
            state._metadata = metadata  # type: ignore[attr-defined]
    else:
        tensors = _flat(state, name)
    draft = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")  # file systems allow 255 bytes
    try:
        with draft.open("xb") as file:
            if is_torch:
                torch.save(state, file)
            else:
                file.writelines(safetensors_file.pieces(tensors))
            file.flush()
            # Before the rename, because a crash could otherwise leave a partial file under the final name.
            os.fsync(file.fileno())
        draft.replace(target)
        step_folders.sync_folder(target.parent)
    except (OSError, RuntimeError) as error:  # torch.save() raises a RuntimeError from the OSError
        cause = error if isinstance(error, OSError) else error.__context__
        reason = step_folders.reason(cause) if isinstance(cause, OSError) else str(error)
        raise UsageError(f"cannot write --out {target}: {reason}; choose another place") from error
    finally:
        with suppress(OSError):
            draft.unlink()  # exists only after an error or Ctrl-C
    return step, len(tensors), target.stat().st_size


def _flat(state: Any, name: str) -> dict[str, torch.Tensor]:
    """Return `state` after checking that a safetensors file can hold it."""
    remedy = "give --out a name that ends in .pt"
    if not isinstance(state, dict):
        raise UsageError(f"the state of {name!r} is not a dict, as safetensors requires; {remedy}")
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{key!r} in the state of {name!r} is not a tensor, and safetensors holds only tensors; "
                f"{remedy}, or name a module with --name"
            )
        if value.is_complex():
            raise UsageError(f"{key!r} of {name!r} is complex, which not every safetensors reader supports; {remedy}")
        if key == "__metadata__":
            raise UsageError(f"a tensor of {name!r} has the reserved name {key!r}; {remedy}")
    return state


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
        saved = manifest.read_manifest(path, step)
        damages += [_describe(file, damage) for file, damage in manifest.damages(path, saved, every_byte)]
        saved_notes = Notes.read_verified(path, step)
    except manifest.Damaged as damage:
        if str(damage) not in damages:  # the manifest lists the notes, so damaged notes may already be reported
            damages.append(str(damage))
    return Inspected(step, path, _size(path), _saved_at(path), saved, saved_notes, tuple(damages))


def _describe(file: File, damage: manifest.Damaged) -> str:
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
