"""Compressors on an asynchronous device are correct in every order of its streams and never block the host.

tests/queued_device.py simulates such a device. All ranks have the same gradients, so one process is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from insides import Bucket, GradBucket, compressor, device_streams, pipeline
from paceline.compression import Cast, Compressor, Int8, PowerSGD, TopK, hook
from queued_device import QueuedDevice, Stream, Work

SIZE = 3
LAYOUTS = [[3, 1], [2], [0]], [[0, 1, 2, 3]]
KINDS: dict[str, Callable[[nn.Module], Compressor]] = {
    "cast": Cast,
    "topk": lambda net: TopK(net, 0.1),
    "int8": Int8,
    "powersgd": lambda net: PowerSGD(net, rank=2),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = [(8, 11), (7,), (5, 4, 2, 2), (20, 3)]
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape).bfloat16()) for shape in shapes])


class Done:
    """A collective that is already complete."""

    def wait(self) -> None:
        """Return."""

    def is_completed(self) -> bool:
        return True


def add(tensor: Tensor) -> None:
    tensor.mul_(SIZE)


def gather(whole: Tensor, part: Tensor) -> None:
    whole.view(SIZE, -1).copy_(part)


def exchange(received: Tensor, sent: Tensor) -> None:
    received.copy_(sent[:1].expand_as(sent))  # every rank sends the same to rank 0


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[QueuedDevice | None], None]]:
    """A world of ranks with equal gradients whose collectives run on a device or complete immediately."""

    def use(device: QueuedDevice | None) -> None:
        def launch(function: Callable[..., None], *tensors: Tensor) -> Any:
            if device is not None:
                return device.collective(function, *tensors)
            function(*tensors)
            return Done()

        monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: launch(add, tensor))
        for name in ("all_gather_single", "all_gather_into_tensor"):
            monkeypatch.setattr(dist, name, lambda whole, part, **_: launch(gather, whole, part), raising=False)
        monkeypatch.setattr(dist, "all_to_all_single", lambda received, sent, **_: launch(exchange, received, sent))

    monkeypatch.setattr(compressor, "get_default_group", object)
    monkeypatch.setattr(dist, "get_world_size", lambda _: SIZE)
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    return use


class Event:
    """Simulates torch's futures of GPU tensors: the waiting stream waits for the stream that produced the result."""

    def __init__(self, device: QueuedDevice, patch: pytest.MonkeyPatch) -> None:
        plain_result, plain_wait = torch.futures.Future.set_result, torch.futures.Future.wait

        def set_result(future: Any, value: Any) -> None:
            future.event = device.current, len(device.current.items)
            plain_result(future, value)

        def wait(future: Any) -> Any:
            value = plain_wait(future)
            device.current.put(future.event)
            return value

        patch.setattr(torch.futures.Future, "set_result", set_result)
        patch.setattr(torch.futures.Future, "wait", wait)


def values(step: int, at: int, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + at)
    gradient = torch.randn(numel, generator=generator) * (step != 2)  # zero gradients: bases degenerate
    return gradient * float("nan") if step == 1 and at == 0 else gradient


def reduce_steps(net: Net, state: Compressor, allocate: Callable[..., Tensor], steps: int) -> list[Tensor]:
    """Return the hook's results for every step and bucket, and the residuals."""
    parameters, results = list(net.parameters()), []
    for step in range(steps):
        buckets = [Bucket.allocate(indices, parameters, allocate) for indices in LAYOUTS[step == 3]]
        futures = []
        for at, bucket in enumerate(buckets):
            bucket.flat.copy_(values(step, at, bucket.flat.numel()))
            last = at == len(buckets) - 1
            futures.append(hook(state, GradBucket.of(bucket, parameters, at, last=last)))
        results += [future.wait().clone() for future in futures]
    return [*results, *(residual.clone() for residual in state.state_dict()["residuals"].values())]


def is_right(
    make: Callable[[nn.Module], Compressor],
    ranks: Any,
    breaking: Callable[[pytest.MonkeyPatch], None] = lambda _: None,
    steps: int = 4,
) -> bool:
    """Whether a queued device gives the same bits in every stream order and never uses freed memory."""
    ranks(None)
    net = Net()
    wanted = reduce_steps(net, make(net), torch.zeros, steps)
    device = QueuedDevice()
    ranks(device)
    with pytest.MonkeyPatch.context() as patch:
        device.use(patch)
        Event(device, patch)
        breaking(patch)
        state = make(net)  # kept until the end, because the main stream reads its residuals
        with device:
            results = reduce_steps(net, state, device.zeros, steps)
    return all(as_wanted(device, order, results, wanted) for order in permutations(device.streams))


def as_wanted(device: QueuedDevice, order: tuple[Stream, ...], results: list[Tensor], wanted: list[Tensor]) -> bool:
    try:
        device.run(order)
    except IndexError:  # an index that was not computed yet
        return False
    found = [device.value(result) for result in results]
    same = all(torch.equal(mine.nan_to_num(7), other.nan_to_num(7)) for mine, other in zip(found, wanted, strict=True))
    return same and not device.used_late


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_compressor_gives_the_same_bits_in_every_order_of_streams(kind: str, ranks: Any) -> None:
    assert is_right(KINDS[kind], ranks)


def no_wait_for_the_caller(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def entered(side: Any) -> Iterator[None]:
        with device_streams.use_stream(side.stream):
            yield

    patch.setattr(device_streams.SideStream, "entered", entered)


def no_wait_for_the_collective(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Work, "wait", lambda _: None)


def no_wait_for_the_bucket(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pipeline.Promise, "wait", lambda promise: promise.value())


@pytest.mark.parametrize(
    ("kind", "breaking"),
    [
        ("cast", no_wait_for_the_caller),
        ("topk", no_wait_for_the_bucket),
        ("int8", no_wait_for_the_collective),
        ("powersgd", no_wait_for_the_collective),
    ],
)
def test_a_missing_wait_is_detected(kind: str, breaking: Any, ranks: Any) -> None:
    assert not is_right(KINDS[kind], ranks, breaking, steps=2)
