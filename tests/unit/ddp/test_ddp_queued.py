"""Averages on a device with queued operations equal those on the CPU.

CPU ranks only pretend to have such a device; test_compression_streams.py simulates its queues.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from models import chain
from paceline.core import device_streams
from paceline.core.world import World
from paceline.ddp import DistributedDataParallel, extensions, finisher
from paceline.ddp import arrivals as filling
from paceline.errors import NonFiniteGradient
from twins import Pools, same_tensor

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduce_dtype": {"reduce_dtype": torch.float64},
}


class Stream:
    """A stream without queued operations."""

    def wait_stream(self, other: Stream) -> None:
        """Do nothing."""


def queue(patch: pytest.MonkeyPatch) -> None:
    """Replace the functions that handle device streams."""
    stream = Stream()
    for module in (device_streams, finisher, extensions):
        patch.setattr(module, "is_queued", lambda _: True)
    patch.setattr(device_streams, "new_stream", lambda _: stream)
    patch.setattr(device_streams, "current_stream", lambda _: stream)
    patch.setattr(device_streams, "use_stream", lambda _: nullcontext())
    patch.setattr(device_streams, "keep_for", lambda stream, tensor: None)


def gradients(model: Any, world: World, dtype: torch.dtype) -> list[Tensor]:
    result = []
    for step in range(4):
        x = torch.randn(6, 20, generator=torch.Generator().manual_seed(10 * step + world.rank)).to(dtype)
        with model.weight(world.rank + 1.5) if step == 2 else nullcontext():
            model(x).square().sum().backward()
        result += [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad(set_to_none=step < 2)  # later gradients accumulate in place
    return result


def compare_with_queues(world: World, name: str, dtype: torch.dtype) -> None:
    """Expect the same gradients as without queues, bitwise on two ranks because 1/2 is exact."""
    results = []
    for is_queued in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if is_queued:
                queue(patch)
            net = chain(20, 30, 25, 4, dtype=dtype)
            model = DistributedDataParallel(net, bucket_cap_mb=1e-4, **OPTIONS.get(name, {}))
            results.append(gradients(model, world, dtype))
    for mine, other in zip(results[1], results[0], strict=True):
        if world.size == 2 and dtype is not torch.float16:
            assert torch.equal(mine, other)
        same_tensor(mine, other, 1e-5 if dtype is torch.float32 else 0.02, name)


@pytest.mark.parametrize("name", OPTIONS)
def test_averages_equal_those_without_queues(name: str, gloo: Pools) -> None:
    gloo.run(2, compare_with_queues, name, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dividing_in_the_copy_gives_the_same_averages(dtype: torch.dtype, gloo: Pools) -> None:
    gloo.run(3, compare_with_queues, "plain", dtype)


def passes(world: World, weighted: bool) -> list[Any]:
    """Return the factors applied to gradients in the copy and in separate passes."""
    factors: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        queue(patch)
        model = DistributedDataParallel(chain(20, 30, 4))
        plain_copy, plain_multiply = filling.copy_times, finisher.multiply_each
        patch.setattr(filling, "copy_times", lambda t, s, f, w: factors.append(("copy", f)) or plain_copy(t, s, f, w))
        patch.setattr(finisher, "multiply_each", lambda t, f: factors.append(("pass", f)) or plain_multiply(t, f))
        with model.weight(2.0) if weighted else nullcontext():
            model(torch.ones(2, 20)).sum().backward()
    return factors


def test_gradients_are_scaled_in_the_copy_and_again_only_with_weights(gloo: Pools) -> None:
    for factors in gloo.run(3, passes, False):
        assert factors == [("copy", 1 / 3)]
    for factors in gloo.run(3, passes, True):
        assert factors == [("copy", 1 / 3), ("pass", 1 / 6 * 3)]


def checked(world: World) -> list[str]:
    """Return the device reads inside hooks in a step with ``check_finite``; expects one read at the end."""
    model = DistributedDataParallel(chain(20, 30, 25, 4), bucket_cap_mb=1e-4, check_finite=True)
    reads: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        queue(patch)
        found = extensions.Magnitudes.found
        plain_bool = Tensor.__bool__
        patch.setattr(extensions.Magnitudes, "found", lambda this: reads.append("found") or found(this))
        patch.setattr(Tensor, "__bool__", lambda this: reads.append("bool") or plain_bool(this))
        for _ in range(2):
            reads.clear()
            model(torch.ones(2, 20)).sum().backward()
            model.zero_grad()
        assert reads.count("found") == 1
        in_hooks = reads[: reads.index("found")]
        x = torch.ones(2, 20)
        x[0, 3] = float("inf") if world.rank == 1 else 1.0
        with pytest.raises(NonFiniteGradient, match=r"on rank 1, in .*0\.weight"):
            model(x).sum().backward()
    return in_hooks


def test_check_finite_reads_from_the_device_once_at_the_end_of_backward(gloo: Pools) -> None:
    for in_hooks in gloo.run(2, checked):
        assert in_hooks == []
