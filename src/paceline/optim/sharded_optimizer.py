"""The sharded optimizer: every rank holds the state of its own pieces of the parameters, and updates these alone.

    p.grad, equal on all ranks ──► pieces' gradients ──► the inner optimizer's step ──► parameters are gathered
                                   (of this rank)        (state of this rank's pieces)   (whole on all ranks)

Elementwise optimizers give the same bits as an unsharded one. This is stage 1 of Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", SC 2020.

Decision 0035 says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.comm.forking import finalize
from paceline.core.state.optimizer_shards import Assembly, Window
from paceline.core.torch_internals.compile import never_compiled
from paceline.core.torch_internals.optimizer_hooks import (
    after_load,
    after_state_dict,
    before_load,
    before_state_dict,
    share_hooks,
)
from paceline.ddp.transport.channel import Channel
from paceline.errors import UsageError
from paceline.optim import states
from paceline.optim.arguments import (
    Subject,
    describe_groups,
    subject_of,
    validate_plain,
    validate_step,
)
from paceline.optim.elementwise import (
    Prototype,
    check_class,
    check_separable,
    is_known_elementwise,
    sample_parameters,
)
from paceline.optim.owned_shard import Owned
from paceline.optim.sharding import Sharding

_NOT_SETTINGS = ("params", "param_names")
_VIEWS = ("train", "eval")
"""Methods of optimizers that keep two views of the weights, such as schedule-free ones."""


class ShardedOptimizer(Optimizer):
    """Runs `optimizer_class` over this rank's share of the parameters, and gathers the updates of all ranks.

    Make it on all ranks, in place of the optimizer itself, and use it like that::

        model = paceline.DistributedDataParallel(model)
        optimizer = paceline.optim.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3, fused=True)

    Each rank holds 1/N of the state and does 1/N of the work. Gradients are the averages as usual, so clipping, a
    GradScaler and other code that reads ``p.grad`` work unchanged. Without our wrapper other code makes gradients
    equal, such as torch's DistributedDataParallel. It replaces ``torch.distributed.optim.ZeroRedundancyOptimizer``,
    whose arguments come first.

    Args:
        params: a model, or parameters or groups in the form of torch's optimizers.
        optimizer_class: class of the optimizer, such as ``torch.optim.AdamW``.
        process_group: the ranks that share the work; by default those of the wrapper, or all.
        parameters_as_bucket_view: taken and ignored; the memory of parameters depends on how ranks reach each other.
        overlap_with_ddp: refused unless False; a step does not begin before all gradients are there.
        by: ``"element"`` cuts parameters into pieces, so that all ranks have the same share. ``"tensor"`` gives each
            rank whole parameters, for optimizers that need them (Muon, Adafactor, Shampoo).
        master_dtype: dtype, such as ``torch.float32``, in which each rank keeps and trains copies of its pieces of bf16
            and fp16 parameters.
        defaults: settings of the optimizer, such as ``lr=1e-3, fused=True``.

    Raises:
        UsageError: for arguments that are wrong or not supported.
    """

    _inner: Optimizer
    """Trains this rank's pieces."""
    _sharding: Sharding
    """The owners of the pieces, and the way to the other ranks."""

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        optimizer_class: type[Optimizer] | Prototype,
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        by: Literal["element", "tensor"] = "element",
        master_dtype: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        if overlap_with_ddp:
            raise UsageError("ShardedOptimizer does not take overlap_with_ddp=True; leave it out")
        self._class = type(optimizer_class.optimizer) if isinstance(optimizer_class, Prototype) else optimizer_class
        check_class(self._class, defaults, by)
        self._make: Callable[[Any], Optimizer] = partial[Any](optimizer_class, **defaults)
        self._subject: Subject = subject_of(params, process_group)
        self._by, self._master_dtype = by, master_dtype
        # Made to have the class refuse wrong settings, and for its defaults; it trains nothing.
        try:
            template = self._make(sample_parameters(self._class, by, self._subject.shapes()))
        except Exception:
            if not is_known_elementwise(self._class):  # it may not take pieces, which the trial says with a remedy
                check_separable(self._make, self._class.__name__, [{"params": ()}], by)
            raise
        # These attributes come first, because super().__init__() calls add_param_group().
        self._is_made = False
        """Whether all groups are there, and with them the inner optimizer and the sharding."""
        self._view: str | None = None
        """The latest of ``train`` and ``eval`` that was called."""
        self._consolidated: dict[str, Any] | None = None
        """Whole state that :meth:`consolidate_state_dict` has gathered, until the next step."""
        self._has_state = False
        """Whether a step was taken or a state was loaded, on every rank."""
        super().__init__(self._subject.groups, template.defaults)
        self._try()
        self._sharding = Sharding(self._subject, by, master_dtype, self._description)
        if self._sharding.channel is not None:
            finalize(self, self._sharding.channel.close)
        for group in self.param_groups:
            self._sharding.add(group["params"])
        self._inner = self._make([self._inner_group(group) for group in self.param_groups])
        self._is_made = True

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        process_group: dist.ProcessGroup | None = None,
        *,
        by: Literal["element", "tensor"] | None = None,
        master_dtype: torch.dtype | None = None,
    ) -> ShardedOptimizer:
        """Return a sharded optimizer in place of one that was made already; all ranks call it.

        It has the groups, settings, hooks and state of `optimizer`; make schedulers of the returned optimizer.

        Args:
            optimizer: the optimizer; do not use it afterwards.
            process_group: as for the class.
            by: as for the class; by default ``"element"`` for optimizers of torch's that allow it, else ``"tensor"``.
            master_dtype: as for the class.
        """
        chosen = by or ("element" if is_known_elementwise(type(optimizer)) else "tensor")
        groups = [dict(group) for group in optimizer.param_groups]
        sharded = cls(groups, Prototype(optimizer), process_group, by=chosen, master_dtype=master_dtype)
        if optimizer.state:
            sharded.load_state_dict(optimizer.state_dict())
        share_hooks(optimizer, sharded)
        return sharded

    # -- the shards ----------------------------------------------------------------------------------------

    @property
    def owned(self) -> list[Owned]:
        """The pieces that this rank updates."""
        return self._sharding.owned

    @property
    def optimizer_class(self) -> type[Optimizer]:
        """The class of the optimizer that is sharded."""
        return self._class

    @property
    def channel(self) -> Channel | None:
        """The way to the other ranks; None in a world of one."""
        return self._sharding.channel

    @property
    def state(self) -> Any:
        """The state of this rank's share; its keys are the pieces that the rank trains, not the user's parameters."""
        return self._inner.state if self._is_made else {}

    @state.setter
    def state(self, state: Any) -> None:
        if self._is_made:
            self._inner.state = state

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, in the order in which states number them."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further parameters; called on all ranks with the same ones.

        Raises:
            UsageError: if one is trained already, or ranks give different ones.
        """
        validate_plain(param_group, self.param_groups, self._subject)
        # Before the group is added: adding it notes the present memory of all parameters, so a move would be missed.
        if self._is_made and self._sharding.has_moved():
            self._follow()
        super().add_param_group(param_group)
        if self._is_made:
            self._try()
            self._sharding.check_equal(self._description())
            self._sharding.add(param_group["params"])
            self._inner.add_param_group(self._inner_group(param_group))

    def _try(self) -> None:
        """Refuse settings with which ranks cannot update their pieces separately."""
        if not is_known_elementwise(self._class):
            check_separable(self._make, self._class.__name__, self.param_groups, self._by)

    def _inner_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        ours = {id(parameter) for parameter in group["params"]}
        trained = [owned.trained for owned in self.owned if id(owned.parameter) in ours]
        return {**_settings(group), "params": trained}

    def _description(self) -> Any:
        return describe_groups(self._class, self._by, self._master_dtype, self.param_groups)

    # -- a step -------------------------------------------------------------------------------------------------

    @never_compiled
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update this rank's pieces, and gather the others' updates. All ranks call it.

        Raises:
            UsageError: for a closure, without any gradient, and inside ``model.join()``.
            CommunicationError: if a rank ended or did not come.
        """
        validate_step(closure, self._subject, self.param_groups, self._sharding.groups)
        self._begin()
        try:
            for owned in self._sharding.owned:
                owned.take_gradient(owned.parameter.grad)
            self._inner.step()
        finally:
            for owned in self._sharding.owned:
                owned.end_step()
        self._end(lambda parameter: parameter.grad is not None)  # gradients are equal on all ranks

    def __getattr__(self, name: str) -> Any:
        # train() and eval() are there only if the sharded class has them, because trainers ask for them.
        if name in _VIEWS and callable(getattr(vars(self).get("_inner"), name, None)):
            return partial(self._switch, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @never_compiled
    @torch.no_grad()
    def _switch(self, view: str) -> None:
        """Call ``train()`` or ``eval()`` of the inner optimizer, which change its weights; all ranks call it."""
        if self._view != view:
            self._begin()
            getattr(self._inner, view)()
            for owned in self.owned:
                owned.publish()
            self._end(lambda _: True)
            self._view = view

    def _begin(self) -> None:
        """Prepare the inner optimizer: users may have written to parameters, moved them, or changed settings."""
        self._consolidated = None
        if self._sharding.has_moved():
            self._follow()
        self._sharding.take_changes()
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(_settings(group))

    def _end(self, is_changed: Callable[[nn.Parameter], bool]) -> None:
        """Take over what the inner optimizer has changed, on all ranks."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(_settings(inner))  # some optimizers keep state in their settings
        self._sharding.gather(is_changed)
        # Pieces are views that do not share the parameters' version counters.
        torch.autograd.graph.increment_version([each for each in self.parameters if is_changed(each)])
        self._has_state = True

    def _follow(self) -> None:
        """Follow parameters to other memory; where they lie in another order there, ranks exchange their states."""
        before = self.local_state()
        if self._sharding.follow() and self._has_state:
            self._load(states.gather_shards(before, self.windows(), self.channel, self._subject.device))

    # -- states -------------------------------------------------------------------------------------------------

    def local_state(self) -> dict[str, Any]:
        """Return this rank's shard of the state, see :mod:`~paceline.core.state.optimizer_shards`."""
        strides = self._sharding.strides
        return states.local_state(self.owned, self.parameters, self.param_groups, self._inner, self._subject, strides)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard, like :meth:`local_state`; see :meth:`full_state_dict` for the whole state.

        After :meth:`consolidate_state_dict` it is the whole state, on the rank that has it, until the next step.
        """
        before_state_dict(self)
        return after_state_dict(self, self.local_state() if self._consolidated is None else self._consolidated)

    def full_state_dict(self, to: int | None = None) -> dict[str, Any] | None:
        """Return the state of the unsharded optimizer on every rank, or on rank `to` alone and None on the others.

        All ranks call it. It can be loaded into the optimizer itself, and into a sharded one of any number of ranks.
        """
        return states.full_state(self.local_state(), self.parameters, self.channel, to)

    def windows(self) -> dict[int, Window]:
        """Return this rank's part of each parameter's state."""
        return states.windows(self.owned)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the whole state to rank `to`, where :meth:`state_dict` returns it until the next step; on all ranks."""
        self._consolidated = self.full_state_dict(to)

    def load_state_dict(self, state_dict: Mapping[str, Any] | Iterable[Mapping[str, Any]] | Assembly) -> None:
        """Load the state of an unsharded optimizer, this rank's own shard, or the shards of all ranks of a run.

        Args:
            state_dict: a state, an iterable of shards, or an assembly of them.

        Raises:
            CheckpointMismatch: for a state of other parameters, or a shard of another rank, or if a shard is missing.
        """
        if self._sharding.has_moved():
            self._sharding.follow()
        self._load(before_load(self, state_dict))
        self._consolidated, self._has_state, self._view = None, True, None
        after_load(self)

    def _load(self, state: Any) -> None:
        loaded = states.find_owned(state, self.owned, self._subject)
        states.load(loaded, self.owned, self.param_groups, self._inner)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError("a ShardedOptimizer cannot be copied or pickled; make another, and load its state_dict()")


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _NOT_SETTINGS}
