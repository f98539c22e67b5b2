"""A step never waits for a GPU: it reads no value of a gradient, a bucket, a weight or a result of these.

The tests need no GPU: CPU tensors stand for device tensors, see ``device_watch.py``. The ranks use Gloo, which shares
its channel with NCCL, and a separate host channel, as with a GPU. Averages equal those on the CPU;
test_compression_streams.py simulates the queues of a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from device_watch import DeviceWatch, queued_operations
from insides import TEST_HOST_CHANNEL, device_streams, engine_of, extensions, finisher, storage_of
from models import chain
from paceline import SyncBatchNorm, World, compression
from paceline.compression import Cast, Compressor, Int8, PowerSGD, TopK
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.train import TrainConfig, Trainer
from twins import Pools, same_tensor

COMPRESSORS: dict[str, Callable[[nn.Module], Compressor]] = {
    "fp16": lambda model: Cast(model, torch.float16),
    "int8": Int8,
    "topk": lambda model: TopK(model, 0.1),
    "powersgd": lambda model: PowerSGD(model, rank=2),
}
WARM = 4


def net(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle: list[nn.Module] = [SyncBatchNorm(8), nn.Tanh(), SyncBatchNorm(8)] if norm else [nn.Tanh()]
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(8, 8), nn.Linear(8, 3))


def stops_of(model: DistributedDataParallel, step: Callable[[Tensor], None]) -> list[str]:
    """Run `step` until it is steady, then watch one more step."""
    x = torch.randn(4, 6)
    with queued_operations():
        for _ in range(WARM):
            step(x)
        with DeviceWatch() as watch:
            watch.on_device([x, *model.parameters(), *model.buffers()])
            watch.on_device(bucket.flat for bucket in storage_of(model).buckets)
            watch.on_device(parameter.grad for parameter in model.parameters())
            step(x)
    return watch.stops


def train(world: World, case: str) -> list[str]:
    os.environ[TEST_HOST_CHANNEL] = "1"
    options: dict[str, Any] = {
        "check_finite": {"check_finite": True},
        "reduce_dtype": {"reduce_dtype": torch.bfloat16},
        "replica check": {"check_replicas_every": 1},
        "small buckets": {"bucket_cap_mb": 1e-4},
    }.get(case, {})
    model = DistributedDataParallel(net(norm=case == "SyncBatchNorm"), **options)
    if case in COMPRESSORS:
        model.register_comm_hook(COMPRESSORS[case](model), compression.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(x: Tensor) -> None:
        if case == "weights":
            with model.weight(3 + world.rank):
                model(x).square().sum().backward()
        elif case == "weights on the device":
            with model.weight((x[:, 0] < 9).sum()):  # type: ignore[arg-type]
                model(x).square().sum().backward()
        elif case == "weights while accumulating":
            for sync in model.no_sync(), model.no_sync(), nullcontext():
                with sync, model.weight(3 + world.rank):
                    model(x).square().sum().backward()
        elif case == "accumulation":
            with model.no_sync():
                model(x).square().mean().backward()
            model(x).square().mean().backward()
        else:
            model(x).square().mean().backward()
        if case == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=case != "zeroed")

    return stops_of(model, step)


CASES = ["small buckets", "weights", "weights on the device", "accumulation", "zeroed", "clipped", "reduce_dtype"]
CASES += ["weights while accumulating", *COMPRESSORS]


@pytest.mark.parametrize("case", CASES)
def test_a_steady_step_never_waits_for_the_device(gloo: Pools, case: str) -> None:
    for rank, stops in enumerate(gloo.run(2, train, case)):
        assert stops == [], f"rank {rank}"


@pytest.mark.parametrize(
    ("case", "waits", "place"),
    [
        ("SyncBatchNorm", 2, "nn/sync_batch_norm.py"),  # once per layer, like torch; used to wait three times
        ("check_finite", 1, "ddp/extensions.py"),  # used to wait once per bucket
        ("replica check", 1, "ddp/replica_check.py"),  # used to wait 900 times for 300 parameters with Adam
    ],
)
def test_checks_and_statistics_wait_once(gloo: Pools, case: str, waits: int, place: str) -> None:
    for stops in gloo.run(2, train, case):
        assert len(stops) == waits
        assert all(f"tolist at {place}" in stop for stop in stops)


def train_in_the_trainer(world: World) -> list[str]:
    """Watch two steps of a Trainer: not the first, which records the order of gradients, nor the last, which logs."""
    os.environ[TEST_HOST_CHANNEL] = "1"
    samples = TensorDataset(torch.randn(64, 6), torch.randn(64, 3))
    model = DistributedDataParallel(net(), init_sync=False)  # otherwise the host sometimes reads digests of the weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = DeviceWatch()
    stops_before: list[int] = []

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        stops_before.append(len(watch.stops))
        watch.on_device([x, y, *model.parameters(), *(parameter.grad for parameter in model.parameters())])
        watch.on_device(bucket.flat for bucket in storage_of(model).buckets)
        return (model(x) - y).square().sum(), len(x)

    loader = DataLoader(samples, 8, shuffle=True, seed=0)
    trainer = Trainer(model, optimizer, loss, loader, TrainConfig(epochs=1, accumulate=2, clip_norm=1.0, log_every=100))
    with queued_operations(), watch:
        trainer.fit()
    assert len(stops_before) == 8  # micro-batches
    return watch.stops[stops_before[2] : stops_before[-2]]


def test_trainer_steps_wait_only_for_the_nan_check(gloo: Pools) -> None:
    for stops in gloo.run(2, train_in_the_trainer):
        assert len(stops) == 2  # steps
        assert all("tolist at ddp/extensions.py" in stop for stop in stops)


# -- the watch itself --------------------------------------------------------------------------------------------------


def stops_of_reads(world: World) -> dict[str, list[str]]:
    """Read a value in each possible way from code that seems to be in paceline; return the recorded stops."""
    os.environ[TEST_HOST_CHANNEL] = "1"
    model = DistributedDataParallel(net())
    finisher: Any = engine_of(model).finisher
    launch = finisher.launch
    ways: dict[str, Callable[[Tensor], Any]] = {
        "bool": lambda flat: bool(flat.sum() > 0),
        "item": lambda flat: flat[0].item(),
        "tolist": lambda flat: (flat * 2).tolist(),
        "cpu": lambda flat: flat.cpu(),
        "to": lambda flat: flat.to("cpu"),
        "nonzero": lambda flat: flat.nonzero(),
        "equal": lambda flat: torch.equal(flat, flat),
        "from host": lambda flat: flat.copy_(torch.tensor([0.0] * flat.numel())),
        "to host": lambda flat: torch.tensor([0.0] * flat.numel()).copy_(flat),
    }

    code = compile("way(flat)", "/somewhere/src/paceline/ddp/hook.py", "eval")
    stops = {}
    for how, way in ways.items():

        def reading(bucket: Any, at: int, way: Any = way) -> Any:
            eval(code, {"way": way, "flat": bucket.flat})
            return launch(bucket, at)

        finisher.launch = reading
        stops[how] = stops_of(model, lambda x: model(x).sum().backward())
    return stops


def test_watch_detects_every_kind_of_wait(gloo: Pools) -> None:
    for stops in gloo.run(2, stops_of_reads):
        for how, places in stops.items():
            assert places, how
            assert all("ddp/hook.py" in place for place in places)


# -- same averages -----------------------------------------------------------------------------------------------------


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


def compare_with_queues(world: World, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Expect the same gradients as without queues, bitwise on two ranks because 1/2 is exact."""
    results = []
    for is_queued in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if is_queued:
                queue(patch)
            net = chain(20, 30, 25, 4, dtype=dtype)
            model = DistributedDataParallel(net, bucket_cap_mb=1e-4, **options)
            results.append(gradients(model, world, dtype))
    for mine, other in zip(results[1], results[0], strict=True):
        if world.size == 2 and dtype is not torch.float16:
            assert torch.equal(mine, other)
        same_tensor(mine, other, 1e-5 if dtype is torch.float32 else 0.02, str(options))


@pytest.mark.parametrize(
    ("size", "dtype", "options"),
    [
        (2, torch.float32, {}),
        (2, torch.float32, {"reduce_dtype": torch.float64}),
        (3, torch.float32, {}),  # divides in the copy
        (3, torch.float16, {}),
    ],
)
def test_averages_equal_those_without_queues(gloo: Pools, size: int, dtype: torch.dtype, options: Any) -> None:
    gloo.run(size, compare_with_queues, dtype, options)
