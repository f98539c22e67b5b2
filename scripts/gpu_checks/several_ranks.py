"""Comparisons of several ranks with one process that trains on the whole global batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import paceline
import twins
from gpu_checks.models import Net, perceptron
from gpu_checks.rows import Place, Row, holds
from gpu_checks.wrapping import alike, between, gradient_of, gradients_differ, rows_of, with_buckets
from paceline.errors import PacelineError

WIDTH = 16


def mlp(place: Place, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return perceptron(WIDTH, 64, 64, WIDTH).to(place.device, dtype)


TWINS = {
    "uneven batches": twins.Case(),
    "micro-batches of unequal size": twins.Case(batches=(12, 7, 13), micros=3),
    "micro-batches, no_sync around backward alone": twins.Case(batches=(12, 7), micros=2, window="backward"),
    "a part that rank 0 leaves out": twins.Case(pattern="unused on rank 0"),
    "a part that rank 0 alone uses": twins.Case(pattern="used on rank 0 alone"),
    "a part that is unused in odd steps": twins.Case(pattern="unused on all in odd steps"),
    "a part used twice on rank 0, reentrant checkpoints": twins.Case(twins.reentrant, "a part twice on rank 0"),
    "tied weights, AdamW": twins.Case(twins.Tied, optimizer="adamw"),
    "complex, scalar and transposed parameters": twins.Case(twins.Odd),
    "channels last": twins.Case(twins.ChannelsLast),
}
"""Cases of the test suite, here with small buckets."""


NORMS: dict[str, tuple[tuple[int, ...], torch.dtype, float, dict[str, Any]]] = {
    "values": ((), torch.float32, 1e-4, {}),
    "images in channels last": ((6, 7), torch.float32, 1e-4, {}),
    "bfloat16 images in channels last": ((6, 7), torch.bfloat16, 3e-2, {}),
    "no running statistics": ((4,), torch.float32, 1e-4, {"track_running_stats": False}),
}
"""Cases of SyncBatchNorm: size after the channels, dtype, relative tolerance, and options."""


def agrees(what: str, compare: Callable[..., object], *arguments: Any, **options: Any) -> Row:
    """Return the line of a comparison from the test suite, which raises an AssertionError at a difference."""
    try:
        compare(*arguments, **options)
    except AssertionError as error:
        return holds(what, str(error), False)
    return holds(what, "", True)


def one_process(place: Place) -> Iterator[Row]:
    """In every step, gradients (including None) and weights equal one process on the whole global batch."""
    for name, case in TWINS.items():
        here = replace(case, device=place.device, options={"bucket_cap_mb": 0.0002, **case.options})
        yield agrees(f"{name}: as one process on the whole batch", twins.train_beside_twin, place, here)


def sparse(place: Place) -> Iterator[Row]:
    """Sparse gradients of an embedding are averaged, and stay sparse."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 2)).to(place.device)
    reference = copy.deepcopy(module)
    model = with_buckets(module)
    for step in range(2):
        ids = torch.randint(50, (place.size, 6), generator=torch.Generator().manual_seed(step)).to(place.device)
        model.zero_grad()
        reference.zero_grad()
        model(ids[place.rank]).square().mean().backward()
        reference(ids).square().mean().backward()
    error = gradients_differ(module, reference)
    is_sparse = gradient_of(module[0].weight).is_sparse  # type: ignore[arg-type]
    yield holds("a sparse embedding: gradients differ by", f"{error:.1e}", error < 1e-5 and is_sparse)


def batch_norm(place: Place) -> Iterator[Row]:
    """SyncBatchNorm over uneven batches equals BatchNorm in one process."""
    sizes = tuple(3 + rank for rank in range(place.size))
    for name, (sides, dtype, rtol, options) in NORMS.items():
        what = f"SyncBatchNorm against one process, {name}: outputs, gradients, statistics"
        case = (sizes, (5, *sides), options, "channels last" in name, dtype, rtol)
        yield agrees(what, twins.norm_beside_twin, place, *case, device=place.device)


def sharded(place: Place) -> Iterator[Row]:
    """The sharded optimizer computes the same weights as an unsharded one."""
    kinds: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
        "foreach": (torch.float32, {"foreach": True}),
        "fused": (torch.float32, {"fused": True}),
        "fused, bfloat16": (torch.bfloat16, {"fused": True}),
        "bfloat16, float32 master weights": (torch.bfloat16, {"master_dtype": torch.float32}),
    }
    for name, (dtype, settings) in kinds.items():
        modules = [mlp(place, dtype) for _ in range(2)]
        models = [with_buckets(module, bucket_cap_mb=0.01) for module in modules]
        plain = {key: value for key, value in settings.items() if key in ("foreach", "fused")}
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(models[0].parameters(), lr=0.01, **plain),
            paceline.optim.ShardedOptimizer(models[1], torch.optim.AdamW, lr=0.01, **settings),
        ]
        for step in range(10):
            _, mine = rows_of(place, step, WIDTH)
            for model, optimizer in zip(models, optimizers, strict=True):
                model(mine.to(dtype)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        error = between(modules[1], modules[0])
        # Master weights avoid rounding to bfloat16 in every step, so results differ more.
        tolerance = 1e-6 if dtype is torch.float32 else 0.1 if "master_dtype" in settings else 1e-2
        yield holds(f"sharded AdamW, {name}: weights differ by", f"{error:.1e}", error < tolerance)
        yield holds(f"sharded AdamW, {name}: bits alike on all ranks", "", alike(modules[1]))


def abort(place: Place) -> Iterator[Row]:
    """After an exception in the middle of backward, on one rank or on all, the next step is correct."""
    for who, ranks in (("all ranks", range(place.size)), ("the last rank", range(place.size - 1, place.size))):
        module = mlp(place)
        reference = copy.deepcopy(module)
        model = with_buckets(module, bucket_cap_mb=0.01)
        _, mine = rows_of(place, 0, WIDTH)
        model(mine).backward()  # so that the buckets get their final order
        model.zero_grad()
        raised = aborted(model, mine, place.rank in ranks)
        model.zero_grad()
        whole, mine = rows_of(place, 1, WIDTH)
        model(mine).backward()
        reference(whole).backward()
        error = gradients_differ(module, reference)
        what = f"a backward that {who} aborted, followed by a complete one: gradients differ by"
        yield holds(what, f"{error:.1e}", error < 1e-5)
        yield holds(f"every rank raises if {who} aborted a backward", "", raised)


def aborted(model: nn.Module, x: Tensor, here: bool) -> bool:
    """Run a backward pass that fails on this rank if `here`, else on another. Return whether this rank raised."""

    def fail(*_: object) -> None:
        raise ArithmeticError("on purpose")

    module: Net = model.module  # type: ignore[assignment]
    handle = module.layers[2].register_full_backward_hook(fail) if here else None
    try:
        model(x).backward()
        list(model.parameters())  # on a GPU, another rank's failure may not be raised until here
    except (ArithmeticError, PacelineError):
        return True
    finally:
        if handle is not None:
            handle.remove()
    return False
