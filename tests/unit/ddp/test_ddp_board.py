"""Frozen steps with a board: a rank that is late at any line changes no bit, and one that ends is named."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from insides import TEST_FROZEN, TEST_HOST_CHANNEL, Board, ControlBlock, FrozenStep, engine_of, flip_bit
from paceline import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import CommunicationError
from ranks import Ranks
from twins import Pools

LINES = 120
"""More lines than the frozen step and the board run in an ordinary step."""


def make() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    with patch.dict(os.environ, {TEST_HOST_CHANNEL: "always", TEST_FROZEN: "always"}):
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
        model = DistributedDataParallel(net, bucket_cap_mb=1e-4, init_sync=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def backward(world: World, model: nn.Module, step: int) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + world.rank))
    model(x).square().mean().backward()


def bits(model: nn.Module) -> list[Any]:
    return [parameter.tolist() for parameter in model.parameters()]


@contextmanager
def at_line(number: int, act: Callable[[], object]) -> Iterator[dict[str, None]]:
    """Call `act` before line `number` of those that the frozen step and the board run; yield the lines."""
    files = {sys.modules[kind.__module__].__file__ for kind in (FrozenStep, Board)}
    lines: dict[str, None] = {}

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        line = f"{frame.f_code.co_name} {frame.f_lineno}"
        if event == "line" and line not in lines:
            lines[line] = None
            if len(lines) == number:
                act()
        return trace

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(None)


# -- late ranks --------------------------------------------------------------------------------------------------------


def train(world: World, delay: float) -> list[Any]:
    """Delay one rank at another line in each step; return the weights after each step."""
    model, optimizer = make()
    seen, reached = [], {"begin": 0, "arrived": 0, "end": 0, "post": 0, "is_unanimous": 0}
    for step in range(2 * LINES):
        with at_line(step // 2 if step % 2 == world.rank else 0, lambda: time.sleep(delay)) as lines:
            backward(world, model, step)
            optimizer.step()
        optimizer.zero_grad()
        seen.append(bits(model))
        for name in {line.split()[0] for line in lines} & reached.keys():
            reached[name] += 1
    assert min(reached.values()) > LINES, reached
    assert len(lines) < LINES, "each line of a step has been delayed"
    return seen


@pytest.mark.slow
def test_a_delay_at_any_line_changes_no_bit(pools: Pools) -> None:
    assert pools.run(2, train, 0.015) == pools.run(2, train, 0.0)


# -- ranks that end ----------------------------------------------------------------------------------------------------


def end_early(world: World, line: int) -> str:
    """In step 4, kill rank 1 at a line, or between backward and optimizer step; return the error of rank 0."""
    model, optimizer = make()

    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        for step in range(6):
            ends = (world.rank, step) == (1, 4)
            with at_line(line if ends else 0, end):
                backward(world, model, step)
                if ends and not line:
                    end()
                optimizer.step()
            optimizer.zero_grad()
    except CommunicationError as error:
        return f"step {step}: {error}"
    return ""


BETWEEN = 0
SOME = [pytest.param(line, marks=pytest.mark.slow) for line in range(5, 80, 12)]


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
@pytest.mark.parametrize("line", [BETWEEN, *SOME])
def test_a_rank_that_ends_in_a_frozen_step_is_named(backend: str, line: int) -> None:
    with Ranks(2, 60, backend) as ranks:
        ranks.start(end_early, line)
        error = ranks.answer(0, 30)
        # If rank 1 has posted its report, step 4 is complete on rank 0.
        assert re.match(rf"step {5 if line == BETWEEN else '[45]'}: rank 0: .*rank 1 .*ended", error), error


# -- flipped bits ------------------------------------------------------------------------------------------------------

FLAG = 16
"""Bit of a word that tells whether its rank waits for the report during backward; it is not part of the report."""


def flip(world: World, bit: int | None) -> tuple[list[Any], int]:
    """Flip a bit of rank 1's report in step 4; return the weights and the number of control blocks sent."""
    model, optimizer = make()
    with patch.object(ControlBlock, "fill", autospec=True, side_effect=ControlBlock.fill) as fill:
        for step in range(6):
            backward(world, model, step)
            if (world.rank, step) == (1, 4) and bit is not None:
                flip_bit(engine_of(model).board, bit)
            dist.barrier()
            optimizer.step()
            optimizer.zero_grad()
    return bits(model), fill.call_count


def test_a_flipped_bit_of_a_report_makes_ranks_exchange_control_blocks(pools: Pools) -> None:
    expected, usual = pools.run(2, flip, None)[0]
    for bit in range(FLAG, 64, 5):
        assert pools.run(2, flip, bit) == [(expected, usual + (bit != FLAG))] * 2


# -- weights -----------------------------------------------------------------------------------------------------------


def weigh(world: World) -> list[float]:
    """Return a gradient for each step; in some, the weights of ranks are 0."""
    model, gradients = make()[0], []
    for weight in (1.0, 1.0, 1.0, float(world.rank), 0.0, 2.0):
        with model.weight(weight):
            (model.module[4].bias.sum() * weight * (1 + world.rank) + 0 * model(torch.ones(1, 4)).sum()).backward()
        gradients.append(next(reversed(list(model.parameters()))).grad[0].item())
        model.zero_grad()
    return gradients


def test_a_weight_of_0_is_read_from_the_board(pools: Pools) -> None:
    assert pools.run(2, weigh) == [[1.5, 1.5, 1.5, 2.0, 0.0, 1.5]] * 2
