"""Checks on a single GPU that nothing reads a gradient, a bucket or an average too early.

NCCL on one rank does nothing, so a stand-in with a stream of its own takes its place (:mod:`gpu_checks.lateness`).
Every other stream is made late, and freed memory is overwritten.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import paceline
from gpu_checks.lateness import Fault, Lateness, Slow, StandIn
from gpu_checks.rows import Place, Row, holds, not_run
from gpu_checks.wrapping import between, difference, with_buckets
from paceline import compression

Register = Callable[[paceline.DistributedDataParallel], Any]
CAPACITY_MB = 0.02
"""A bucket for each layer of :class:`Slow`."""


def inputs(place: Place, rank: int | None = None) -> list[Tensor]:
    """The batches of `rank`, by default this one."""
    generator = torch.Generator().manual_seed(place.rank if rank is None else rank)
    return [torch.randn(32, 64, generator=generator).to(place.device) for _ in range(place.steps(6, 2))]


def slow(place: Place, lateness: Lateness, dtype: torch.dtype = torch.float32) -> Slow:
    torch.manual_seed(0)
    return Slow(lateness).to(place.device, dtype)


def expected_weights(place: Place, rate: float) -> Tensor:
    """The weights after training on all ranks' batches in one process, which waits for the device after every call."""
    module = slow(place, Lateness.NONE)
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
    module = slow(place, Lateness.GRADIENTS)
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
    """Delayed kernels give the same weights as a device that is waited for, with the NCCL of a single rank."""
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


def hooked(place: Place, register: Register, lateness: Lateness, dtype: torch.dtype) -> tuple[Slow, Any]:
    """Train with a communication hook; where nothing is late, the device is waited for after every call."""
    module = slow(place, lateness, dtype)
    model = with_buckets(module, bucket_cap_mb=CAPACITY_MB)
    state = register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = [x.to(dtype) for x in inputs(place)]
    place.synchronize()
    for x in batches:
        model(x).backward()
        if lateness is Lateness.NONE:
            place.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        if lateness is Lateness.NONE:
            place.synchronize()
    place.synchronize()
    return module, state


def compressors(place: Place) -> Iterator[Row]:
    """Compressors and their residuals come out the same with any work late, though freed memory is overwritten."""
    for kind in ("Cast", "Int8", "PowerSGD", "TopK"):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            register = partial(with_compressor, kind=kind)
            expected, state = hooked(place, register, Lateness.NONE, dtype)
            wanted = residuals(state)
            for lateness in (Lateness.GRADIENTS, Lateness.OTHER_STREAMS)[: place.steps(2, 1)]:  # a CPU has none
                module, state = hooked(place, register, lateness, dtype)
                error, apart = between(module, expected), difference(residuals(state), wanted)
                what = f"{kind}, {str(dtype).partition('.')[2]}, {lateness.value} late: weights, residuals differ by"
                # Residuals may differ more, because a rounding may decide which values are sent and which stay.
                yield holds(what, f"{error:.1e}, {apart:.1e}", max(error, apart / 100) < tolerance)
    yield early_free(place)


def with_compressor(model: paceline.DistributedDataParallel, kind: str) -> compression.Compressor:
    state = compressor(kind, model)
    model.register_comm_hook(state, compression.hook)
    return state


def residuals(state: compression.Compressor) -> list[Tensor]:
    return [tensor.clone() for tensor in state.state_dict().get("residuals", {}).values()]


def early_free(place: Place) -> Row:
    """A hook that gives memory back which its own stream has still to read is noticed."""
    what = "negative control, a hook frees what its stream still reads: weights differ by"
    if not place.on_gpu:
        return not_run(what, "a CPU has no streams")
    if dist.get_backend() == "gloo":
        return not_run(what, "over Gloo the host waits for the GPU, so nothing is late")
    if "NCCL_HOSTID" in os.environ:
        return not_run(what, "collectives of ranks that share a GPU take longer than anything here is late")
    expected, _ = hooked(place, lambda model: model.register_comm_hook(None, copies_late), Lateness.NONE, torch.float32)
    module, _ = hooked(
        place, lambda model: model.register_comm_hook(None, copies_late), Lateness.OTHER_STREAMS, torch.float32
    )
    error = between(module, expected)
    remedy = "the check does not notice what is freed too early, so its other lines prove less; send us the JSON"
    return holds(what, f"{error:.1e} (must be large)", error > 1e-3, remedy)


def copies_late(_state: object, bucket: Any) -> Any:
    """Copy a bucket aside and back on another stream, without telling the allocator of that stream."""
    flat_bucket = bucket.buffer()
    if not flat_bucket.is_cuda:
        done: Any = torch.futures.Future()
        done.set_result(flat_bucket)
        return done
    aside = flat_bucket.clone()
    stream = torch.cuda.Stream(flat_bucket.device)
    stream.wait_stream(torch.cuda.current_stream())
    done = torch.futures.Future(devices=[flat_bucket.device])
    with torch.cuda.stream(stream):
        flat_bucket.copy_(aside)
        done.set_result(flat_bucket)
    return done
