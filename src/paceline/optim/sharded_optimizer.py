"""The sharded optimizer: every rank updates its own pieces of the parameters, and holds only their state.

    p.grad, equal on all ranks ──► pieces' gradients ──► the inner optimizer's step ──► parameters are gathered
                                   (of this rank)        (state of this rank's pieces)   (whole on all ranks)

Results of elementwise optimizers are bit-identical with and without sharding. This is stage 1 of Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020. Decision 0035 explains the design.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.forking import finalize
from paceline.core.optimizer_shards import KEY, Assembly, Window, cut_state, is_shard, settings_of, uncast
from paceline.core.torch_internals import never_compiled
from paceline.ddp.channel import Channel
from paceline.errors import CheckpointMismatch, UsageError
from paceline.optim.arguments import (
    Subject,
    check_class,
    describe_groups,
    subject_of,
    template_parameters,
    validate_group,
    validate_step,
)
from paceline.optim.sharding import Owned, Sharding

MASTER = "master"
"""Key of the master copy in a parameter's state."""


class ShardedOptimizer(Optimizer):
    """Runs `optimizer_class` on this rank's share of the parameters, and gathers the updates of all ranks.

    Create it on all ranks instead of the optimizer itself, and use it in the same way::

        model = paceline.DistributedDataParallel(model)
        optimizer = paceline.optim.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3, fused=True)

    Each rank holds 1/N of the state and does 1/N of the work. Gradients are averaged as usual, so clipping, a
    GradScaler and other code that reads ``p.grad`` work unchanged. Without Paceline's wrapper, something else must make
    the gradients equal on all ranks, such as torch's DistributedDataParallel. This class replaces
    ``torch.distributed.optim.ZeroRedundancyOptimizer``.

    Args:
        params: a model, or parameters or parameter groups as for torch's optimizers.
        optimizer_class: class of the optimizer, such as ``torch.optim.AdamW``.
        process_group: the ranks that share the work; by default the ranks of the wrapper, or all ranks.
        by: ``"element"`` cuts parameters into pieces, so that all ranks have equal shares. It is available for torch's
            elementwise optimizers. ``"tensor"`` gives each rank whole parameters. It is also available for torch's Muon
            and Adafactor, for subclasses that change only the constructor of a torch optimizer, and for classes
            with ``updates_tensors_separately = True``.
        master_dtype: the dtype of master copies, such as ``torch.float32``. Each rank then keeps and trains copies of
            its pieces of bf16 and fp16 parameters in this dtype.
        defaults: settings of the optimizer, such as ``lr=1e-3, fused=True``.

    Raises:
        UsageError: if an argument is invalid or unsupported.
    """

    _inner: Optimizer
    """Trains this rank's pieces."""
    _sharding: Sharding
    """The owners of the pieces, and the channel to the other ranks."""

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        *,
        by: Literal["element", "tensor"] = "element",
        master_dtype: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        check_class(optimizer_class, defaults, by)
        self._class = optimizer_class
        make_optimizer: Any = optimizer_class  # mypy would check the arguments of the abstract Optimizer
        self._make: Callable[[Any], Optimizer] = partial(make_optimizer, **defaults)
        self._subject: Subject = subject_of(params, process_group)
        self._by, self._master_dtype = by, master_dtype
        # The template makes the class reject invalid settings, and provides its defaults.
        template = self._make(template_parameters(optimizer_class, self._subject.shapes()))
        # Before super().__init__(), which calls add_param_group().
        self._is_made = False
        """Whether the inner optimizer and the sharding exist."""
        super().__init__(self._subject.groups, template.defaults)
        self._sharding = Sharding(self._subject, by, master_dtype, self._description())
        if self._sharding.channel is not None:
            finalize(self, self._sharding.channel.close)
        for group in self.param_groups:
            self._sharding.add(group["params"])
        self._inner = self._make([self._inner_group(group) for group in self.param_groups])
        self._is_made = True

    @property
    def owned(self) -> list[Owned]:
        """The pieces that this rank updates."""
        return self._sharding.owned

    @property
    def optimizer_class(self) -> type[Optimizer]:
        """The class of the sharded optimizer."""
        return self._class

    @property
    def channel(self) -> Channel | None:
        """The channel to the other ranks; None with a single rank."""
        return self._sharding.channel

    @property
    def state(self) -> Any:
        """State of this rank's share. Its keys are the rank's pieces, not the user's parameters."""
        # Here too, because torch creates a missing state with a step, and only some ranks may have no piece.
        _refuse_torch_checkpoint()
        return self._inner.state if self._is_made else {}

    @state.setter
    def state(self, state: Any) -> None:
        if self._is_made:
            self._inner.state = state

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters. A parameter's index in this list is its number in states."""
        return self._sharding.parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to train. Call this on all ranks with the same parameters.

        Raises:
            UsageError: if a parameter is already trained, or the groups differ between ranks.
        """
        validate_group(param_group, self.param_groups, self._subject)
        if self._is_made:
            self._sharding.follow()
        super().add_param_group(param_group)
        if self._is_made:
            self._sharding.check_equal(self._description())
            self._sharding.add(param_group["params"])
            self._inner.add_param_group(self._inner_group(param_group))

    def _inner_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        members = {id(parameter) for parameter in group["params"]}
        trained = [owned.trained for owned in self.owned if id(owned.parameter) in members]
        return {**settings_of(group), "params": trained}

    def _description(self) -> Any:
        return describe_groups(self._class, self._by, self._master_dtype, self.param_groups)

    @never_compiled
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update this rank's pieces, and gather the updates of the other ranks. All ranks must call this.

        Raises:
            UsageError: if a closure is given, if no parameter has a gradient, or inside ``model.join()``.
            CommunicationError: if a rank has ended or did not arrive.
        """
        validate_step(closure, self._subject, self.param_groups, self._sharding.groups)
        # Users may have moved parameters, written to them, or changed settings.
        self._sharding.follow()
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(settings_of(group))
        try:
            for owned in self.owned:
                owned.take_changes()
                owned.take_gradient(owned.parameter.grad)
            self._inner.step()
        finally:
            for owned in self.owned:
                owned.end_step()
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(settings_of(inner))  # some optimizers keep state in their settings
        self._sharding.gather()
        # Pieces are views that do not share the parameters' version counters.
        changed = [parameter for parameter in self.parameters if parameter.grad is not None]
        torch.autograd.graph.increment_version(changed)

    def local_state(self) -> dict[str, Any]:
        """Return this rank's shard of the state, see :mod:`~paceline.core.optimizer_shards`."""
        parameters, inner = self.parameters, self._inner
        state: dict[int, dict[str, Any]] = {}
        for part in self.owned:
            entry = dict(inner.state[part.trained]) if part.trained in inner.state else {}
            if part.master_dtype is not None:
                entry[MASTER] = part.trained.detach()
            if entry:
                state[part.index] = entry
        return {
            "state": state,
            "param_groups": _packed(self.param_groups),
            KEY: {
                "rank": self._subject.rank,
                "ranks": self._subject.size,
                "pieces": {part.index: list(part.piece) for part in self.owned if part.piece is not None},
                "shapes": {index: list(param.shape) for index, param in enumerate(parameters)},
                # The memory order that the parameters had when they were cut, which may not be the current one.
                "strides": dict(enumerate(map(list, self._sharding.strides))),
                "dtypes": {index: param.dtype for index, param in enumerate(parameters)},
            },
        }

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard, like :meth:`local_state`; see :meth:`full_state_dict` for the whole state.

        Raises:
            UsageError: if ``torch.distributed.checkpoint`` calls this, because it would save only one rank's shard.
        """
        _refuse_torch_checkpoint()
        return self.local_state()

    def full_state_dict(self, to: int | None = None) -> dict[str, Any] | None:
        """Return the state of the unsharded optimizer on every rank, or only on rank `to`; other ranks then get None.

        All ranks must call this. The state can be loaded by an unsharded optimizer, or by a sharded one on any number
        of ranks.
        """
        channel, shard, parameters = self.channel, self.local_state(), self.parameters
        size = 1 if channel is None else channel.size
        if to is not None and not 0 <= to < size:
            raise CheckpointMismatch(
                f"full_state_dict(to={to}) names a rank that does not exist; give a rank below {size}"
            )
        wanted = {index: Window(tuple(param.shape), param.stride(), None) for index, param in enumerate(parameters)}
        assembly = Assembly(wanted) if channel is None or to in (None, channel.rank) else None
        # One shard at a time, so that a rank never holds more than one shard besides its result.
        for rank in range(size):
            part = shard if channel is None else _broadcast_shard(shard, rank, channel, parameters[0].device)
            if assembly is not None:
                assembly.add(part)
        if assembly is None:
            return None
        return {"state": dict(sorted(assembly.state().items())), "param_groups": deepcopy(assembly.groups)}

    def windows(self) -> dict[int, Window]:
        """Return this rank's part of each parameter's state."""
        return {
            part.index: Window(tuple(part.parameter.shape), part.parameter.stride(), part.piece) for part in self.owned
        }

    def load_state_dict(self, state_dict: Mapping[str, Any] | Iterable[Mapping[str, Any]] | Assembly) -> None:
        """Load the state of an unsharded optimizer, this rank's shard, or the shards of all ranks.

        Args:
            state_dict: a state or shard, an iterable of shards, or an assembly of shards.

        Raises:
            CheckpointMismatch: if the state is for other parameters, or a shard is missing or is another rank's.
        """
        self._sharding.follow()
        inner, loaded = self._inner, self._own_part(state_dict)
        # A copy, because schedulers change the groups, and the loaded state belongs to the caller.
        saved = deepcopy(loaded["param_groups"])
        saved_sizes, sizes = ([len(group["params"]) for group in groups] for groups in (saved, self.param_groups))
        if saved_sizes != sizes:
            raise CheckpointMismatch(
                f"the optimizer's state has groups of {saved_sizes} parameters, but this optimizer has groups of "
                f"{sizes}; create the groups that were saved"
            )
        number = {index: place for place, index in enumerate(key for group in saved for key in group["params"])}
        entries = {number.get(index, index): _copied(entry) for index, entry in loaded["state"].items()}
        places = {id(part.trained): place for place, part in enumerate(self.owned)}
        groups = [
            {**settings_of(group), "params": [places[id(trained)] for trained in inner_group["params"]]}
            for group, inner_group in zip(saved, inner.param_groups, strict=True)
        ]
        for part in self.owned:
            master = entries.get(part.index, {}).pop(MASTER, None)
            if part.master_dtype is not None:
                values = part.values() if master is None else master
                part.trained.data = values.to(device=part.parameter.device, dtype=part.master_dtype, copy=True)
        state = {place: entries[part.index] for place, part in enumerate(self.owned) if entries.get(part.index)}
        inner.load_state_dict({"state": state, "param_groups": groups})
        # torch casts a loaded state to the parameter's dtype, which would change state of another dtype.
        for place, part in enumerate(self.owned):
            if place in state and loaded["dtypes"].get(part.index) == part.parameter.dtype:
                uncast(inner.state[part.trained], state[place])
        for group, saved_group in zip(self.param_groups, saved, strict=True):
            names = {"param_names": group["param_names"]} if "param_names" in group else {}
            parameters = group["params"]
            group.clear()
            group.update({**names, **saved_group, "params": parameters})

    def _own_part(self, state: Mapping[str, Any] | Iterable[Mapping[str, Any]] | Assembly) -> dict[str, Any]:
        """Return this rank's part of `state`, in the form of a shard."""
        wanted, subject = self.windows(), self._subject
        if not isinstance(state, Mapping):
            assembly = state if isinstance(state, Assembly) else _assembled(wanted, state)
            return {"state": assembly.state(), "param_groups": assembly.groups, "dtypes": assembly.dtypes}
        if not is_shard(state):
            saved = state["state"]
            parts = {index: cut_state(saved[index], window) for index, window in wanted.items() if index in saved}
            return {"state": parts, "param_groups": state["param_groups"], "dtypes": {}}
        about = state[KEY]
        if about["ranks"] == 1:  # the whole state, which fits any number of ranks
            return self._own_part([state])
        if (about["rank"], about["ranks"]) != (subject.rank, subject.size):
            raise CheckpointMismatch(
                f"rank {subject.rank} of {subject.size} was given the optimizer's shard of rank {about['rank']} of "
                f"{about['ranks']}; load a list with the shards of all ranks, or the result of full_state_dict()"
            )
        # Pieces count elements in memory order, so with different strides they contain different elements.
        pieces = {index: (tuple(piece), tuple(about["strides"][index])) for index, piece in about["pieces"].items()}
        if pieces != {index: (part.piece, part.stride) for index, part in wanted.items() if part.piece is not None}:
            raise CheckpointMismatch(
                f"the shard of rank {subject.rank} was cut differently from this optimizer's parameters; load a list "
                "with the shards of all ranks, or the result of full_state_dict()"
            )
        return {"state": state["state"], "param_groups": state["param_groups"], "dtypes": about["dtypes"]}

    def _refuse_hook(self, *_: Any, **options: Any) -> Any:
        raise UsageError(
            "a ShardedOptimizer does not run hooks on its state dict; change the result of state_dict(), or the "
            "argument of load_state_dict()"
        )

    register_state_dict_pre_hook = register_state_dict_post_hook = _refuse_hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _refuse_hook

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError("a ShardedOptimizer cannot be copied or pickled; create another one and load its state_dict()")


