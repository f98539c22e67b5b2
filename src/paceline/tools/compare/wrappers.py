"""Wrappers that stand for ``paceline.DistributedDataParallel`` while a program is compared, with its interface."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.nn.data_parallel import DataParallel
from paceline.tools.compare.modes import Run

Seen = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
"""Function that is called with every forward, and with empty inputs for a step in which this rank has no sample."""


class PlainLoop:
    """The members of Paceline's wrapper that loops call, for wrappers that lack them.

    Weights cost as much as in a script that does this by hand: an all-reduce of one number, and a pass over the
    gradients.
    """

    check_finite = False  # a script with torch DDP does not look for NaN either, so the comparison leaves it out
    comm_hook_state = None
    exposed_seconds = 0.0  # these wrappers do not count it
    stop_agreed = False
    virtual_ranks = None
    is_repeat = False
    slice_number = 0
    total_weight = 0.0
    """Sum of the weights of all ranks in the latest synchronized backward."""

    require_backward_grad_sync: bool

    if TYPE_CHECKING:  # the module's

        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            """Return the module's parameters."""

    _weight = 0.0
    """Weight of the micro-batches since the last synchronization."""

    @property
    def do_sync(self) -> bool:
        """Whether a backward that starts now is synchronized."""
        return self.require_backward_grad_sync

    def enable_grad_sync(self) -> None:
        """Synchronize gradients in the backwards that start from now on."""
        self.require_backward_grad_sync = True

    def disable_grad_sync(self) -> None:
        """Accumulate gradients locally in the backwards that start from now on."""
        self.require_backward_grad_sync = False

    @contextmanager
    def weight(self, weight: float, reduction: str = "sum") -> Iterator[None]:
        """Surround a micro-batch whose loss is a sum over `weight` samples."""
        if reduction != "sum":
            raise UsageError('only Paceline\'s wrapper knows weight(reduction="mean"); leave the other modes out')
        yield
        # Not in a finally: after an error there are no gradients to divide.
        self._weight += weight
        if self.do_sync:
            device = next(self.parameters()).device
            total, self._weight = torch.tensor(float(self._weight), device=device), 0.0
            factor = self._divide(total)
            self.total_weight = total.item()
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _divide(self, weight: Tensor) -> float:
        """Return the factor for gradients that this rank counted with `weight`."""
        raise NotImplementedError

    def sync_gradients(self) -> None:
        """Refuse: a rank without a batch cannot take part in a step of another wrapper."""
        raise UsageError(
            "a rank has no sample in this batch, which only Paceline's wrapper can do; choose a batch size that is at "
            "least the number of ranks, or leave the other modes out"
        )

    def ask_to_stop(self) -> None:
        """Refuse: ranks could only learn of it by a collective of its own."""
        raise UsageError("only Paceline's wrapper lets ranks agree to stop; leave the other modes out")

    def sync_buffers(self) -> bool:
        """Do nothing: these wrappers broadcast buffers before a forward."""
        return False

    def holds_local_gradients(self) -> bool:
        """Return False: these wrappers do not tell."""
        return False

    def check_averaged(self, caller: str) -> None:
        """Do nothing: these wrappers do not tell."""

    def watch(self, sampler: object) -> None:
        """Do nothing: these wrappers do not compare data."""

    @property
    def gradient_bytes_per_step(self) -> int:
        """Bytes of gradient that are all-reduced in a step."""
        return sum(parameter.nbytes for parameter in self.parameters() if parameter.requires_grad)


class TorchDDP(PlainLoop, nn.parallel.DistributedDataParallel):
    """torch's wrapper, on Gloo where the program chose Paceline's group."""

    def __init__(self, module: nn.Module, *arguments: Any, **options: Any) -> None:
        # On our process group, torch's wrapper would be measured with our collectives, which its users do not have.
        if options.get("process_group") is None and dist.get_backend() == "paceline":
            options["process_group"] = dist.new_group(backend="gloo")
        super().__init__(module, *arguments, **options)

    def _divide(self, weight: Tensor) -> float:
        dist.all_reduce(weight, group=self.process_group)
        # torch's wrapper has divided the sum by the number of ranks already.
        return dist.get_world_size(self.process_group) / weight.item()


class Threads(PlainLoop, DataParallel):
    """One process with a thread for each device."""

    require_backward_grad_sync = True
    devices_wanted = 1

    def __init__(self, module: nn.Module, *_: Any, **options: Any) -> None:
        on_cpu = next(module.parameters()).device.type == "cpu"
        devices = None if on_cpu else list(range(self.devices_wanted))
        super().__init__(module, devices, replicas=self.devices_wanted if on_cpu else None)
        self.device = self.devices[0]
        self.process_group = options.get("process_group") or dist.group.WORLD

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: gradients of one process are never synchronized."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _divide(self, weight: Tensor) -> float:
        return 1 / weight.item()


def substitute(run: Run, seen: Seen) -> None:
    """Replace ``DistributedDataParallel`` by the run's wrapper everywhere in Paceline.

    Called before the program is imported, which then takes it from there. `seen` is called with every forward.
    """
    base: Any = {"paceline": DistributedDataParallel, "torch": TorchDDP, "threads": Threads}[run.wrapper]

    class Seeing(base):  # type: ignore[misc]
        devices_wanted = run.devices

        def forward(self, *inputs: Any, **kwargs: Any) -> Any:
            seen(self, inputs, kwargs)
            return super().forward(*inputs, **kwargs)

        def sync_gradients(self) -> None:
            seen(self, (), {})
            super().sync_gradients()

    Seeing.__name__ = Seeing.__qualname__ = "DistributedDataParallel"
    # Names are imported when they are first used, and a module that is imported later would bring the original along.
    assert paceline.train, "importing it imports all of Paceline that a program may take the class from"
    for name, module in list(sys.modules.items()):
        is_ours = name.partition(".")[0] == "paceline" and not name.startswith("paceline.tools.compare")
        if is_ours and vars(module).get("DistributedDataParallel") is DistributedDataParallel:
            vars(module)["DistributedDataParallel"] = Seeing
