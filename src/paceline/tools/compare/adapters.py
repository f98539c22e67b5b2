"""Wrappers that replace ``paceline.DistributedDataParallel`` in a compared program."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.nn.data_parallel import DataParallel

TorchDDP = nn.parallel.DistributedDataParallel


class Measured(DistributedDataParallel):
    """Paceline's wrapper, which calls :attr:`seen` before each forward pass."""

    seen: ClassVar[Callable[[nn.Module, Any], None]]
    """Called with the inputs of each forward pass, or with None if a rank without samples synchronizes."""
    devices: ClassVar[int]
    """Number of devices that this variant uses."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        type(self).seen(self, (inputs, kwargs))
        return super().forward(*inputs, **kwargs)

    def sync_gradients(self) -> None:
        type(self).seen(self, None)
        super().sync_gradients()


class Threads(Measured):
    """Paceline's wrapper around DataParallel in a world of one rank: one process with a thread per device."""

    _threads: nn.Module

    def __init__(self, module: nn.Module, *_: Any, **__: Any) -> None:
        super().__init__(module)
        on_cpu, ids = self.device.type == "cpu", list(range(self.devices))
        # Registering it as a module would rename the parameters.
        self.__dict__["_threads"] = DataParallel(module, replicas=len(ids)) if on_cpu else nn.DataParallel(module, ids)

    def _call_module(self, _: Any, inputs: Any, kwargs: Any) -> Any:
        return self._threads(*inputs, **kwargs)


class Torch(Measured):
    """Paceline's wrapper in a group of one rank, around torch's wrapper, which averages the gradients."""

    _torch: TorchDDP
    check_finite = False  # torch's wrapper does not check gradients for NaN
    total_weight = 0.0
    _weight = 0.0
    """Total weight of the micro-batches since the last synchronization."""

    def __init__(self, module: nn.Module, *arguments: Any, **options: Any) -> None:
        bound = inspect.signature(super().__init__).bind(module, *arguments, **options).arguments
        ranks: Any = bound.pop("process_group", None) or dist.group.WORLD
        # Use Gloo, because users of torch's wrapper would not have the "paceline" backend.
        if dist.get_backend(ranks) == "paceline":
            ranks = dist.new_group(dist.get_process_group_ranks(ranks), backend="gloo")
        supported = inspect.signature(TorchDDP).parameters
        accepted = {name: value for name, value in bound.items() if name in supported}
        wrapper = TorchDDP(**accepted, process_group=ranks)
        own_group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        super().__init__(module, process_group=own_group)
        self.__dict__["_torch"] = wrapper  # registering it as a module would rename the parameters
        self.process_group = ranks

    def _call_module(self, _: Any, inputs: Any, kwargs: Any) -> Any:
        self._torch.require_backward_grad_sync = self.do_sync
        return self._torch(*inputs, **kwargs)

    @contextmanager
    def weight(self, weight: Any) -> Iterator[None]:
        """Do what users of torch's wrapper do to weight micro-batches: all-reduce the total and scale the gradients."""
        yield
        self._weight += float(weight)
        if self.do_sync:
            total = torch.tensor(self._weight, device=self.device)
            dist.all_reduce(total, group=self.process_group)
            self._weight, self.total_weight = 0.0, total.item()
            # torch's wrapper has already divided the sum by the number of ranks.
            scale = dist.get_world_size(self.process_group) / self.total_weight
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)

    def sync_gradients(self) -> NoReturn:
        raise UsageError(
            "a rank has no sample in this batch, which only Paceline's wrapper allows; choose a batch size of at least "
            "the number of ranks, or compare with --modes ddp"
        )

    def ask_to_stop(self) -> NoReturn:
        raise UsageError("only Paceline's wrapper lets ranks agree to stop; compare with --modes ddp")


def substitute(mode: str, devices: int, on_forward: Callable[[nn.Module, Any], None]) -> None:
    """Make ``DistributedDataParallel(…)`` and its subclasses construct the wrapper of `mode` in this process."""
    kind: Any = {"dp": Threads, "ddp-torch": Torch}.get(mode, Measured)
    kind.seen, kind.devices = staticmethod(on_forward), devices

    def new(cls: type, *_: Any, **__: Any) -> Any:
        if not issubclass(cls, kind):
            cls = kind if cls is DistributedDataParallel else type(cls.__name__, (cls, kind), {})
        return object.__new__(cls)

    DistributedDataParallel.__new__ = new  # type: ignore[method-assign]