def _refuse_torch_checkpoint() -> None:
    """Refuse calls of the caller by ``torch.distributed.checkpoint``, which keeps one of the tensors of equal names."""
    if sys._getframe(2).f_globals.get("__name__", "").startswith("torch.distributed.checkpoint."):
        raise UsageError(
            "torch.distributed.checkpoint would save or load only one rank's shard of a ShardedOptimizer; use "
            "optimizer.full_state_dict() on all ranks and optimizer.load_state_dict(), or paceline.Checkpointer"
        )


def _packed(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups with parameters replaced by numbers, like torch's optimizers do in their state dicts."""
    packed, first = [], 0
    for group in groups:
        count = len(group["params"])
        settings = {name: value for name, value in group.items() if name != "params"}
        packed.append({**settings, "params": list(range(first, first + count))})
        first += count
    return packed


def _broadcast_shard(
    shard: Mapping[str, Any], source: int, channel: Channel, device: torch.device
) -> Mapping[str, Any]:
    """Return the shard of rank `source` on every rank."""
    tensors: list[Tensor] = []

    def replaced(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        return _Placeholder(tuple(value.shape), value.dtype, value.device.type)

    is_source = channel.rank == source
    plain = _mapped(shard, replaced) if is_source else None
    plain = channel.all_gather_object(plain)[source]
    if not is_source:

        def made(value: Any) -> Any:
            if isinstance(value, _Placeholder):
                # Only the type of the source's device matters, because each rank has its own GPU.
                own_device = value.device if value.device == "cpu" else device
                tensors.append(torch.empty(value.shape, dtype=value.dtype, device=own_device))
                return tensors[-1]
            return value

        plain = _mapped(plain, made)
    channel.broadcast([tensor.reshape(-1) if tensor.dim() == 0 else tensor for tensor in tensors], source)
    return shard if is_source else plain


class _Placeholder:
    """Shape, dtype and device of a tensor that is broadcast separately."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device


def _mapped(value: Any, function: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _mapped(entry, function) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(entry, function) for entry in value)
    return function(value)


def _assembled(wanted: Mapping[int, Window], shards: Iterable[Any]) -> Assembly:
    assembly = Assembly(wanted)
    for shard in shards:
        if not is_shard(shard):
            raise CheckpointMismatch(
                "an entry in the list of shards is not a shard; give the local_state() of every rank"
            )
        assembly.add(shard)
    return assembly


def _copied(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return `entry` with copies of its tensors, because the optimizer changes them in place."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in entry.items()}
