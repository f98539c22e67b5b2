"""Registration of a communication hook, which replaces the all-reduce of the buckets."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from paceline.core.state.unwrapping import Communicates
from paceline.core.torch_internals.distributed.ddp import BuiltinCommHookType as Builtin
from paceline.core.torch_internals.distributed.ddp import fuse_optimizer
from paceline.core.torch_internals.distributed.dtensor import local_of
from paceline.ddp.engine.interface import GradientEngine
from paceline.ddp.engine.replica import Replica
from paceline.ddp.options.config import Options
from paceline.ddp.transport.opening import timeout_of
from paceline.ddp.transport.sparse import sparse_by_layer
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.ddp.transport.hook_signature import Hook


class CommHook:
    """The place of one wrapper's communication hook, which is empty or taken once and for all.

    Args:
        process_group: the wrapper's group.
        replica: the wrapper's replica.
        options: the wrapper's options; only ``check_finite`` ever changes.
    """

    registered: list[tuple[Hook, object]]
    """The hook and its state, under torch's name ``_comm_hooks``; empty without a hook, and never more than one."""

    def __init__(self, process_group: dist.ProcessGroup, replica: Replica, options: Options) -> None:
        self.registered = []
        self._process_group, self._replica, self._options = process_group, replica, options

    @property
    def state(self) -> object:
        """State that the hook was registered with; None without a hook."""
        return self.registered[0][1] if self.registered else None

    def register(self, engine: GradientEngine, state: object, hook: Hook) -> None:
        """Register `hook` to reduce the buckets of `engine`; the wrapper's method describes its errors."""
        from paceline.ddp.transport.hook_signature import check_hook

        check_hook(hook)
        self._put(engine, state, hook)

    def register_builtin(self, engine: GradientEngine, comm_hook_type: Any) -> None:
        """Register torch's ``ALLREDUCE`` or ``FP16_COMPRESS``, in the form of its Python hook."""
        hooks = {
            Builtin.ALLREDUCE: default_hooks.allreduce_hook,
            Builtin.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        if comm_hook_type not in hooks:
            raise UsageError(f"{comm_hook_type!r} is no dist.BuiltinCommHookType; give ALLREDUCE or FP16_COMPRESS")
        self._put(engine, self._process_group, hooks[comm_hook_type])

    def register_fused_optimizer(
        self,
        engine: GradientEngine,
        optimizer: type[torch.optim.Optimizer],
        arguments: tuple[Any, ...],
        optimized: Iterable[nn.Parameter] | None,
        keywords: dict[str, Any],
    ) -> None:
        """Register a hook that steps each bucket's parameters as soon as their gradients are reduced.

        Args:
            engine: averages the gradients.
            optimizer: class of the optimizer that steps.
            arguments: arguments of the class.
            optimized: the parameters that it steps; None for all.
            keywords: keyword arguments of the class.
        """
        if self._options.reduce_dtype is not None or self._options.check_replicas_every:
            raise UsageError(
                "a fused optimizer steps with what is in the buckets and counts no steps, so it goes neither with "
                "reduce_dtype nor with check_replicas_every; leave these out"
            )
        # Not imported before somebody uses it: it loads TorchScript, which warns that it is deprecated.
        from torch.distributed.optim import as_functional_optim

        chosen = None if optimized is None else list(optimized)
        self._check_fusible(chosen)
        try:
            functional = as_functional_optim(optimizer, *arguments, **keywords)
        except ValueError as error:
            raise UsageError(f"torch cannot fuse {optimizer.__qualname__} with backward ({error})") from None
        hook = fuse_optimizer(default_hooks.allreduce_hook, functional, chosen)
        self._put(engine, self._process_group, hook, steps_inside=True)

    def _check_fusible(self, chosen: list[nn.Parameter] | None) -> None:
        for name, parameter in self._replica.trained:
            if not parameter.is_contiguous():
                raise UsageError(f"parameter {name!r} is not contiguous in memory, which a fused optimizer mixes up")
        fused = None if chosen is None else {id(parameter) for parameter in chosen}
        sparse = sparse_by_layer(self._replica.module)
        for name, parameter in self._replica.trained:
            if id(parameter) in sparse and (fused is None or id(parameter) in fused):
                raise UsageError(
                    f"parameter {name!r} has sparse gradients, which are averaged apart from the buckets, where a "
                    "fused optimizer would never see them; leave it out of optim_params, or use an optimizer outside"
                )

    def _put(self, engine: GradientEngine, state: object, hook: Hook, *, steps_inside: bool = False) -> None:
        from paceline.ddp.transport.comm_hook import HookFinisher  # few wrappers have one
        from paceline.ddp.transport.hook_signature import name_of

        if self.registered:
            raise UsageError(
                "register_comm_hook or register_builtin_comm_hook can only be called once, and "
                f"{name_of(self.registered[0][0])!r} is registered already; let one hook call the other"
            )
        if self._options.algorithm is not None:
            raise UsageError(
                f"a communication hook takes the place of algorithm={self._options.algorithm!r}; leave one of them out"
            )
        reducer = engine.connected()  # a world of one has buckets only where a hook needs them
        if reducer.virtual_ranks:
            raise UsageError(
                f"communication hook {name_of(hook)!r} adds up gradients in an order of its own; leave it out with "
                f"virtual_ranks={reducer.virtual_ranks}"
            )
        if owner := reducer.finisher.owner:
            raise UsageError(
                f"a communication hook takes the place of the wrapper's all-reduce, as does {owner}; leave one of them "
                "out"
            )
        # A bucket fills earlier on a rank that does not use some of its parameters. There the hook's collective would
        # come before a layer's, and on other ranks after it; usually both are on the process group.
        layers = any(isinstance(layer, nn.SyncBatchNorm | Communicates) for layer in self._replica.module.modules())
        make = partial(
            HookFinisher,
            state,
            hook,
            [local_of(parameter) for parameter in self._replica.parameters()],
            self._replica.ledger,
            timeout_of(self._process_group, self._replica.device),
            steps_inside=steps_inside,
            layers_first=layers and self._options.unused == "allow",
        )
        reducer.use_finisher(make)
        # A hook may average over some of the ranks only, as in local SGD; then replicas differ between two averages.
        self._replica.ledger.compare_at = inf
        self.registered.append((hook, state))
