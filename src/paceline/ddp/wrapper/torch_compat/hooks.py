"""Registration of a communication hook, which replaces the all-reduce of the buckets."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed import BuiltinCommHookType as Builtin
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from paceline.compression import Compressor
from paceline.core.state.unwrapping import Communicates
from paceline.core.torch_internals.distributed.dtensor import local_of
from paceline.ddp.transport.comm_hook import HookFinisher
from paceline.ddp.transport.hook_signature import Hook, name_of
from paceline.ddp.transport.opening import timeout_of
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.ddp.wrapper.torch_compat.members import TorchMembers

_BUILTIN = {
    Builtin.ALLREDUCE: default_hooks.allreduce_hook,
    Builtin.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}


def builtin_hook(comm_hook_type: Any) -> Hook:
    """Return torch's Python hook for ``ALLREDUCE`` or ``FP16_COMPRESS``."""
    if comm_hook_type not in _BUILTIN:
        raise UsageError(f"{comm_hook_type!r} is not a dist.BuiltinCommHookType; give ALLREDUCE or FP16_COMPRESS")
    return _BUILTIN[comm_hook_type]


def put_hook(wrapper: TorchMembers, state: object, hook: Hook) -> None:
    """Use `hook` instead of the all-reduce to reduce the buckets of `wrapper` from now on."""
    if wrapper._comm_hooks:
        raise UsageError(
            "register_comm_hook or register_builtin_comm_hook can only be called once, and "
            f"{name_of(wrapper._comm_hooks[0][0])!r} is registered already; let one hook call the other"
        )
    options, replica = wrapper._options, wrapper._replica
    reducer = wrapper._engine.connected()  # on a single rank, only a hook needs buckets
    if reducer.virtual_ranks:
        raise UsageError(
            f"communication hook {name_of(hook)!r} adds up gradients in another order; leave it out with "
            f"virtual_ranks={reducer.virtual_ranks}"
        )
    if isinstance(state, Compressor) and state.group is not wrapper.process_group:
        raise UsageError(
            f"{type(state).__name__} was not created for this wrapper's process group; create it from the wrapped "
            f"model: {type(state).__name__}(model, ...)"
        )
    # A bucket fills earlier on a rank that does not use some of its parameters. There, the hook's collective would
    # precede a layer's collective, but on other ranks it would follow; both usually use the same process group.
    layers = any(isinstance(layer, nn.SyncBatchNorm | Communicates) for layer in replica.module.modules())
    make = partial(
        HookFinisher,
        state,
        hook,
        [local_of(parameter) for parameter in replica.parameters()],
        replica.ledger,
        timeout_of(wrapper.process_group, replica.device),
        layers_first=layers and options.unused == "allow",
    )
    reducer.use_finisher(make)
    # A hook may average over only some of the ranks (local SGD); replicas then differ between averages.
    replica.ledger.compare_at = inf
    wrapper._comm_hooks.append((hook, state))
