"""CUDA graphs of whole steps, and torch.compile. A step that cannot be captured must raise a UsageError."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import paceline
from gpu_checks.models import Net
from gpu_checks.rows import NotRun, Place, Row, Verdict, holds, not_run
from gpu_checks.wrapping import TorchDDP, Wrap, between, compress, with_buckets
from paceline.errors import UsageError

WARM_UP, REPLAYS = 11, 4
WIDTH = 32


def net(place: Place, norm: bool = False) -> Net:
    """Return two layers, with BatchNorm between them if `norm`."""
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(64)] if norm else []
    return Net(nn.Linear(WIDTH, 64), *middle, nn.Tanh(), nn.Linear(64, WIDTH)).to(place.device)


def batches(place: Place) -> list[Tensor]:
    generator = torch.Generator().manual_seed(place.rank)
    return [torch.randn(16, WIDTH, generator=generator).to(place.device) for _ in range(WARM_UP + REPLAYS)]


def trained(place: Place, wrap: Wrap, *, norm: bool = False, captures: bool = False) -> Net:
    """Train. If `captures`, run the first steps on a side stream, capture one, and replay it for the other steps."""
    captures = captures and place.on_gpu
    module = net(place, norm)
    stream = torch.cuda.Stream(place.device) if captures else None
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
    replay = captured(step) if captures else step
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

    def graphed(module: Any) -> nn.Module:
        if place.on_gpu:
            module.layers = torch.cuda.make_graphed_callables(module.layers, (batches(place)[0].clone(),))
        return with_buckets(module)

    error = between(trained(place, graphed), trained(place, lambda module: module))
    yield holds("make_graphed_callables, then wrapped: weights differ by", f"{error:.1e}", error < 1e-5)


def compiled(place: Place) -> Iterator[Row]:
    """torch.compile inside and around the wrapper trains like eager mode."""
    if place.on_gpu and importlib.util.find_spec("triton") is None:
        raise NotRun("torch.compile needs triton, which is not installed")
    compiled_by: Any = partial(torch.compile, backend="inductor" if place.on_gpu else "eager")
    wraps: dict[str, Wrap] = {
        "inside": lambda module: with_buckets(compiled_by(module)),
        "around": lambda module: compiled_by(with_buckets(module)),
    }
    expected = trained(place, lambda module: module)
    for where, wrap in wraps.items():
        error = between(trained(place, wrap), expected)
        yield holds(f"torch.compile {where} the wrapper: weights differ by", f"{error:.1e}", error < 1e-4)
        torch._dynamo.reset()
