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

from paceline.core.state.digests import quick_digest
from paceline.data.dataset_digest import columns, element_bytes
from paceline.errors import CheckpointMismatch

MOST_ROWS = 2**16
WHOLE_BYTES = 2**28


def fingerprint(dataset: Any) -> dict[str, Any]:
    """Return the class and the number of samples of `dataset`, and the digest of each column, as plain values."""
    size = len(dataset) if hasattr(dataset, "__len__") else -1
    digests = {name: values if isinstance(values, str) else _column_digest(values) for name, values in columns(dataset)}
    return {"class": type(dataset).__qualname__, "number of samples": size, **digests}


def _column_digest(values: Any) -> str:
    is_dense = isinstance(values, Tensor) and values.layout is torch.strided
    if is_dense and values.numel() * values.element_size() <= WHOLE_BYTES:
        return f"{tuple(values.shape[1:])} {values.dtype} {int(quick_digest(values)):x}"
    count = len(values)
    rows: Sequence[int] = range(count)
    if count > MOST_ROWS:  # evenly spaced, including the first and the last
        rows = [number * (count - 1) // (MOST_ROWS - 1) for number in range(MOST_ROWS)]
    total = hashlib.sha256(f"{type(values).__name__} {count}".encode())
    for row in rows:
        total.update(hashlib.sha256(element_bytes(values[row])).digest())
    return total.hexdigest()


class DataIdentity:
    """Raises an error at a resume if the data have changed since the checkpoint was written."""

    state_is_constant = True

    def __init__(self, dataset: Any) -> None:
        self._fingerprint = fingerprint(dataset)

    def state_dict(self) -> dict[str, Any]:
        return self._fingerprint

    def check_state_dict(self, saved: dict[str, Any]) -> None:
        current = self._fingerprint
        if changed := [name for name in sorted(saved.keys() | current.keys()) if saved.get(name) != current.get(name)]:
            raise CheckpointMismatch(
                f"the training data differ from the checkpoint's in {', '.join(changed)}; resume on the same data, or "
                "start a new run in another folder with the weights that paceline.load_weights() reads"
            )

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Keep the data; :meth:`check_state_dict` has compared them."""
