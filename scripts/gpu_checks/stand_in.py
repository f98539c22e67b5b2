"""Whether anything reads a gradient, a bucket or an average too early, found out on a single GPU.

NCCL on one rank does nothing, so a stand-in with a stream of its own takes its place (:mod:`gpu_checks.lateness`).
Every other stream is made late, and what is freed is overwritten.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from gpu_checks.lateness import Fault, Slow, StandIn, delay_other_streams
from gpu_checks.rows import Place, Row, holds, not_run
from gpu_checks.wrapping import between, difference, with_buckets
from paceline import compression

CAPACITY_MB = 0.02
"""A bucket for each layer of :class:`Slow`."""


def inputs(place: Place, rank: int | None = None) -> list[Tensor]:
    """The batches of `rank`, by default this one."""
    generator = torch.Generator().manual_seed(place.rank if rank is None else rank)
    return [torch.randn(32, 64, generator=generator).to(place.device) for _ in range(place.steps(6, 3))]


def slow(place: Place, dtype: torch.dtype = torch.float32) -> Slow:
    torch.manual_seed(0)
    return Slow().to(place.device, dtype)


def expected_weights(place: Place, rate: float) -> Tensor:
    """The weights after training on all ranks' batches in one process, which waits for the device after every call."""
    module = slow(place)
    module.late = False
    optimizer = torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9)
    for parts in zip(*(inputs(place, rank) for rank in range(place.size)), strict=True):
        module(torch.cat(parts)).backward()
        place.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        place.synchronize()
    return flat(module)


def flat(module: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def late_weights(place: Place, rate: float, *, stand_in: bool, side: bool, fault: Fault = Fault.NONE) -> Tensor:
    """The weights after the same training with the wrapper, where everything is late and nothing is waited for."""
    module = slow(place)
    model = with_buckets(module, bucket_cap_mb=CAPACITY_MB)
    replaced = StandIn(model, fault) if stand_in else None
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    batches = inputs(place)
    place.synchronize()
    stream = torch.cuda.Stream(place.device) if side and place.on_gpu else None
    with torch.cuda.stream(stream):
        for x in batches:
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = flat(module)
    place.synchronize()
    if replaced is not None:
        assert replaced.launched >= 2 * len(batches), "the stand-in was given no buckets"
    return weights


def late_gradients(place: Place) -> Iterator[Row]:
    """Delayed kernels give what a device that is waited for gives, with what this rank's NCCL does."""
    expected = expected_weights(place, 0.1)
    for side in (False, True):
        error = difference([late_weights(place, 0.1, stand_in=False, side=side)], [expected])
        where = "a side stream" if side else "the default stream"
        yield holds(f"late gradients, training in {where}: weights differ by", f"{error:.1e}", error < 1e-5)


def doubled(place: Place) -> Iterator[Row]:
    """A collective that runs late on its own stream is waited for on both sides; leaving out a wait is noticed."""
    expected = expected_weights(place, 0.2)  # gradients come out doubled, as sums over two equal ranks
    for side in (False, True):
        error = difference([late_weights(place, 0.1, stand_in=True, side=side)], [expected])
        where = "a side stream" if side else "the default stream"
        yield holds(f"stand-in for NCCL, training in {where}: weights differ by", f"{error:.1e}", error < 1e-5)
    for fault in (Fault.READ, Fault.LAUNCH):
        what = f"negative control, {fault.value}: weights differ by"
        if fault is Fault.LAUNCH and not place.on_gpu:
            yield not_run(what, "a CPU's gradients are there when they are launched")
            continue
        error = difference([late_weights(place, 0.1, stand_in=True, side=False, fault=fault)], [expected])
        remedy = "the check does not notice a wait that is left out, so its other lines prove nothing; raise CYCLES"
        yield holds(what, f"{error:.1e} (must be large)", error > 1e-3, remedy)


def compressor(kind: str, model: torch.nn.Module) -> compression.Compressor:
    """A compressor by its name."""
    if kind == "Cast":
        return compression.Cast(model, torch.bfloat16)
    if kind == "PowerSGD":
        return compression.PowerSGD(model, rank=2)
    if kind == "TopK":
        return compression.TopK(model, fraction=0.1)
    return compression.Int8(model)


def compressed(place: Place, kind: str, dtype: torch.dtype, *, late: bool) -> tuple[Slow, compression.Compressor]:
    """Train with a compressor; `late` with every stream late and nothing waited for, else one step after another."""
    module = slow(place, dtype)
    module.late = late
    model = with_buckets(module, bucket_cap_mb=CAPACITY_MB)
    state = compressor(kind, model)
    model.register_comm_hook(state, compression.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x in inputs(place):
        loss = model(x.to(dtype))
        if late:
            delay_other_streams(place.device)
        loss.backward()
        if not late:
            place.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        if not late:
            place.synchronize()
    place.synchronize()
    return module, state


def compressors(place: Place) -> Iterator[Row]:
    """Compressors and their residuals come out the same where everything is late and freed memory is overwritten."""
    for kind in ("Cast", "Int8", "PowerSGD", "TopK"):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            at_once, state = compressed(place, kind, dtype, late=False)
            wanted = copy.deepcopy(state.state_dict())
            late, state = compressed(place, kind, dtype, late=True)
            error = between(late, at_once)
            residuals = list(state.state_dict().get("residuals", {}).values())
            before = list(wanted.get("residuals", {}).values())
            apart = difference(residuals, before) if residuals else 0.0
            what = f"{kind}, {str(dtype).partition('.')[2]}, late against step by step: weights, residuals differ by"
            yield holds(what, f"{error:.1e}, {apart:.1e}", max(error, apart / 100) < tolerance)
