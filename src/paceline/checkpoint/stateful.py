"""Objects that can be registered, as protocols: what a Checkpointer asks of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.hooks import RemovableHandle

from paceline.optimizer_shards import Window


class Stateful(Protocol):
    """An object with a state that can be taken and loaded: module, optimizer, scheduler, sampler, GradScaler."""

    def state_dict(self) -> Any:
        """Return the state, as nested plain values and tensors."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state that :meth:`state_dict` returned."""


@runtime_checkable
class Mergeable(Protocol):
    """An object with a state per rank that also takes the states of another number of ranks, without tensors."""

    def load_rank_states(self, states: Sequence[Any], /) -> None:
        """Load this rank's part of the states that all ranks had."""


Piece = tuple[int, tuple[int, int] | None, torch.Tensor]
"""Elements of a parameter: its number, which of them (None for all), and their values."""


class Share(Protocol):
    """The pieces of a sharded optimizer's parameters that one rank alone trains, with their state."""

    @property
    def revision(self) -> int:
        """Changes when other parameters are trained, or the same ones in other memory."""

    def state(self) -> dict[int, dict[str, Any]]:
        """Return the state of this rank's pieces by parameter, in the optimizer's own tensors."""

    def groups(self) -> list[dict[str, Any]]:
        """Return the settings, as a state has them."""

    def values(self) -> list[Piece]:
        """Return this rank's pieces of the parameters that a step may change."""

    def put_back(self, values: Iterable[Piece], /) -> None:
        """Write pieces, of any rank, into the parameters."""

    def register_update_hook(self, hook: Callable[[], None], /) -> RemovableHandle:
        """Have `hook` called in each step when the pieces are updated; no rank goes on before those of all returned."""


@runtime_checkable
class Sharded(Protocol):
    """An optimizer of whose state each rank holds a shard; see :mod:`paceline.optimizer_shards`."""

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """The optimizer that it shares out."""

    def local_state(self) -> dict[str, Any]:
        """Return this rank's shard."""

    def windows(self) -> dict[int, Window]:
        """Return what this rank holds of each parameter's state."""

    redundancy: int
    """2 if a second copy of each shard is wanted."""
    share: Share
    """What there are copies of."""

    def load_state_dict(self, state: Any, /) -> None:
        """Load a shard of this rank, an :class:`Assembly` of shards, or the state of the unsharded optimizer."""
