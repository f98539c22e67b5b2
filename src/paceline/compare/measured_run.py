"""One rank of a compared run: the program as it is, with a meter on its forwards and optimizer steps."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import resource
import runpy
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.compare.modes import Run
from paceline.compare.stand_ins import substitute
from paceline.data_parallel import nested_tensors
from paceline.digests import tensor_digest
from paceline.errors import UsageError
from paceline.unwrapping import unwrap

WARM_UP = 3
"""Steps that are not timed: in the first ones buckets find their order and memory is allocated."""
SAMPLED = 2**16
"""Elements of each parameter that are kept for comparing the modes' weights."""
BUCKET = 25 * 2**20
"""Bytes of an all-reduce, where its time alone is measured."""


def main(text: str) -> None:
    """Run the program until it has taken enough steps; rank 0 writes the record.

    Raises:
        UsageError: if it ends before.
    """
    run = Run.from_json(text)
    meter = Meter(run)
    substitute(run, meter.seen)
    register_optimizer_step_post_hook(meter.stepped)
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    try:
        if run.recipe is not None:
            importlib.import_module(f"paceline.recipes.{run.recipe}").main(*run.arguments)
        else:
            sys.argv = list(run.arguments)
            sys.path.insert(0, str(Path(run.arguments[0]).absolute().parent))
            runpy.run_path(run.arguments[0], run_name="__main__")
    except Enough:
        return
    raise UsageError(
        f"the program took {len(meter.ends)} optimizer steps over a model in DistributedDataParallel, and a comparison "
        f"needs {WARM_UP + run.steps}: {WARM_UP} to warm up, and --steps {run.steps}; let it train longer, or give a "
        "smaller --steps"
    )


class Enough(SystemExit):
    """Ends the program: it has taken as many steps as are measured."""


class Meter:
    """Counts and times the steps of a program."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.wrapper: Any = None
        """The wrapper whose forward ran last."""
        self.ends: list[float] = []
        """When each step ended."""
        self.waits: list[float] = []
        """The wrapper's waiting for communication, in seconds, up to each of them."""
        self.batches: list[int] = []
        """Forwards of each step."""
        self.rows: list[int] = []
        """Rows of these forwards on this rank."""
        self._forwards = self._rows = 0  # since the last step

    def seen(self, wrapper: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a forward that a backward may follow."""
        if wrapper.training and torch.is_grad_enabled():
            self.wrapper = wrapper
            self._forwards += 1
            self._rows += next((len(tensor) for tensor in nested_tensors((inputs, kwargs)) if tensor.dim()), 0)

    def stepped(self, *_: Any) -> None:
        """Take the time of an optimizer step; further optimizers of the same batch belong to it.

        Raises:
            Enough: after the last one.
        """
        if not self._forwards:
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        self.waits.append(self.wrapper.exposed_seconds)
        self.batches.append(self._forwards)
        self.rows.append(self._rows)
        self._forwards = self._rows = 0
        if len(self.ends) == WARM_UP + self.run.steps:
            self._end()

    def _end(self) -> NoReturn:
        """Write the record and end the program, on all ranks after the same step."""
        mine = {
            "seconds": [end - start for start, end in zip(self.ends[WARM_UP - 1 :], self.ends[WARM_UP:], strict=False)],
            "waited": self.waits[-1] - self.waits[WARM_UP - 1],
            "batches": self.batches[WARM_UP:],
            "rows": self.rows[WARM_UP:],
            "memory": _peak_memory(),
            "sha256": _sha256(self.wrapper),
        }
        group = self.wrapper.process_group
        ranks: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(ranks, mine, group=group)
        alone = _all_reduce_alone(self.wrapper) if len(ranks) > 1 else 0.0
        if dist.get_rank() == 0:
            record = {"ranks": ranks, "all_reduce_seconds": alone, "threads": torch.get_num_threads()}
            Path(self.run.record).write_text(json.dumps(record), "utf-8")
            save_file(_sampled_weights(self.wrapper), f"{self.run.record}.safetensors")
        dist.barrier(group=group)
        raise Enough(0)


def _sha256(model: nn.Module) -> str:
    """Return a digest of all parameters; torch's wrapper lets buffers differ."""
    digests = (tensor_digest(parameter) for parameter in model.parameters())
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _peak_memory() -> int:
    """Return bytes: of the GPU where one is used, else of the process."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _all_reduce_alone(wrapper: Any, repeats: int = 5) -> float:
    """Return the median time in which this rank all-reduces all gradients of a step while nothing else runs."""
    group, device = wrapper.process_group, next(wrapper.parameters()).device
    total = int(wrapper.gradient_bytes_per_step)
    sizes = [BUCKET // 4] * (total // BUCKET) + ([total % BUCKET // 4] if total % BUCKET else [])
    buckets = [_allocate(group, size, device) for size in sizes]
    seconds = []
    for _ in range(repeats):
        dist.barrier(group=group)
        start = time.perf_counter()
        for bucket in buckets:
            dist.all_reduce(bucket, group=group)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def _allocate(group: Any, numel: int, device: torch.device) -> Tensor:
    """Return float32 zeros, in the group's shared memory if it has any, as the wrapper's buckets are."""
    if device.type == "cpu" and getattr(group, "native", False):
        shared: Tensor = group.allocate(numel, torch.float32)
        return shared
    return torch.zeros(numel, device=device)


def _sampled_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return up to :data:`SAMPLED` elements of each parameter, evenly spread."""
    weights = {}
    for name, parameter in unwrap(model).named_parameters():
        flat = parameter.detach().flatten()
        weights[name] = flat[:: max(1, -(-flat.numel() // SAMPLED))].cpu().contiguous()
    return weights
