"""Protocols of the objects that can be registered with a Checkpointer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from paceline.core.state.optimizer_shards import Window


class Stateful(Protocol):
    """An object with a state: a module, optimizer, scheduler, sampler or GradScaler."""

    def state_dict(self) -> Any:
        """Return the state as nested plain values and tensors."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state that :meth:`state_dict` returned."""


@runtime_checkable
class Mergeable(Protocol):
    """A per-rank object without tensors that can load states from a different number of ranks."""

    def load_rank_states(self, states: Sequence[Any], /) -> None:
        """Load this rank's part of the states of all ranks."""


@runtime_checkable
class Sharded(Protocol):
    """An optimizer whose state is sharded over the ranks; see :mod:`paceline.core.state.optimizer_shards`."""

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """Class of the sharded optimizer."""

    def local_state(self) -> dict[str, Any]:
        """Return this rank's shard."""

    def windows(self) -> dict[int, Window]:
        """Return this rank's part of each parameter's state."""

    def load_state_dict(self, state: Any, /) -> None:
        """Load this rank's shard, an :class:`Assembly` of shards, or the state of the unsharded optimizer."""
