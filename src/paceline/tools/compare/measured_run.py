"""One rank of a compared run: the program as it is, with a meter on its forwards and optimizer steps."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import runpy
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.core.state.digests import tensor_digest
from paceline.core.state.unwrapping import unwrap
from paceline.ddp.options.buckets import CAPACITY
from paceline.errors import UsageError
from paceline.nn.data_parallel import nested_tensors
from paceline.profiler.recording.environment import peak_memory
from paceline.tools.compare.adapters import substitute
from paceline.tools.compare.modes import Run
from paceline.tools.compare.turn_taking import TURN, Turns

WARM_UP = 3
"""Steps that are not timed: in the first ones buckets find their order and memory is allocated."""
SAMPLED = 2**16
"""Elements of each parameter that are compared, because all of a large model's would take as much disk as a
checkpoint for each way."""


def main(text: str) -> None:
    """Run the program until it has taken enough steps; rank 0 writes the record."""
    run = Run.from_json(text)
    meter = Meter(run)
    substitute(run.mode, run.devices, meter.seen)
    register_optimizer_step_post_hook(meter.stepped)
    # The ways run side by side, and their prints would mix with the comparison's own.
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    target, *arguments = run.arguments
    try:
        if run.is_recipe:
            importlib.import_module(f"paceline.tools.recipes.{target}").main(*arguments)
        else:
            sys.argv = run.arguments
            # As Python itself does, which resolves links; run_path() leaves the path as it is.
            sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
            runpy.run_path(target, run_name="__main__")
    except Enough:
        return
    except SystemExit as stop:  # such as sys.exit(main())
        if stop.code not in (None, 0):
            raise
    raise UsageError(
        f"the program took {len(meter.seconds)} optimizer steps over a model in DistributedDataParallel, and a "
        f"comparison needs {WARM_UP + run.steps}: {WARM_UP} to warm up, and --steps {run.steps}; let it train longer, "
        "or give a smaller --steps"
    )


class Enough(SystemExit):
    """Ends the program: it has taken as many steps as are measured."""


class Meter:
    """Counts and times the steps of a program.

    A step ends when the optimizer steps that was first seen last, so that it holds one step of every optimizer where
    several take turns, as for a generator and a discriminator.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.wrappers: list[Any] = []
        """Wrapped models, in the order of their first forwards."""
        self.seconds: list[float] = []
        """Seconds of each step that has ended, the warm-up's included."""
        self.waited: list[float] = []
        """Seconds that each of these waited for communication."""
        self.samples: list[int] = []
        """Samples of each of these."""
        self.all_reduce_seconds: list[float] = []
        """Seconds of all-reducing the gradients of a step while nothing else runs, measured at the end of each turn."""
        self._bucket: Tensor | None = None
        """Stands for all buckets, so that measuring takes little memory."""
        self._turns = Turns(*run.turns)
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._last: torch.optim.Optimizer | None = None
        """The optimizer whose first step came after the first steps of all others."""
        self._forwards: list[int] = []
        """Samples of each forward since the last step."""
        self._start = time.perf_counter()
        """Begin of the present step."""

    def seen(self, wrapper: nn.Module, inputs: Any) -> None:
        """Count a forward that a backward may follow."""
        if wrapper.training and torch.is_grad_enabled():
            if all(wrapper is not other for other in self.wrappers):
                self.wrappers.append(wrapper)
            self._forwards.append(next((len(tensor) for tensor in nested_tensors(inputs) if tensor.dim()), 0))

    def stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Take the time of a step, and wait for the next turn where one is over."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._last = optimizer
        # Other optimizers of the same step, and steps without a forward of a wrapper, end no step.
        if optimizer is not self._last or not self._forwards:
            return
        # The host runs ahead of a GPU; the step lasts until the GPU has done its work.
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._start)
        self.waited.append(sum(wrapper.exposed_seconds for wrapper in self.wrappers) - sum(self.waited))
        # With several models each may see the same samples, so those of the first forward count.
        self.samples.append(self._forwards[0] if len(self.wrappers) > 1 else sum(self._forwards))
        self._forwards = []
        timed = len(self.seconds) - WARM_UP
        if timed >= 0 and (timed % TURN == 0 or timed == self.run.steps):
            # Before the turn is given up: the figure is divided by steps of the same turn.
            self.all_reduce_seconds.append(self._time_all_reduces())
            if timed == self.run.steps:
                self._write()
                self._turns.end()
                raise Enough(0)
            self._turns.end()
            self._turns.take()
            dist.barrier()  # ranks see that it is their turn up to a nap apart
        self._start = time.perf_counter()

    def _time_all_reduces(self) -> float:
        """Return this rank's seconds for all-reducing as many bytes as the gradients have, while nothing else runs."""
        group = self.wrappers[0].process_group
        if dist.get_world_size(group) == 1:
            return 0.0
        trained = [each for wrapper in self.wrappers for each in wrapper.parameters() if each.requires_grad]
        left = sum(parameter.nbytes for parameter in trained) // trained[0].element_size()
        if self._bucket is None:
            self._bucket = _bucket_for(group, trained[0], min(left, CAPACITY // trained[0].element_size()))
        dist.barrier(group=group)
        start = time.perf_counter()
        while left > 0:
            part = self._bucket[:left]
            dist.all_reduce(part, group=group)
            left -= len(part)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def _write(self) -> None:
        """Write the record on rank 0. All ranks call it, after the same step."""
        parameters = [parameter for wrapper in self.wrappers for parameter in wrapper.parameters()]
        mine = {
            "seconds": self.seconds[WARM_UP:],
            "waited": self.waited[WARM_UP:],
            "samples": sum(self.samples[WARM_UP:]),
            "memory": peak_memory(),
            # Of parameters alone, because torch's wrapper lets buffers differ.
            "sha256": hashlib.sha256(b"".join(map(tensor_digest, parameters))).hexdigest(),
        }
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        if dist.get_rank() == 0:
            seconds = self.all_reduce_seconds[1:]  # the first one is that of the warm-up
            record = {"ranks": ranks, "all_reduce_seconds": seconds}
            Path(self.run.record).write_text(json.dumps(record), "utf-8")
            save_file(self._sampled_weights(), f"{self.run.record}.safetensors")
        dist.barrier()

    def _sampled_weights(self) -> dict[str, Tensor]:
        """Return up to :data:`SAMPLED` elements of each parameter, evenly spread."""
        weights = {}
        for number, wrapper in enumerate(self.wrappers):
            for name, parameter in unwrap(wrapper).named_parameters():
                flat = parameter.detach().flatten()
                # Contiguous, because safetensors stores no others.
                weights[f"{number}.{name}"] = flat[:: max(1, -(-flat.numel() // SAMPLED))].cpu().contiguous()
        return weights


def _bucket_for(group: Any, parameter: Tensor, numel: int) -> Tensor:
    """Return zeros, in the group's shared memory if it has any, because the wrapper's buckets lie there."""
    if parameter.device.type == "cpu" and getattr(group, "native", False):
        shared: Tensor = group.allocate(numel, parameter.dtype)
        return shared
    return torch.zeros(numel, dtype=parameter.dtype, device=parameter.device)
