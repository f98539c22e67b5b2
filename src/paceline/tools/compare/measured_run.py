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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.core.state.buckets import CAPACITY
from paceline.core.state.digests import tensor_digest
from paceline.core.state.unwrapping import unwrap
from paceline.errors import UsageError
from paceline.nn.data_parallel import nested_tensors
from paceline.profiler.recording.environment import peak_memory
from paceline.tools.compare.modes import Run
from paceline.tools.compare.sm_occupancy import OccupancyMeter
from paceline.tools.compare.turn_taking import TURN, Turns
from paceline.tools.compare.wrappers import substitute

WARM_UP = 3
"""Steps that are not timed: in the first ones buckets find their order and memory is allocated."""
SAMPLED = 2**16
"""Elements of each parameter that are kept for comparing the modes' weights, because all of a large model's would take
as much disk as a checkpoint for each mode."""


def main(text: str) -> None:
    """Run the program until it has taken enough steps; rank 0 writes the record."""
    run = Run.from_json(text)
    meter = Meter(run)
    substitute(run, meter.seen)  # before the program is imported, which takes the class from Paceline then
    register_optimizer_step_post_hook(meter.stepped)
    # The modes run side by side, and their prints would mix with the comparison's own.
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    try:
        if run.recipe is not None:
            # After the substitution, so that the recipe gets the class of this mode.
            importlib.import_module(f"paceline.tools.recipes.{run.recipe}").main(*run.arguments)
        else:
            sys.argv = list(run.arguments)
            # As Python itself does, which resolves links; run_path() leaves the path as it is.
            sys.path.insert(0, os.path.dirname(os.path.realpath(run.arguments[0])))
            runpy.run_path(run.arguments[0], run_name="__main__")
    except Enough:
        return
    except SystemExit as stop:  # such as sys.exit(main())
        if stop.code not in (None, 0):
            raise
    raise UsageError(
        f"the program took {len(meter.steps)} optimizer steps over a model in DistributedDataParallel, and a "
        f"comparison needs {WARM_UP + run.steps}: {WARM_UP} to warm up, and --steps {run.steps}; let it train longer, "
        "or give a smaller --steps"
    )


class Enough(SystemExit):
    """Ends the program: it has taken as many steps as are measured."""


class Step(NamedTuple):
    """The measurements of one step on this rank."""

    seconds: float
    waited: float
    """Seconds of waiting for communication."""
    batches: int
    """Number of forwards, or 1 where several wrapped models have theirs."""
    rows: int
    """Rows of all these batches."""
    largest: int
    """Rows of the largest batch."""


