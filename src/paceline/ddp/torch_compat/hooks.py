"""What puts something else in the place of the all-reduce: torch's methods that register communication hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType as Builtin
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.config import Options
from paceline.ddp.engine.reducer import Reducer
from paceline.ddp.engine.sparse import sparse_by_layer
from paceline.ddp.transport.channel import timeout_of
from paceline.ddp.transport.comm_hook import Hook, HookFinisher, check_hook, name_of
from paceline.errors import UsageError
from paceline.torch_internals.dtensor import local_of
from paceline.unwrapping import Communicates


class TakesHooks:
    """Comes before torch's class among the wrapper's bases."""

    module: nn.Module
    process_group: dist.ProcessGroup
    device: torch.device
    _ledger: Ledger
    _comm_hooks: list[tuple[Hook, object]]
    _options: Options
    _check_replicas_every: int

    def _whole_reducer(self) -> Reducer:
        raise NotImplementedError

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let ``hook(state, bucket)`` take the place of the all-reduce of every bucket, with torch's contract.

        The bucket holds this rank's own gradients. The hook returns a future of what they become, which by contract is
        the mean over the ranks; with :meth:`weight` it is then multiplied by N/Σw. Hooks are called in the same order
        on every rank, also in a world of one, on all buckets in each synchronized backward, and on a rank without
        gradients with zeros. Late gradients (reentrant checkpointing) are averaged without the hook.

        Call it on all ranks alike, between steps, and once.

        Raises:
            HookError: if `hook` is not callable or its signature is not that of a hook. In backward: if it raises,
                or returns something else than a future of one tensor like ``bucket.buffer()``.
            UsageError: if there is a hook already.
            DesyncError: in backward, if the hook failed on another rank.
        """
        check_hook(hook)
        self._put(state, hook)

    @property
    def comm_hook_state(self) -> object:
        """What :meth:`register_comm_hook` was given as the hook's state; None without a hook."""
        return self._comm_hooks[0][1] if self._comm_hooks else None

    def _put(self, state: object, hook: Hook) -> HookFinisher:
        if self._comm_hooks:
            raise UsageError(
                "register_comm_hook or register_builtin_comm_hook can only be called once, and "
                f"{name_of(self._comm_hooks[0][0])!r} is registered already; let one hook call the other"
            )
        if self._options.algorithm is not None:
            raise UsageError(
                f"a communication hook takes the place of algorithm={self._options.algorithm!r}; leave one of them out"
            )
        reducer = self._whole_reducer()
        rank = dist.get_rank(self.process_group)
        parameters = [local_of(parameter) for _, parameter in self._named_trained()]
        timeout = timeout_of(self.process_group, self.device)
        finisher = HookFinisher(state, hook, parameters, rank, self._ledger, timeout)
        # A bucket fills earlier on a rank that does not use some of it, and then comes before a layer's collective
        # there and after it elsewhere; both are on the process group as a rule.
        layers = any(isinstance(layer, nn.SyncBatchNorm | Communicates) for layer in self.module.modules())
        finisher.layers_first = layers and self._options.unused == "allow"
        reducer.finish_with(finisher)
        self._comm_hooks.append((hook, state))
        return finisher

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Register torch's ``ALLREDUCE`` or ``FP16_COMPRESS``, which torch has in C++ and here are its own in Python.

        Raises:
            UsageError: for another type, or if there is a hook already.
        """
        hooks = {
            Builtin.ALLREDUCE: default_hooks.allreduce_hook,
            Builtin.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        if comm_hook_type not in hooks:
            raise UsageError(f"{comm_hook_type!r} is no dist.BuiltinCommHookType; give ALLREDUCE or FP16_COMPRESS")
        self._put(self.process_group, hooks[comm_hook_type])

    def _register_fused_optim(
        self, optim: type[torch.optim.Optimizer], *args: Any, optim_params: Any = None, **kwargs: Any
    ) -> None:
        """Have `optim` step each bucket's parameters as soon as their gradients are reduced, as torch does it.

        Raises:
            UsageError: for an optimizer that torch cannot run so, a parameter whose memory is not contiguous (torch's
                hook would mix up its elements) or whose gradients are sparse (it would not see them), or if there is
                a hook already. In backward: under :meth:`weight`.
        """
        if self._options.reduce_dtype is not None or self._check_replicas_every:
            raise UsageError(
                "a fused optimizer steps with what is in the buckets and counts no steps, so it goes neither with "
                "reduce_dtype nor with check_replicas_every; leave these out"
            )
        from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks as overlap
        from torch.distributed.optim import as_functional_optim

        for name, parameter in self._named_trained():
            if not parameter.is_contiguous():
                raise UsageError(f"parameter {name!r} is not contiguous in memory, which a fused optimizer mixes up")
        chosen = None if optim_params is None else list(optim_params)
        fused = None if chosen is None else {id(parameter) for parameter in chosen}
        sparse = sparse_by_layer(self.module)
        for name, parameter in self._named_trained():
            if id(parameter) in sparse and (fused is None or id(parameter) in fused):
                raise UsageError(
                    f"parameter {name!r} has sparse gradients, which are averaged apart from the buckets, where a "
                    "fused optimizer would never see them; leave it out of optim_params, or use an optimizer outside"
                )
        try:
            functional = as_functional_optim(optim, *args, **kwargs)
        except ValueError as error:
            raise UsageError(f"torch cannot fuse {optim.__qualname__} with backward ({error})") from None
        hook = overlap._hook_then_optimizer(
            default_hooks.allreduce_hook, overlap._OptimizerHookState(functional, chosen)
        )
        self._put(self.process_group, hook).steps_inside = True

    def _named_trained(self) -> list[tuple[str, nn.Parameter]]:
        raise NotImplementedError
