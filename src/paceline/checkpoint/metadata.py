"""Notes on a checkpoint, ``metadata.json``: the user's metadata, and whether the checkpoint is protected."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.checkpoint import manifest, state_codec
from paceline.checkpoint.state_codec import Encoder, Unencodable
from paceline.core import consensus, strict_json
from paceline.core.stacks import warn
from paceline.errors import CheckpointWarning, UsageError

METADATA = "metadata.json"
"""Name of the file, and its role in the manifest."""
_BETTER = ("max", "min")


@dataclass(frozen=True)
class Notes:
    """The user's ``metadata``; a ``protected`` checkpoint is never deleted."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    protected: bool = False
    keep_best: tuple[str, str] | None = None
    """The key in the metadata that decides which checkpoint is best, and "max" or "min"."""

    @classmethod
    def of(cls, metadata: Mapping[str, Any] | None, protect: bool) -> Notes:
        """Check the arguments of a save, and return them as notes; tensors with one element become numbers."""
        if metadata is not None and (
            not isinstance(metadata, Mapping) or any(type(key) is not str for key in metadata)
        ):
            raise UsageError(f"metadata must be a dict with string keys, not {strict_json.shown(metadata)}")
        if not isinstance(protect, bool):
            raise UsageError(f"protect must be True or False, not {protect!r}")
        numbers = {
            key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            for key, value in (metadata or {}).items()
        }
        encoder = Encoder()
        try:
            encoder.encode(numbers)
        except Unencodable as error:
            raise UsageError(f"metadata{error.path} {error.reason}; give numbers, strings, lists and dicts") from None
        if encoder.tensors:
            raise UsageError(f"metadata contains the tensor {min(encoder.tensors)!r}; register an object that holds it")
        return cls(numbers, protect)

    @classmethod
    def parse(cls, raw: bytes) -> Notes:
        """Parse the bytes of a ``metadata.json``."""
        body = strict_json.parse(raw)
        if not isinstance(body, dict) or body.keys() - {"keep_best"} != {"protected", "metadata"}:
            raise ValueError("it has unexpected entries")
        if type(body["protected"]) is not bool:
            raise ValueError("its entry 'protected' is not true or false")
        metadata = state_codec.decode(body["metadata"], {})
        if not isinstance(metadata, dict):
            raise ValueError("its metadata is not a dict")
        rule = body.get("keep_best")
        if rule is not None:
            if not isinstance(rule, list) or [type(part) for part in rule] != [str, str] or rule[1] not in _BETTER:
                raise ValueError("its entry 'keep_best' is not a name with 'max' or 'min'")
            rule = rule[0], rule[1]
        return cls(metadata, body["protected"], rule)

    @classmethod
    def read(cls, folder: Path) -> Notes:
        """Return the notes in the checkpoint `folder`; notes that cannot be read count as protected."""
        try:
            path = folder / METADATA
            return cls.parse(manifest.read_document(path)) if METADATA in os.listdir(folder) else cls()
        except (OSError, ValueError, manifest.Damaged):  # deleting a protected checkpoint could not be undone
            return cls(protected=True)

    @classmethod
    def read_verified(cls, folder: Path, step: int) -> Notes:
        """Return the notes in the checkpoint `folder` of `step`, verified against its manifest."""
        file = manifest.read_manifest(folder, step).file(METADATA)
        return cls() if file is None else manifest.read_listed(folder, file, cls.parse)

    def __bool__(self) -> bool:
        """Return whether there is anything to write; otherwise the checkpoint has no ``metadata.json``."""
        return bool(self.metadata) or self.protected

    def render(self) -> bytes:
        """Return the bytes of ``metadata.json``."""
        body: dict[str, Any] = {"protected": self.protected, "metadata": Encoder().encode(self.metadata)}
        if self.keep_best is not None:
            body["keep_best"] = list(self.keep_best)
        return strict_json.render(body, indent=1) + b"\n"


@dataclass(frozen=True)
class Keep:
    """The rule for keeping checkpoints: keep the ``newest`` checkpoints, protected checkpoints, and the best one."""

    newest: int
    metric: str | None = None
    better: Literal["max", "min"] = "max"

    def check(self) -> None:
        if type(self.newest) is not int or self.newest < 1:
            raise UsageError(f"keep must be a whole number >= 1, not {self.newest!r}")
        if self.metric is not None and (not isinstance(self.metric, str) or not self.metric):
            raise UsageError(f"keep_best must be the name of a number in the metadata, not {self.metric!r}")
        if self.better not in _BETTER:
            raise UsageError(f"best must be max or min, not {self.better!r}")

    def note(self, notes: Notes) -> Notes:
        """Return `notes` with this rule added, after checking the metric."""
        if self.metric is None:
            return notes
        value = notes.metadata.get(self.metric)
        if value is not None and not _is_number(value):
            raise UsageError(
                f"keep_best={self.metric!r} compares numbers, but metadata[{self.metric!r}] is "
                f"{strict_json.shown(value)}; give a number, or leave it out"
            )
        if value is not None and math.isnan(value) and consensus.here().rank == 0:
            warn(
                f"metadata[{self.metric!r}] of this checkpoint is NaN, so the earlier best checkpoint is kept",
                CheckpointWarning,
            )
        return replace(notes, keep_best=(self.metric, self.better))

    def best(self, notes: Mapping[int, Notes]) -> int | None:
        """Return the step with the best metric, the earliest in case of a tie. NaN is never best."""
        values: dict[int, Any] = {step: notes[step].metadata.get(self.metric or "") for step in sorted(notes)}
        numbers = {step: value for step, value in values.items() if _is_number(value) and not math.isnan(value)}
        pick = max if self.better == "max" else min
        return pick(numbers, key=numbers.__getitem__, default=None)

    def outdated(self, steps: Sequence[int], saved: int, notes: Mapping[int, Notes]) -> list[int]:
        """Return the `steps` to delete once `saved` is durable, in ascending order.

        Later steps are kept: they were saved before the run was resumed from an earlier step.
        """
        old = [step for step in steps if step <= saved][: -self.newest]
        best = self.best(notes) if self.metric else None
        return [step for step in old if step != best and not notes[step].protected]


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)  # also NumPy's numbers
