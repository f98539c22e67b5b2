"""Copies of a wrapper: whole from the start, but without a word to other ranks until they train.

``copy.deepcopy(model)`` keeps an average of weights as a rule (EMA), often on one rank alone, so making one must not
need the others. A copy that is trained after all connects in its first synchronized backward, as all ranks run that.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.agreement.step_guard import StepGuard
from paceline.ddp.config import InitSync, choose_group
from paceline.ddp.engine.dormant import Asleep
from paceline.ddp.engine.module_changes import ModuleWatch, Named
from paceline.ddp.engine.reducer import Reducer
from paceline.errors import UsageError
from paceline.tracing import Recorder


class Copyable:
    """The part of the wrapper that copies and pickles it; comes before torch's class among its bases."""

    process_group: dist.ProcessGroup
    do_sync: Any
    _trained: list[tuple[str, nn.Parameter]]
    _watch: ModuleWatch
    _ledger: Ledger
    _reducer: Any
    _guard: StepGuard
    _recorder: Recorder

    def _prepare(self) -> None:
        raise NotImplementedError

    def _take_over(self, named: Named, averaged: bool) -> None:
        raise NotImplementedError

    def _be_alone(self) -> None:
        raise NotImplementedError

    def _connect(self, replicated: list[tuple[str, Tensor]], init_sync: InitSync) -> Reducer:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A whole copy, on this rank alone; if it is trained, it connects to its peers in its first backward."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied._revive(
            {name: copy.deepcopy(value, memo) for name, value in self._portable().items()}, self.process_group
        )
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: neither process group nor buckets; the world that loads it gives its own.

        Raises:
            UsageError: if the wrapper averages over a group other than the default one, as in torch.
        """
        if self.process_group is not dist.distributed_c10d._get_default_group():
            raise UsageError(
                "only a DistributedDataParallel over the default process group can be pickled, as the others have no "
                "name elsewhere; pickle paceline.unwrap(model) and wrap it again"
            )
        return self._portable()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back from a pickle, over the default process group."""
        self._revive(state, choose_group(None, None))

    def _portable(self) -> dict[str, Any]:
        bound = (
            "process_group",
            "_channel",
            "_reducer",
            "_guard",
            "_ledger",
            "_mean_losses",
            "_trained",
            "_watch",
            "_buffers_to_sync",
            "_rest",
            "_replica_check",
            "_recorder",
            "_comm_hooks",
        )
        return {name: value for name, value in self.__dict__.items() if name not in bound}

    def _revive(self, state: dict[str, Any], group: dist.ProcessGroup) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[arg-type]
        self.process_group, self._recorder = group, Recorder()
        self._prepare()
        if dist.get_world_size(group) == 1:
            self._be_alone()
            return
        parameters = [one for _, one in self._trained]
        wake = weakref.WeakMethod(self._wake)
        self._reducer = Asleep(self._watch, self._ledger, lambda: wake()())  # type: ignore[misc]
        self._guard = StepGuard(parameters, self._ledger, lambda: None)

    def _wake(self) -> Reducer:
        """Connect a copy that is trained; called by all ranks."""
        if not isinstance(self._reducer, Reducer):
            enabled = self.do_sync
            if (change := self._watch.look()) is not None:  # since it was copied
                change.close()
                self._watch.follow(change.named)
                self._take_over(change.named, True)
            self._connect([], False).sync_enabled = enabled
        assert isinstance(self._reducer, Reducer)
        return self._reducer
