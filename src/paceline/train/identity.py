"""The identity of a data set, so that a run is not resumed on other data unnoticed."""

from __future__ import annotations

from typing import Any

from paceline.errors import CheckpointMismatch
from paceline.fingerprint import dataset_digest


class DataIdentity:
    """Saved with a checkpoint; loading it compares."""

    def __init__(self, dataset: Any) -> None:
        self._digest = dataset_digest(dataset)

    def state_dict(self) -> dict[str, str]:
        """The data set's SHA-256."""
        return {"sha256": self._digest}

    def load_state_dict(self, saved: dict[str, str]) -> None:
        """Compare with what was saved.

        Raises:
            CheckpointMismatch: if the data differ.
        """
        if saved["sha256"] != self._digest:
            raise CheckpointMismatch(
                f"the training data are not those that the checkpoint was written with (SHA-256 {self._digest[:12]}… "
                f"now, {saved['sha256'][:12]}… then); resume on the same data, or start anew in another folder"
            )
