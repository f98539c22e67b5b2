"""Fingerprints of training data, which detect changes when a run is resumed, without loading a sample.

A fingerprint contains a digest of every column from :func:`paceline.data.dataset_digest.columns`. The digest covers the
whole column if it is a tensor of up to ``WHOLE_BYTES``. Otherwise it covers ``MOST_ROWS`` evenly spaced rows, and
changes to other rows are not detected. Files are compared only by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.core.processes import consensus
from paceline.core.state.digests import quick_digest
from paceline.core.telemetry.users_code import warn
from paceline.data import DataLoader
from paceline.data.dataset_digest import columns, element_bytes
from paceline.errors import CheckpointMismatch, CheckpointWarning

MOST_ROWS = 2**16
WHOLE_BYTES = 2**28


def fingerprint(dataset: Any, samples: int | None = None) -> dict[str, Any]:
    """Return the fingerprint of `dataset`, or of its first `samples` samples, as plain values."""
    size = len(dataset) if hasattr(dataset, "__len__") else -1
    count = size if samples is None else min(samples, size)
    digests = {}
    for name, values in columns(dataset):
        if isinstance(values, str):
            digests[name] = values
        else:
            digests[name] = _column_digest(values, count if len(values) == size else len(values))
    return {"class": type(dataset).__qualname__, "samples": count, "columns": digests}


def changes(dataset: Any, saved: dict[str, Any]) -> str:
    """Describe how `dataset` differs from the data set with the fingerprint `saved`; empty if it is unchanged."""
    current = fingerprint(dataset)
    if current == saved:
        return ""
    if current["class"] != saved["class"]:
        return f"the data set is a {current['class']} but was a {saved['class']}"
    saved_size, size = int(saved["samples"]), int(current["samples"])
    if size > saved_size and fingerprint(dataset, saved_size) == saved:
        return f"{size - saved_size} samples were appended to {saved_size}"
    if size != saved_size:
        return f"there are {size} samples, but there were {saved_size}"
    names = sorted(current["columns"].keys() | saved["columns"].keys())
    differing = [name for name in names if current["columns"].get(name) != saved["columns"].get(name)]
    return f"samples were edited or reordered, in {', '.join(differing)}"


def _column_digest(values: Any, count: int) -> str:
    """Return a digest of the first `count` values of a column."""
    is_dense = isinstance(values, Tensor) and values.layout is torch.strided
    if is_dense and values.numel() * values.element_size() <= WHOLE_BYTES:
        return f"{tuple(values.shape[1:])} {values.dtype} {int(quick_digest(values[:count])):x}"
    rows: Sequence[int] = range(count)
    if count > MOST_ROWS:  # evenly spaced, including the first and the last
        rows = [number * (count - 1) // (MOST_ROWS - 1) for number in range(MOST_ROWS)]
    total = hashlib.sha256(f"{type(values).__name__} {count}".encode())
    for row in rows:
        total.update(hashlib.sha256(element_bytes(values[row])).digest())
    return total.hexdigest()


class DataIdentity:
    """Raises an error at a resume if the data have changed since the checkpoint was written, unless `allow_changed`."""

    state_is_constant = True

    def __init__(self, dataset: Any, allow_changed: bool = False) -> None:
        self._dataset = dataset
        self._allow_changed = allow_changed
        self._fingerprint = fingerprint(dataset)

    def state_dict(self) -> dict[str, Any]:
        return {"fingerprint": self._fingerprint}

    def check_state_dict(self, saved: dict[str, Any]) -> None:
        if not self._allow_changed and (changed := self._changes(saved)):
            raise CheckpointMismatch(
                f"the training data differ from the checkpoint's: {changed}; resume on the same data, accept the "
                "changes with allow_changed_data=True (--allow-changed-data), or start again in another folder"
            )

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if (changed := self._changes(saved)) and consensus.here().rank == 0:
            warn(f"the run continues on changed training data: {changed}", CheckpointWarning)

    def _changes(self, saved: dict[str, Any]) -> str:
        return "" if saved["fingerprint"] == self._fingerprint else changes(self._dataset, saved["fingerprint"])


class ChangedDataLoader:
    """A loader that can resume with a data set of a different length, by restarting the current epoch."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self.progress = loader.progress

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        size = self._loader.state_dict().get("size")
        if state.get("size") != size:
            if state.get("position") and consensus.here().rank == 0:
                warn(
                    f"epoch {state.get('epoch')} starts again, because {size} samples have a different order",
                    CheckpointWarning,
                )
            state = {**state, "size": size, "position": 0, "order": None}
        self._loader.load_state_dict(state)
