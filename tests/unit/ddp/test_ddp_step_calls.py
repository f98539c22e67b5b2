"""What an ordinary step costs in Python; unlike times, counts are the same on every machine.

Counted in forward, backward and the optimizer step together, after enough steps for the frozen step:

- calls: Python functions of the package that are called; comprehensions do not count
- files: files of the package with these functions
- bytecodes: what Python executes in a step of the wrapper, minus the same in a step of the bare module without the step
  guard. This includes the functions of torch and of the standard library that the wrapper calls.

Work in C and C++ is not counted, and zero_grad is left out. A barrier before the optimizer step keeps the wait for the
other rank out of the count. Beside a GPU, stand-ins replace the device: nothing is captured in a graph, and every event
has passed. Neither the profiler nor the launcher's black box is on, and the step is not one of those whose exposed time
is sampled.

Code that runs once per step is cold, so a call costs several times as much as in a microbenchmark. Parity with torch's
reducer lies near 1,400 bytecodes for 8 parameters. The limits are in ``step_calls.json``, as counted with Python 3.11.
A change that raises one must explain why.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import paceline
from insides import TEST_FROZEN, TEST_HOST_CHANNEL, stand_in_gpu
from paceline import World
from paceline.ddp import DistributedDataParallel
from twins import Pools

RECORDED = Path(__file__).with_name("step_calls.json")
PACKAGE = str(Path(paceline.__file__).parent)
INLINED = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}
"""Usually not calls since Python 3.12."""
WARM_STEPS = 20
"""Replicas are compared in steps 15 and 31, and the step freezes in between."""


class Chain(nn.Module):
    """Small parameters, used one after another."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(64)) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x * part
        return x.sum()


@contextmanager
def installed(install: Callable[[Any], None], note: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    """Call `note` for the events of Python in the block."""
    gc.disable()  # a collection may run finalizers of other tests' objects
    install(note)
    try:
        yield
    finally:
        install(None)
        gc.enable()


def calls_of(function: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """Return the result of `function` and the number of calls to functions in each file of the package."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in INLINED:
            calls[code.co_filename] += 1

    with installed(sys.setprofile, note):
        result = function()
    return result, calls


def bytecodes_of(function: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of `function` and the number of bytecodes that Python runs in it, in all files."""
    count = 0

    def note(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return note

    with installed(sys.settrace, note):
        result = function()
    return result, count


def step_of(model: nn.Module, measure: Callable[[Callable[[], Any]], Any]) -> list[Any]:
    """Measure the forward, the backward and the optimizer step of the first step after the warm ones."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(64)
    for _ in range(WARM_STEPS):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    optimizer.zero_grad()
    loss, forward = measure(lambda: model(x))
    _, backward = measure(loss.backward)
    dist.barrier()  # so that the step does not wait for the other rank, with a number of calls that varies
    _, step = measure(optimizer.step)
    return [forward, backward, step]


def count_step(world: World, parameters: int, buckets: int, beside_gpu: bool) -> dict[str, int]:
    """Count what the wrapper adds to a step; `beside_gpu` takes the path of ranks whose gradients are on GPUs."""
    with patch.dict(os.environ, {TEST_FROZEN: ""} | ({TEST_HOST_CHANNEL: "1"} if beside_gpu else {})):
        model = DistributedDataParallel(Chain(parameters), bucket_cap_mb=parameters / buckets * 256 / 2**20)
    with stand_in_gpu(model) if beside_gpu else nullcontext():
        calls = step_of(model, calls_of)
        assert len(model.bucket_layout()) == buckets
        wrapped = sum(step_of(model, bytecodes_of))
    hooks = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    with patch.dict(hooks[0], clear=True), patch.dict(hooks[1], clear=True):  # without our step guard
        bare = sum(step_of(Chain(parameters), bytecodes_of))
    files = len(calls[0] | calls[1] | calls[2])
    return {"calls": sum(map(Counter.total, calls)), "files": files, "bytecodes": wrapped - bare}


@pytest.mark.parametrize("beside_gpu", [False, True])
@pytest.mark.parametrize(("parameters", "buckets"), [(8, 1), (16, 3), (160, 8)])
def test_an_ordinary_step_costs_no_more_than_recorded(
    gloo: Pools, parameters: int, buckets: int, beside_gpu: bool
) -> None:
    name = f"{parameters} parameters, {buckets} buckets" + ", beside a GPU" * beside_gpu
    recorded = json.loads(RECORDED.read_text("utf-8"))[name]
    for counted in gloo.run(2, count_step, parameters, buckets, beside_gpu):
        more = {part: count for part, count in counted.items() if count > recorded[part]}
        assert not more, f"more than {recorded} in {RECORDED.name}; counted: {counted}"
