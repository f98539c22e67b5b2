"""The wrapper on a device that queues its operations has the averages of one that does not.

Here only the faces of such a device are put in place, on CPU ranks; in test_compression_streams.py its queues are, too.
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
    """One that nobody has to wait for."""

    def wait_stream(self, other: Stream) -> None:
        """Nothing is queued."""


def queue(patch: pytest.MonkeyPatch) -> None:
    """Take the place of the device's streams."""
    stream = Stream()
    for module in (device_streams, finisher, extensions):
        patch.setattr(module, "is_queued", lambda _: True)
    patch.setattr(device_streams, "new_stream", lambda _: stream)
    patch.setattr(device_streams, "current_stream", lambda _: stream)
    patch.setattr(device_streams, "use_stream", lambda _: nullcontext())
    patch.setattr(device_streams, "keep_for", lambda stream, tensor: None)


def gradients(model: Any, world: World, dtype: torch.dtype) -> list[Tensor]:
    found = []
    for step in range(4):
        x = torch.randn(6, 20, generator=torch.Generator().manual_seed(10 * step + world.rank)).to(dtype)
        with model.weight(world.rank + 1.5) if step == 2 else nullcontext():
            model(x).square().sum().backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad(set_to_none=step < 2)  # afterwards gradients are accumulated in place
    return found


def finishes(world: World, name: str, dtype: torch.dtype) -> None:
    """The same gradients as without queues; to the bit on two ranks, where 1/N is exact wherever it is multiplied."""
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
def test_averages_are_those_of_a_device_that_queues_nothing(name: str, gloo: Pools) -> None:
    gloo.run(2, finishes, name, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dividing_in_the_copy_gives_the_same_averages(dtype: torch.dtype, gloo: Pools) -> None:
    gloo.run(3, finishes, "plain", dtype)


def passes(world: World, weighted: bool) -> list[Any]:
    """The factors that gradients are multiplied by: in the copy, and in a pass of their own."""
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


def test_gradients_are_scaled_in_the_copy_and_again_only_where_ranks_are_weighted(gloo: Pools) -> None:
    for factors in gloo.run(3, passes, False):
        assert factors == [("copy", 1 / 3)]
    for factors in gloo.run(3, passes, True):
        assert factors == [("copy", 1 / 3), ("pass", 1 / 6 * 3)]


def checked(world: World) -> list[str]:
    """Reads in a step with ``check_finite``: inside the hooks none, at the end one."""
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


def test_check_finite_asks_the_device_once_at_the_end_of_backward(gloo: Pools) -> None:
    for in_hooks in gloo.run(2, checked):
        assert in_hooks == []
