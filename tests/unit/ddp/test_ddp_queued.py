"""The wrapper on a device that queues its operations: every bucket in order, and the averages of one that does not.

Here only the faces of such a device are put in place, on CPU ranks; in test_compression_streams.py its queues are, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from insides import storage_of
from models import chain
from paceline import compression
from paceline.compression import Cast, Compressor, Int8, PowerSGD, TopK
from paceline.core.processes.world import World
from paceline.core.state import device_streams
from paceline.ddp import DistributedDataParallel
from paceline.ddp.extensions import finite_check
from paceline.ddp.reducer import gradients as filling
from paceline.ddp.reducer.averages import Averages
from paceline.ddp.transport import finisher
from paceline.ddp.transport.channel import Channel
from paceline.errors import NonFiniteGradient
from twins import Pools, same_tensor

STAGES = ["copy", "launch", "wait", "scale", "publish"]
COMPRESSORS: dict[str, Callable[[nn.Module], Compressor]] = {
    "cast": Cast,
    "topk": TopK,
    "int8": Int8,
    "powersgd": PowerSGD,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduce_dtype": {"reduce_dtype": torch.float64},
    "algorithm": {"algorithm": "ring"},
}


@pytest.fixture(scope="module")
def gloo() -> Iterator[Pools]:
    """Ranks whose channel gives plain sums, as that of GPUs does."""
    with Pools("gloo") as pools:
        yield pools


class Stream:
    """One that only says who waits for whom."""

    def __init__(self, log: Log, name: str) -> None:
        self._log, self.name = log, name

    def wait_stream(self, other: Stream) -> None:
        """Note it."""
        self._log.notes.append(("stream", f"{self.name} waits for {other.name}"))


class Log:
    """What is done to which bucket, in order."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, Any]] = []
        self.current = self.main = Stream(self, "main")
        self.buckets: dict[int, int] = {}
        """The number of each bucket, by its address."""
        self._launched: dict[int, int] = {}

    def follow(self, model: Any) -> None:
        """Know the buckets of `model`, as they are from the second step on."""
        storage = storage_of(model)
        self.buckets = {bucket.flat.data_ptr(): at for at, bucket in enumerate(storage.buckets)}
        self.notes.clear()

    def note(self, what: str, tensor: Tensor) -> None:
        """Note it, if `tensor` begins a bucket."""
        if tensor.data_ptr() in self.buckets:
            self.notes.append((what, self.buckets[tensor.data_ptr()]))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Make `stream` the current one."""
        before, self.current = self.current, stream
        yield
        self.current = before

    def record(self, patch: pytest.MonkeyPatch) -> None:
        """Take the place of the device's streams, and note what becomes of buckets."""
        for module in (device_streams, compression.pipeline, finisher, finite_check):
            patch.setattr(module, "is_queued", lambda _: True)
        patch.setattr(device_streams, "new_stream", lambda _: Stream(self, "side"))
        patch.setattr(device_streams, "current_stream", lambda _: self.current)
        patch.setattr(device_streams, "use_stream", self.on)
        patch.setattr(device_streams, "keep_for", lambda stream, tensor: None)
        copy, publish = filling.copy_times, Averages.publish
        reduce, wait, scale = finisher.AllReduce.launch, Channel.wait, finisher.AllReduce.scale

        def copies(targets: Any, sources: Any, factor: float, whole: Any = None) -> None:
            self.note("copy", targets[0])
            copy(targets, sources, factor, whole)

        def launches(this: Any, bucket: Any, at: int) -> Any:
            self.note("launch", bucket.flat)
            launched = reduce(this, bucket, at)
            self._launched[id(launched)] = at
            return launched

        def waits(this: Any, launched: Any, *what: Any) -> None:
            if id(launched) in self._launched:
                self.notes.append(("wait", self._launched.pop(id(launched))))
            wait(this, launched, *what)

        def scales(this: Any, buckets: Any, notes: Any) -> None:
            for bucket in buckets:
                self.note("scale", bucket.flat)
            scale(this, buckets, notes)

        def publishes(this: Any, *arguments: Any) -> None:
            self.notes += [("publish", at) for at in self.buckets.values()]
            publish(this, *arguments)

        patch.setattr(filling, "copy_times", copies)
        patch.setattr(finisher.AllReduce, "launch", launches)
        patch.setattr(Channel, "wait", waits)
        patch.setattr(finisher.AllReduce, "scale", scales)
        patch.setattr(Averages, "publish", publishes)


def in_order(notes: list[tuple[str, Any]], buckets: int) -> bool:
    """Whether every bucket went through all stages, one after the other, and once through each."""
    return buckets > 0 and all([what for what, at in notes if at == number] == STAGES for number in range(buckets))


def gradients(model: Any, world: World, log: Log | None, dtype: torch.dtype) -> list[Tensor]:
    found = []
    for step in range(4):
        if log is not None:
            log.follow(model)
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
            log = Log()
            if is_queued:
                log.record(patch)
            net = chain(20, 30, 25, 4, dtype=dtype)
            model = DistributedDataParallel(net, bucket_cap_mb=1e-4, **OPTIONS.get(name, {}))
            if name in COMPRESSORS:
                model.register_comm_hook(COMPRESSORS[name](model), compression.hook)
            results.append(gradients(model, world, log if is_queued else None, dtype))
            if is_queued and name not in COMPRESSORS:
                assert in_order(log.notes, len(log.buckets)), log.notes
            elif is_queued:
                assert ("stream", "side waits for main") in log.notes
    for mine, other in zip(results[1], results[0], strict=True):
        if world.size == 2 and dtype is not torch.float16:
            assert torch.equal(mine, other)
        same_tensor(mine, other, 1e-5 if dtype is torch.float32 else 0.02, name)


@pytest.mark.parametrize("name", [*OPTIONS, *COMPRESSORS])
def test_buckets_go_through_every_stage_in_order_with_the_same_averages(name: str, gloo: Pools) -> None:
    gloo.run(2, finishes, name, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dividing_in_the_copy_gives_the_same_averages(dtype: torch.dtype, gloo: Pools) -> None:
    gloo.run(3, finishes, "plain", dtype)


def passes(world: World, weighted: bool) -> list[Any]:
    """The factors that gradients are multiplied by: in the copy, and in a pass of their own."""
    factors: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        Log().record(patch)
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
        Log().record(patch)
        found = finite_check.Magnitudes.found
        plain_bool = Tensor.__bool__
        patch.setattr(finite_check.Magnitudes, "found", lambda this: reads.append("found") or found(this))
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


@pytest.mark.parametrize("missing", STAGES)
def test_a_stage_that_is_left_out_or_comes_too_early_would_be_found(missing: str) -> None:
    whole = [(stage, at) for at in range(2) for stage in STAGES]
    assert in_order(whole, 2)
    assert not in_order([note for note in whole if note != (missing, 1)], 2)
    moved = [(missing, 1), *(note for note in whole if note != (missing, 1))]
    assert in_order(moved, 2) == (missing == STAGES[0])
