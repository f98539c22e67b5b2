"""torch.compile inside or around the wrapper gives the gradients of eager mode and keeps the overlap."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from insides import LAUNCH, WAIT, recorder
from paceline import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from ranks import Pools, run_ranks
from twins import Case, reentrant, same_gradients, same_weights, train_beside_twin

WIDTH = 384
"""A square fp64 layer of this width fills a bucket of 1 MiB, the smallest size at which torch splits graphs."""
STEPS = 3


class Layers(nn.Module):
    def __init__(self, count: int = 4, *, checkpointing: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(count)])
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
            x = x.tanh()
        return x


def sequence() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2)])


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def ignore_warnings(world: World, function: Callable[..., Any], *arguments: Any) -> Any:
    with warnings.catch_warnings():
        # torch.compile reads .grad of every tensor it finds, and torch warns about that.
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.")  # used by torch.compile itself
        return function(world, *arguments)


def run(pools: Pools, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return pools.run(2, ignore_warnings, function, *arguments)


def batch(rank: int, step: int, count: int = 3) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def compiled(how: str, module: nn.Module, **options: Any) -> tuple[DistributedDataParallel, Callable[[Tensor], Tensor]]:
    """Return a wrapper with buckets of 1 MiB and the compiled callable."""
    compile_ = partial(torch.compile, **{"backend": "aot_eager", **options})
    if how == "inside":
        model = DistributedDataParallel(compile_(module), bucket_cap_mb=1)
        return model, model
    model = DistributedDataParallel(module, bucket_cap_mb=1)
    if how == "outside":
        return model, compile_(model)
    if how == "in place":
        model.compile(**{"backend": "aot_eager", **options})
        return model, model
    return model, compile_(lambda x: model(x) * 1)  # "in a function"


def compare_with_eager(world: World, how: str, build: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    """Train compiled beside an eager wrapper; compile nothing after the first step."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    module, twin = build(), build()
    model, call = compiled(how, module, **options)
    eager = DistributedDataParallel(twin, bucket_cap_mb=1)
    optimizers = [torch.optim.AdamW(wrapper.parameters(), lr=0.01) for wrapper in (model, eager)]
    previous = 0
    for step in range(STEPS):
        x = batch(world.rank, step)
        call(x).square().mean().backward()
        eager(x).square().mean().backward()
        same_gradients(module, twin, where=f"step {step}:")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_weights(module, twin, where=f"step {step}:")
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert previous == graphs if step else graphs > 0, f"{graphs} graphs after step {step}, {previous} before"
        previous = graphs


FULL = {"fullgraph": True}
layers = partial(Layers, 2)  # one graph per layer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "build", "options"),
    [
        ("inside", layers, FULL),
        ("outside", sequence, FULL),
        ("outside", linear, FULL),  # a torch class that no other case calls
        ("in place", layers, FULL),
        ("in a function", layers, {}),
        ("inside", partial(Layers, 2, checkpointing=True), {}),
        ("outside", layers, {"dynamic": True}),
    ],
)
def test_compiled_equals_eager(pools: Pools, how: str, build: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    run(pools, compare_with_eager, how, build, options)


def with_inductor(world: World, how: str, folder: str) -> None:
    # All ranks share a folder, so that each kernel is compiled once, with little setup.
    options = {"compile_threads": 1, "cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": False}
    with mock.patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR=folder):
        compare_with_eager(world, how, partial(Layers, 1), {"backend": "inductor", "options": options})


@pytest.mark.slow
def test_compiled_by_inductor_equals_eager(tmp_path: Path) -> None:
    run_ranks(2, ignore_warnings, with_inductor, "outside", str(tmp_path))


# -- accumulation, weights, unused parts: beside one process -----------------------------------------------------------


def inside(build: Callable[[], nn.Module]) -> nn.Module:
    return torch.compile(build(), backend="aot_eager")


def train_compiled(world: World, case: Case) -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    train_beside_twin(world, replace(case, build=partial(inside, case.build)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


FEW = (12, 12, 7)
CASES = {
    "no_sync, weights, batches of changing size": Case(micros=2),
    "no_sync around backward, zeroed gradients": Case(batches=FEW, micros=2, window="backward", set_to_none=False),
    "other parts on other ranks": Case(batches=FEW, pattern="other parts on other ranks"),
    "reentrant checkpoints": Case(batches=FEW, build=reentrant),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_compiled_equals_one_process(pools: Pools, case: Case) -> None:
    run(pools, train_compiled, case)


# -- overlap -----------------------------------------------------------------------------------------------------------


def order_of_events(world: World, how: str) -> list[str]:
    """Return the events of each step: G for a compiled graph's backward, L for a launch, W for a wait."""
    from functorch.compile import make_boxed_func  # only in ranks, because these imports take a second
    from torch._dynamo.backends.common import aot_autograd

    torch.compiler.reset()
    events: list[str] = []
    record = recorder.span

    def span(label: str, *arguments: Any, **options: Any) -> Any:
        if label in (LAUNCH, WAIT):
            events.append(label[0].upper())
        return record(label, *arguments, **options)

    def backward_of(graph: Any, _inputs: Any) -> Any:
        def run(*arguments: Tensor) -> Any:
            events.append("G")
            return graph(*arguments)

        return make_boxed_func(run)

    backend = aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=backward_of)
    _, call = compiled(how, Layers(), backend=backend)
    steps = []
    for step in range(3):
        events.clear()
        loss = call(batch(world.rank, step)).sum()
        with mock.patch.multiple(recorder, on=True, span=span):
            loss.backward()
        steps.append("".join(events))
    return steps


@pytest.mark.parametrize("how", ["inside", "outside"])
def test_every_bucket_is_launched_before_the_next_graph_runs(pools: Pools, how: str) -> None:
    for first, *others in run(pools, order_of_events, how):
        assert first == "GLGLGLGLW"
        # The rebuilt buckets include one for the remainder. The second step also compares the parameters.
        assert others == ["GLGLGLGLLWW", "GLGLGLGLLW"]


# -- compiling whole steps ---------------------------------------------------------------------------------------------


def whole_step(world: World) -> int:
    """Train with a compiled step beside an eager one; return the number of compiled graphs."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    module, twin = Layers(2), Layers(2)
    model, eager = DistributedDataParallel(module), DistributedDataParallel(twin)
    optimizers = [torch.optim.SGD(wrapper.parameters(), lr=0.1) for wrapper in (model, eager)]

    def step_of(wrapper: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            wrapper(x).square().mean().backward()
            optimizer.step()

        return step

    compiled_step = torch.compile(step_of(model, optimizers[0]), backend="aot_eager")
    eager_step = step_of(eager, optimizers[1])
    for step in range(3):
        compiled_step(batch(world.rank, step))
        eager_step(batch(world.rank, step))
        same_gradients(module, twin)
        same_weights(module, twin)
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.slow
def test_whole_step_can_be_compiled(pools: Pools) -> None:
    assert min(run(pools, whole_step)) > 0


def under_compiled_autograd(world: World) -> None:
    torch.compiler.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):
        model = DistributedDataParallel(Layers(1))

        @torch.compile(backend="aot_eager")
        def step(x: Tensor) -> None:
            model(x).sum().backward()

        with pytest.raises(UsageError, match=r"compiled autograd.*set torch._dynamo.config.compiled_autograd = False"):
            step(batch(world.rank, 0))
    model.zero_grad()
    model(batch(world.rank, 0)).sum().backward()  # works without compiled autograd


@pytest.mark.slow
def test_compiled_autograd_is_refused(pools: Pools) -> None:
    run(pools, under_compiled_autograd)
