"""Questions to a Checkpointer about the checkpoints in its folder. Rank 0 answers all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from paceline.checkpoint.format import state_codec
from paceline.checkpoint.format.state_codec import Encoder
from paceline.checkpoint.saving.checkpoint_store import RunFolder
from paceline.core.processes import consensus
from paceline.core.processes.missing_ranks import called_by_all
from paceline.core.processes.world import World


class SavedSteps(ABC):
    """The checkpoints of a run. All ranks ask, and get rank 0's answer."""

    _opened: RunFolder | None = None
    """The folder on rank 0, while it is open."""

    @called_by_all("Checkpointer.latest()")
    def latest(self) -> Path | None:
        """Return the path of the newest checkpoint that is whole, down to the last byte; None if there is none.

        Damaged ones are skipped, and rank 0 warns of each once. The path is that on rank 0's host.
        """
        answer = consensus.decide(self._world(), lambda: self._run_folder.newest())
        return None if answer is None else Path(answer)

    @called_by_all("Checkpointer.steps()")
    def steps(self) -> list[int]:
        """Return the steps that have a folder, whole or damaged, in ascending order; also one rescued into memory."""
        return list(consensus.decide(self._world(), lambda: self._run_folder.steps()))

    @called_by_all("Checkpointer.best()")
    def best(self) -> int | None:
        """Return the step of the checkpoint in which ``keep_best`` is best; None if none has it."""
        found = consensus.decide(self._world(), lambda: self._run_folder.best())
        return None if found is None else int(found)

    @called_by_all("Checkpointer.metadata()")
    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """Return the metadata of the checkpoint of `step`, or of the newest whole one; empty if it has none.

        Raises:
            NoCheckpoint: if there is no such checkpoint, or its metadata are damaged.
        """
        node = consensus.decide(self._world(), lambda: Encoder().encode(dict(self._run_folder.metadata(step))))
        return dict(state_codec.decode(node, {}))

    @property
    def _run_folder(self) -> RunFolder:
        assert self._opened is not None, "only rank 0 uses the folder"
        return self._opened

    @abstractmethod
    def _world(self) -> World:
        """Return the world; refused once the Checkpointer is closed."""
