"""Registration of a communication hook, which replaces the all-reduce of the buckets."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from paceline.core.state.unwrapping import Communicates
from paceline.core.torch_internals.distributed.ddp import BuiltinCommHookType as Builtin
from paceline.core.torch_internals.distributed.dtensor import local_of
from paceline.ddp.engine.interface import GradientEngine
from paceline.ddp.engine.replica import Replica
from paceline.ddp.options.config import Options
from paceline.ddp.transport.opening import timeout_of
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
            raise UsageError(f"{comm_hook_type!r} is not a dist.BuiltinCommHookType; give ALLREDUCE or FP16_COMPRESS")
        self._put(engine, self._process_group, hooks[comm_hook_type])

    def _put(self, engine: GradientEngine, state: object, hook: Hook) -> None:
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
        reducer = engine.connected()  # a world of one has buckets only for a hook
        if reducer.virtual_ranks:
            raise UsageError(
                f"communication hook {name_of(hook)!r} adds up gradients in another order; leave it out with "
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
            layers_first=layers and self._options.unused == "allow",
        )
        reducer.use_finisher(make)
        # A hook may average over some of the ranks only (local SGD); then replicas differ between two averages.
        self._replica.ledger.compare_at = inf
        self.registered.append((hook, state))
