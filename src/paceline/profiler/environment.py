"""The profiled program: runs it, and describes its machine and model for a rank's record."""

from __future__ import annotations

import os
import platform
import resource
import runpy
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.core.host import cores
from paceline.core.unwrapping import plain_name
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.nn.data_parallel import nested_tensors
from paceline.profiler.rank_file import KILLED, RankRecord


class Enough(SystemExit):
    """Raised to end the program after the last requested step."""


def run_program(program: list[str]) -> None:
    """Run a script, or a module after ``-m``, with its arguments."""
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = program
    script = os.path.abspath(program[0])
    # Like Python, resolve links: modules are next to the link's target.
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    runpy.run_path(script, run_name="__main__")


def place() -> tuple[int, int]:
    """Return the rank and the world size, from environment variables until a process group exists."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def check_world(record: RankRecord) -> None:
    """Raise an error if the process group was created after recording began and gave this process another rank."""
    world = place()
    if (record.rank, record.size) != world:
        raise UsageError(
            f"the profile began on rank {record.rank} of {record.size}, but this is rank {world[0]} of {world[1]} now; "
            "call paceline.init() or init_process_group before `with paceline.profiler.profile(…)`"
        )


def describe_rank(title: str = "") -> RankRecord:
    """Return a record of this rank, still without steps. The title defaults to the command line."""
    rank, size = place()
    return RankRecord(
        rank=rank,
        size=size,
        title=title or " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        host=platform.node(),
        device="cpu",
        threads=torch.get_num_threads(),
        cores=cores(),
        started_ns=time_of_day(),
        began_ns=time.time_ns(),
        ended=KILLED,
    )


def describe_model(record: RankRecord, wrapper: Any, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Add facts about the wrapper, which may be None, and the memory of the optimizers to `record`."""
    record.memory["peak"] = peak_memory()
    record.threads, record.cores = torch.get_num_threads(), cores()  # the program may have set them
    if wrapper is None:
        return
    with suppress(ValueError):  # the group was destroyed
        record.backend = str(dist.get_backend(wrapper.process_group))
    record.wrapper = "paceline" if isinstance(wrapper, DistributedDataParallel) else "torch"
    named = list(wrapper.module.named_parameters())
    trained = {plain_name(name): parameter.nbytes for name, parameter in named if parameter.requires_grad}
    record.parameters = list(trained.items())
    if isinstance(wrapper, DistributedDataParallel):
        record.virtual_ranks = wrapper.virtual_ranks or 0
        layout = wrapper.bucket_layout()
        # Some parameters of a bucket may have been frozen since.
        record.buckets = [sum(trained.get(name, 0) for name in names) for names in layout]
    record.memory["parameters"] = sum(parameter.nbytes for _, parameter in named)
    record.memory["gradients"] = sum(trained.values())
    # Keep the maximum, because a script's optimizers no longer exist after it ends.
    record.memory["optimizer"] = max(record.memory.get("optimizer", 0), *map(_state_bytes, optimizers), 0)
    if torch.cuda.is_initialized():
        record.device = torch.cuda.get_device_name()


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(tensor.nbytes for tensor in nested_tensors(list(optimizer.state.values())))


def peak_memory() -> int:
    """Return the peak memory in bytes: of the GPU if one is used, otherwise of the process."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS counts bytes, Linux KiB


def time_of_day() -> int:
    """Return the time of day at second 0 of ``time.perf_counter``, in nanoseconds.

    The process may be interrupted between the readings of the two clocks, so use the closest of several pairs.
    """
    looks = []
    for _ in range(5):
        before, day, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        looks.append((after - before, day - (before + after) // 2))
    return min(looks)[1]
