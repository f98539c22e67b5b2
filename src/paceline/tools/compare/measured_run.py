"""One rank of a compared run: the unchanged program, with hooks that time its optimizer steps."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.core.digests import tensor_digest
from paceline.core.unwrapping import unwrap
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.nn.data_parallel import DataParallel, nested_tensors
from paceline.profiler.environment import Enough, peak_memory, run_program
from paceline.tools.compare.modes import Run

TURN = 2
"""Optimizer steps in a turn. Short turns give more ratios for the median."""
NAP_S = 0.01
"""Polling interval in seconds."""
TorchDDP = nn.parallel.DistributedDataParallel
WARM_UP = 3
"""Steps before timing starts; in these, buckets get their final order and memory is allocated."""
SAMPLED = 2**16
"""Maximum number of elements to compare per parameter. All elements would take the space of a checkpoint each."""


def main(text: str) -> None:
    """Run the program until it has taken enough steps; rank 0 writes the record."""
    run = Run.from_json(text)
    meter = Meter(run)
    substitute(run.mode, run.devices, meter.seen)
    register_optimizer_step_post_hook(meter.stepped)
    # Otherwise, the output of the program would mix with the output of the comparison.
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    try:
        run_program(run.program)
    except Enough:
        return
    except SystemExit as stop:  # such as sys.exit(main())
        if stop.code not in (None, 0):
            raise
    raise UsageError(
        f"the program took {len(meter.seconds)} optimizer steps of a wrapped model, but a comparison needs "
        f"{WARM_UP + run.steps}: {WARM_UP} to warm up and --steps {run.steps}; train longer, or give a smaller --steps"
    )


class Meter:
    """Counts and times the steps of a program.

    If several optimizers alternate, as in a GAN, a step ends with the optimizer that made its first step last. A timed
    step therefore includes a step of every optimizer.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.wrappers: list[Any] = []
        """Wrapped models, in the order of their first forward pass."""
        self.seconds: list[float] = []
        """Seconds of each step, including the warm-up."""
        self.samples: list[int] = []
        """Samples of each of these steps."""
        self._turns = Turns(*run.turns)
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._last: torch.optim.Optimizer | None = None
        """The optimizer that ends a step."""
        self._forwards: list[int] = []
        """Samples of each forward pass since the last step."""
        self._start = time.perf_counter()
        """Start of the current step."""

    def seen(self, wrapper: nn.Module, inputs: Any) -> None:
        """Count a forward pass in training mode with gradients enabled."""
        if wrapper.training and torch.is_grad_enabled():
            if all(wrapper is not other for other in self.wrappers):
                self.wrappers.append(wrapper)
            self._forwards.append(next((len(tensor) for tensor in nested_tensors(inputs) if tensor.dim()), 0))

    def stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record the time of a step. At the end of a turn, wait for the next one."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._last = optimizer
        # Steps of other optimizers, or of models without a wrapper, do not count.
        if optimizer is not self._last or not self._forwards:
            return
        # Kernels run asynchronously, so wait for the GPU.
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._start)
        # Several models may all see the same samples, so only the first forward pass counts.
        self.samples.append(self._forwards[0] if len(self.wrappers) > 1 else sum(self._forwards))
        self._forwards = []
        timed = len(self.seconds) - WARM_UP
        if timed == self.run.steps:
            self._write()
            self._turns.end()
            raise Enough(0)
        if timed >= 0 and timed % TURN == 0:
            self._turns.end()
            self._turns.take()
            dist.barrier()  # ranks notice at slightly different times that it is their turn
        self._start = time.perf_counter()

    def _write(self) -> None:
        """Write the record on rank 0. Collective."""
        parameters = [parameter for wrapper in self.wrappers for parameter in wrapper.parameters()]
        record = {
            "seconds": self.seconds[WARM_UP:],
            "samples": sum(self.samples[WARM_UP:]),
            "memory": peak_memory(),
            # Buffers are left out, because they may differ between ranks under torch's wrapper.
            "sha256": hashlib.sha256(b"".join(map(tensor_digest, parameters))).hexdigest(),
        }
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, record)
        if dist.get_rank() == 0:
            Path(self.run.record).write_text(json.dumps({"ranks": ranks}), "utf-8")
            save_file(self._sampled_weights(), f"{self.run.record}.safetensors")
        dist.barrier()

    def _sampled_weights(self) -> dict[str, Tensor]:
        """Return up to :data:`SAMPLED` evenly spaced elements of each parameter."""
        weights = {}
        for number, wrapper in enumerate(self.wrappers):
            for name, parameter in unwrap(wrapper).named_parameters():
                flat = parameter.detach().flatten()
                # safetensors requires contiguous tensors.
                weights[f"{number}.{name}"] = flat[:: max(1, -(-flat.numel() // SAMPLED))].cpu().contiguous()
        return weights


class Turns:
    """The turns of one rank: it trains two steps while the others wait, so machine load affects all variants equally.

    The turns are passed on through a shared file. Every rank appends one byte after its warm-up and one after each of
    its turns, and begins its next turn when the file has reached a certain length. With three variants:

        |  all ranks, warmed up  |  single  |  ddp    |  ddp-torch  |  single  |  ddp    |  …
                                 └ turn 0 of each variant in order  └ turn 1

    Args:
        file: path of a file that all ranks share, empty at first.
        offset: number of ranks whose turns come earlier in each round.
        ranks: number of ranks of all variants.
    """

    def __init__(self, file: str, offset: int, ranks: int) -> None:
        self._file, self._ranks = file, ranks
        self._next = ranks + offset
        """File length at which this rank's next turn begins."""

    def end(self) -> None:
        """End this turn or the warm-up. The next variant begins when all ranks of this variant have ended theirs."""
        with open(self._file, "ab") as file:  # appends from several processes are never lost
            file.write(b".")

    def take(self) -> None:
        """Wait until the next turn begins."""
        while os.stat(self._file).st_size < self._next:
            time.sleep(NAP_S)
        self._next += self._ranks


def substitute(mode: str, devices: int, on_forward: Callable[[nn.Module, Any], None]) -> None:
    """Make ``DistributedDataParallel(…)`` and its subclasses construct the wrapper of `mode` in this process."""
    kind: Any = {"dp": Threads, "ddp-torch": Torch}.get(mode, Measured)
    kind.seen, kind.devices = staticmethod(on_forward), devices

    def new(cls: type, *_: Any, **__: Any) -> Any:
        if not issubclass(cls, kind):
            cls = kind if cls is DistributedDataParallel else type(cls.__name__, (cls, kind), {})
        return object.__new__(cls)

    DistributedDataParallel.__new__ = new  # type: ignore[method-assign]


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
