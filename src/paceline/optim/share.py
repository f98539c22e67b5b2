"""One rank's share of a sharded optimizer, as those see it who keep copies of it: the second copy of each shard."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from paceline.errors import UsageError
from paceline.optim import states
from paceline.optim.segments import flat_view
from paceline.optim.sharding import Sharding
from paceline.optim.subject import Subject
from paceline.step_records import job_folder


class Share:
    """The pieces that this rank trains, their state, and the moment at which both are new.

    Args:
        sharding: says which pieces.
        inner: trains them.
        groups: of the sharded optimizer.
    """

    def __init__(self, sharding: Sharding, inner: Optimizer, groups: list[dict[str, Any]]) -> None:
        self._sharding, self._inner, self._groups = sharding, inner, groups
        self._hooks: OrderedDict[int, Callable[[], None]] = OrderedDict()
        """Called by :meth:`tell_updated`."""

    @property
    def revision(self) -> int:
        """Changes when other parameters are trained, or the same ones in other memory."""
        return self._sharding.revision

    def state(self) -> dict[int, dict[str, Any]]:
        """Return the state of the pieces by parameter, in the optimizer's own tensors."""
        return states.held(self._sharding.owned, self._inner)

    def groups(self) -> list[dict[str, Any]]:
        """Return the settings, with numbers for parameters."""
        return states.packed(self._groups)

    def values(self) -> list[tuple[int, tuple[int, int] | None, Tensor]]:
        """Return what a step may change: number of the parameter, which elements (None for all), and a view of them."""
        if self._sharding.has_moved() and self._sharding.follow() and self._inner.state:
            raise UsageError(
                "the memory format of parameters was changed after optimizer.step(), and the optimizer's state can "
                "follow in its next step alone; change the format after checkpointer.step(), or before training"
            )
        return [
            (each.index, each.piece, each.values())
            for each in self._sharding.owned
            if each.parameter.requires_grad or each.parameter.grad is not None
        ]

    @torch.no_grad()
    def put_back(self, values: Iterable[tuple[int, tuple[int, int] | None, Tensor]]) -> None:
        """Write `values`, of any rank, into the parameters."""
        parameters = self._sharding.parameters
        for index, piece, value in values:
            whole = parameters[index].detach()
            target = whole if piece is None else flat_view(parameters[index])[slice(*piece)]
            (torch.view_as_real(target) if target.is_complex() else target).copy_(value)

    def register_update_hook(self, hook: Callable[[], None]) -> RemovableHandle:
        """Have `hook` called in each step when this rank's pieces are updated and no other rank has them yet.

        No rank leaves the step before the hooks of all ranks have returned.
        """
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def tell_updated(self) -> None:
        """Call the hooks."""
        for hook in list(self._hooks.values()):
            hook()


def check_redundancy(redundancy: int, subject: Subject, parameters: Sequence[Tensor]) -> None:
    """Refuse a number of copies that is not offered, and a second one where nothing could hold it.

    Raises:
        UsageError: says what it takes.
    """
    if type(redundancy) is not int or redundancy not in (1, 2):
        raise UsageError(
            f"redundancy is 1, or 2 to keep a second copy of each rank's share of the optimizer, not {redundancy!r}"
        )
    if redundancy == 1 or subject.size == 1:
        return
    device = next((each.device for each in parameters if each.device.type != "cpu"), None)
    if device is not None:
        raise UsageError(
            f"redundancy=2 is for parameters on the CPU, not on {device}, where runs go on from disk; leave it out"
        )
    if job_folder() is None or os.environ["WORLD_SIZE"] != str(subject.size):
        raise UsageError(
            "redundancy=2 keeps second copies in memory that outlives a rank, which takes all ranks of `paceline run` "
            "on one host; start them so, or leave it out and go on from disk"
        )
