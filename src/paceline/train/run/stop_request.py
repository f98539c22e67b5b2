"""A rank's request to end the training, and the agreement of all ranks on it.

During a step the request travels in what ranks exchange in the next synchronized backward anyway
(:meth:`paceline.DistributedDataParallel.ask_to_stop`), so a step costs nothing for it. After an evaluation and a save,
which are rare, ranks ask each other. Decision 0053 says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.ddp import DistributedDataParallel
from paceline.train.run.run_state import RunState


class StopRequest:
    """Whether this rank has asked to end the training. It is each rank's own, and in its checkpoints.

    Args:
        model: passes the request on to the other ranks.
        state: says whether all ranks have agreed already.
    """

    def __init__(self, model: DistributedDataParallel, state: RunState) -> None:
        self._model, self._state = model, state
        self.is_asked = False
        """Whether this rank has asked."""

    def ask(self) -> None:
        """Ask all ranks to end the training."""
        self.is_asked = True
        self._model.ask_to_stop()

    def state_dict(self) -> dict[str, Any]:
        """Return whether this rank has asked and the other ranks may not know it yet."""
        return {"is_asked": self.is_asked and not self._state.is_stopped}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Ask again if this rank had asked."""
        self.load_rank_states([saved])

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Ask again if any of the ranks that saved had asked."""
        if any(state["is_asked"] for state in states):
            self.ask()
