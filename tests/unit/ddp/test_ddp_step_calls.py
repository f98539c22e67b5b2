"""Paceline's Python calls in an ordinary step, and the files with them; unlike times, counts are the same everywhere.

Code that runs once per step is cold, so a call costs several times as much as in a microbenchmark. The limits are in
``step_calls.json``; a change that raises one must explain why.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import paceline
from insides import TEST_HOST_CHANNEL
from paceline import World
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel, accumulate
from twins import Pools

RECORDED = Path(__file__).with_name("step_calls.json")
PACKAGE = str(Path(paceline.__file__).parent)
INLINED = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}
"""Usually not calls since Python 3.12."""
WARM_STEPS = 4


class Chain(nn.Module):
    """Small parameters, used one after another."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(64)) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x * part
        return x.sum()


def calls_of(function: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """Return the result of `function` and the number of calls to functions in each file of the package."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in INLINED:
            calls[code.co_filename] += 1

    gc.disable()  # a collection may run finalizers of other tests' objects
    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return result, calls


def count_calls(world: World, parameters: int, buckets: int, late: bool) -> dict[str, int]:
    """Count the calls in each part of a step; without `late`, on a backend that waits outside of Paceline's code.

    With `late`, control blocks are read late, as with gradients on GPUs.
    """
    with patch.dict(os.environ, {TEST_HOST_CHANNEL: "always"} if late else {}):
        model = DistributedDataParallel(Chain(parameters), bucket_cap_mb=parameters / buckets * 256 / 2**20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(64)
    for _ in range(WARM_STEPS):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    optimizer.zero_grad()
    loss, forward = calls_of(lambda: model(x))
    _, backward = calls_of(loss.backward)
    _, step = calls_of(optimizer.step)
    assert len(model.bucket_layout()) == buckets
    parts = {"forward": forward.total(), "backward": backward.total(), "optimizer step": step.total()}
    return parts | {"files": len(forward | backward | step)}


@pytest.mark.parametrize(
    ("parameters", "buckets", "late"), [(16, 1, False), (16, 4, False), (160, 8, False), (16, 4, True)]
)
def test_an_ordinary_step_makes_no_more_calls_than_recorded(
    gloo: Pools, parameters: int, buckets: int, late: bool
) -> None:
    name = f"{parameters} parameters, {buckets} buckets" + ", blocks read late" * late
    recorded = json.loads(RECORDED.read_text("utf-8"))[name]
    for counted in gloo.run(2, count_calls, parameters, buckets, late):
        # With blocks read late, the number of calls depends on how long a rank waits for the others.
        more = {part: calls for part, calls in counted.items() if calls > recorded.get(part, calls)}
        assert not more, f"{RECORDED.name} has {recorded}"


def count_calls_of_a_slice(world: World, every: int | None) -> tuple[list[int], int]:
    """Return the calls in each part of the last step, and the number of repeats before it."""
    model = DistributedDataParallel(Chain(16), virtual_ranks=2, check_compute_every=every)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.ones(32, 64)
    calls, repeats, step = [0, 0, 0], 0, 0
    for x in accumulate(model, DataLoader(data, 4)):
        loss, forward = calls_of(lambda x=x: model(x))
        _, backward = calls_of(loss.backward)
        repeats += model.is_repeat
        if model.do_sync:
            _, stepping = calls_of(optimizer.step)
            optimizer.zero_grad()
            step += 1
            calls = [forward.total(), backward.total(), stepping.total()]
    assert step == 8
    return calls, repeats


def test_a_step_between_two_compute_checks_makes_no_more_calls(gloo: Pools) -> None:
    plain, checked = (gloo.run(2, count_calls_of_a_slice, every) for every in (None, 6))
    assert [calls for calls, _ in checked] == [calls for calls, _ in plain]
    assert all(repeats for _, repeats in checked)
