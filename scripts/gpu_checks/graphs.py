"""CUDA graphs of whole steps, and torch.compile. A step that cannot be captured must raise a UsageError."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

import paceline
from gpu_checks.rows import NotRun, Place, Row, Verdict, holds, not_run
from gpu_checks.wrapping import TorchDDP, Wrap, between, compress, with_buckets
from paceline.errors import UsageError

WARM_UP, REPLAYS = 11, 4
WIDTH = 32


class Net(nn.Module):
    """Two layers, with or without BatchNorm between them; forward returns the loss."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        middle = [nn.BatchNorm1d(64)] if norm else []
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), *middle, nn.Tanh(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out.square().mean()


def net(place: Place, norm: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(norm).to(place.device)


def batches(place: Place) -> list[Tensor]:
    generator = torch.Generator().manual_seed(place.rank)
    return [torch.randn(16, WIDTH, generator=generator).to(place.device) for _ in range(WARM_UP + REPLAYS)]


def trained(place: Place, wrap: Wrap, *, norm: bool = False, captures: bool = False) -> nn.Module:
    """Train on a side stream for the warm-up steps, then by replaying a captured step if `captures`."""
    module = net(place, norm)
    stream = torch.cuda.Stream(place.device) if place.on_gpu else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model = wrap(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        static, *_ = (batch.clone() for batch in batches(place))

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            model(static).backward()
            optimizer.step()

        for x in batches(place)[:WARM_UP]:
            static.copy_(x)
            step()
    place.synchronize()
    replay = captured(step) if captures and place.on_gpu else step
    for x in batches(place)[WARM_UP:]:
        static.copy_(x)
        replay()
    place.synchronize()
    return module


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Capture `step`, and return a function that replays it."""
    graph = torch.cuda.CUDAGraph()
    capture: AbstractContextManager[Any] = torch.cuda.graph(graph)
    with capture:
        step()
    return graph.replay


def eager(model: Any, place: Place) -> None:
    """Train on all batches without capturing."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in batches(place):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()


def capture_of(name: str, wrap: Wrap, norm: bool = False) -> Callable[[Place], Iterator[Row]]:
    """Return a check that a step with `wrap` can be captured or raises a UsageError."""

    def check(place: Place) -> Iterator[Row]:
        what = f"a whole step captured, {name}"
        try:
            module = trained(place, wrap, norm=norm, captures=True)
        except UsageError as error:
            yield holds(what, f"UsageError: {error}", place.on_gpu)
            return
        apart = between(module, trained(place, wrap, norm=norm))
        row = holds(f"{what}: weights differ by", f"{apart:.1e}", apart < 1e-5)
        yield row if place.on_gpu or row.verdict is Verdict.FAILED else not_run(what, "a CPU has no graphs")

    return check


def with_compressor(module: nn.Module) -> nn.Module:
    model = with_buckets(module)
    compress(model, "PowerSGD")
    return model


def synced_norm(module: nn.Module) -> nn.Module:
    return with_buckets(paceline.SyncBatchNorm.convert_sync_batchnorm(module))


alone = capture_of("paceline on one rank", paceline.DistributedDataParallel)
buckets = capture_of("paceline with buckets", with_buckets)
checked = capture_of("check_finite", lambda module: with_buckets(module, check_finite=True))
compressed = capture_of("a compressor", with_compressor)
normed = capture_of("SyncBatchNorm", synced_norm, norm=True)
peer = capture_of("torch DDP, for comparison", TorchDDP)


def callables(place: Place) -> Iterator[Row]:
    """A module that goes through ``make_graphed_callables`` and is then wrapped trains like an eager module."""
    module: Any = net(place)
    inner = module.layers
    if place.on_gpu:
        module.layers = torch.cuda.make_graphed_callables(inner, (batches(place)[0].clone(),))
    eager(with_buckets(module), place)
    error = between(module, trained(place, lambda module: module))
    yield holds("make_graphed_callables, then wrapped: weights differ by", f"{error:.1e}", error < 1e-5)


def compiled(place: Place) -> Iterator[Row]:
    """torch.compile inside and around the wrapper trains like eager mode."""
    if place.on_gpu and importlib.util.find_spec("triton") is None:
        raise NotRun("torch.compile needs triton, which is not installed")
    backend = "inductor" if place.on_gpu else "eager"
    expected = trained(place, lambda module: module)
    for where in ("inside", "around"):
        module = net(place)
        compiled_module: Any
        if where == "inside":
            compiled_module = with_buckets(torch.compile(module, backend=backend))  # type: ignore[arg-type]
        else:
            compiled_module = torch.compile(with_buckets(module), backend=backend)
        eager(compiled_module, place)
        error = between(module, expected)
        yield holds(f"torch.compile {where} the wrapper: weights differ by", f"{error:.1e}", error < 1e-4)
        torch._dynamo.reset()