class Meter:
    """Counts and times the steps of a program.

    A step ends when the optimizer steps that was first seen last, so that it holds one step of every optimizer where
    several take turns, as for a generator and a discriminator.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.wrappers: list[Any] = []
        """Wrapped models, in the order of their first forwards."""
        self.steps: list[Step] = []
        """Steps that have ended, the warm-up's included."""
        self.all_reduce_seconds: list[float] = []
        """Seconds of all-reducing the gradients of a step while nothing else runs, measured at the end of each turn."""
        self._buckets: list[Tensor] = []
        """For each wrapper, a bucket that stands for all of its buckets, so that measuring takes little memory."""
        self._turns = Turns(run.place)
        self._occupancy: OccupancyMeter | None = None
        """Measures the timed steps; made when the warm-up ends, because a program chooses its device itself."""
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._last: torch.optim.Optimizer | None = None
        """The optimizer whose first step came after the first steps of all others."""
        self._rows: list[int] = []
        """Rows of each forward since the last step, on this rank."""
        self._start = time.perf_counter()
        """Begin of the present step."""
        self._waited = 0.0
        """Seconds that all wrappers had waited by the end of the last step."""

    def seen(self, wrapper: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a forward that a backward may follow."""
        if wrapper.training and torch.is_grad_enabled():
            if all(wrapper is not other for other in self.wrappers):
                self.wrappers.append(wrapper)
            self._rows.append(next((len(each) for each in nested_tensors((inputs, kwargs)) if each.dim()), 0))

    def stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Take the time of a step, and wait for the next turn where one is over."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._last = optimizer
        # Other optimizers of the same step, and steps without a forward of a wrapper, end no step.
        if optimizer is not self._last or not self._rows:
            return
        # The host runs ahead of a GPU; the step lasts until the GPU has done its work.
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._start
        waited = sum(wrapper.exposed_seconds for wrapper in self.wrappers)
        several = len(self.wrappers) > 1  # then the batches cannot be told: each may go through any of the models
        batches, rows = (1, self._rows[0]) if several else (len(self._rows), sum(self._rows))
        largest = self._rows[0] if several else max(self._rows)
        self.steps.append(Step(seconds, waited - self._waited, batches, rows, largest))
        self._rows, self._waited = [], waited
        timed = len(self.steps) - WARM_UP
        if timed >= 0 and (timed % TURN == 0 or timed == self.run.steps):
            self._end_turn(is_last=timed == self.run.steps)
        self._start = time.perf_counter()

    def _end_turn(self, *, is_last: bool) -> None:
        """Give the turn to the other modes, and wait for the next one of this mode."""
        if self._occupancy is None:
            self._occupancy = OccupancyMeter()
        else:
            self._occupancy.end()
        # Before the turn is given up: the figure is divided by steps of the same turn.
        self.all_reduce_seconds.append(self._time_all_reduces())
        if is_last:
            self._write()
        self._turns.end()
        if is_last:
            raise Enough(0)
        self._turns.take()
        dist.barrier()  # ranks see that it is their turn up to a nap apart
        self._occupancy.begin()

    def _time_all_reduces(self) -> float:
        """Return this rank's seconds for all-reducing as many bytes as the gradients have, while nothing else runs."""
        if dist.get_world_size() == 1:
            return 0.0
        self._buckets += map(_bucket_for, self.wrappers[len(self._buckets) :])  # for those that are new
        return sum(_timed(wrapper, bucket) for wrapper, bucket in zip(self.wrappers, self._buckets, strict=True))

    def _write(self) -> None:
        """Write the record on rank 0. All ranks call it, after the same step."""
        timed = self.steps[WARM_UP:]
        mine = {
            "seconds": [step.seconds for step in timed],
            "waited": [step.waited for step in timed],
            "batches": [step.batches for step in timed],
            "rows": [step.rows for step in timed],
            "largest": max(step.largest for step in timed),
            "memory": peak_memory(),
            "sm_occupancy": None if self._occupancy is None else self._occupancy.mean(),
            "sha256": _sha256(self.wrappers),
        }
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        if dist.get_rank() == 0:
            seconds = self.all_reduce_seconds[1:]  # the first one is that of the warm-up
            record = {"ranks": ranks, "all_reduce_seconds": seconds, "wrappers": len(self.wrappers)}
            Path(self.run.record).write_text(json.dumps(record), "utf-8")
            save_file(_sampled_weights(self.wrappers), f"{self.run.record}.safetensors")
        dist.barrier()


def _sha256(wrappers: Sequence[nn.Module]) -> str:
    """Return a digest of all parameters; torch's wrapper lets buffers differ."""
    digests = (tensor_digest(parameter) for wrapper in wrappers for parameter in wrapper.parameters())
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _sampled_weights(wrappers: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return up to :data:`SAMPLED` elements of each parameter, evenly spread."""
    weights = {}
    for number, wrapper in enumerate(wrappers):
        for name, parameter in unwrap(wrapper).named_parameters():
            flat = parameter.detach().flatten()
            # Contiguous, because safetensors stores no others.
            weights[f"{number}.{name}"] = flat[:: max(1, -(-flat.numel() // SAMPLED))].cpu().contiguous()
    return weights


def _bucket_for(wrapper: Any) -> Tensor:
    """Return zeros, in the group's shared memory if it has any, because the wrapper's buckets lie there."""
    group, parameter = wrapper.process_group, next(wrapper.parameters())
    numel = min(int(wrapper.gradient_bytes_per_step), CAPACITY) // parameter.element_size()
    if parameter.device.type == "cpu" and getattr(group, "native", False):
        shared: Tensor = group.allocate(numel, parameter.dtype)
        return shared
    return torch.zeros(numel, dtype=parameter.dtype, device=parameter.device)


def _timed(wrapper: Any, bucket: Tensor) -> float:
    group, left = wrapper.process_group, int(wrapper.gradient_bytes_per_step) // bucket.element_size()
    dist.barrier(group=group)
    start = time.perf_counter()
    while left:
        part = bucket[: min(left, len(bucket))]
        dist.all_reduce(part, group=group)
        left -= len(part)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start
