"""One rank of a compared run: the unchanged program, with hooks that time its optimizer steps."""

from __future__ import annotations

import hashlib
import json
import os
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
from paceline.errors import UsageError
from paceline.nn.data_parallel import nested_tensors
from paceline.profiler.recording.environment import peak_memory
from paceline.profiler.recording.program import Enough, run_program
from paceline.tools.compare.adapters import substitute
from paceline.tools.compare.modes import Run
from paceline.tools.compare.turn_taking import TURN, Turns

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
