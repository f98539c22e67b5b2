"""Checks on a single GPU that no gradient, bucket or average is read too early.

On a single rank, NCCL does nothing, so a stand-in on a separate stream replaces it (:mod:`gpu_checks.lateness`). All
other streams are delayed, and freed memory is overwritten.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline
from gpu_checks.lateness import Fault, Lateness, Slow, StandIn
from gpu_checks.rows import Place, Row, holds, not_run
from gpu_checks.wrapping import COMPRESSORS, between, compress, difference, with_buckets

Register = Callable[[paceline.DistributedDataParallel], Any]
CAPACITY_MB = 0.02
"""Bucket size that gives :class:`Slow` one bucket per layer."""
SIDES = {False: "the default stream", True: "a side stream"}


def inputs(place: Place, rank: int) -> list[Tensor]:
    """Return the training batches of `rank`."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(32, 64, generator=generator).to(place.device) for _ in range(place.steps(6, 2))]


def slow(place: Place, lateness: Lateness, dtype: torch.dtype = torch.float32) -> Slow:
    torch.manual_seed(0)
    return Slow(lateness).to(place.device, dtype)


def train(place: Place, model: nn.Module, batches: Sequence[Tensor], rate: float, *, waits: bool) -> Tensor:
    """Train, and return the weights. With `waits`, wait for the device after every call."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for x in batches:
        model(x).backward()
        if waits:
            place.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        if waits:
            place.synchronize()
    return torch.cat([parameter.detach().flatten() for parameter in paceline.unwrap(model).parameters()])


def expected_weights(place: Place, rate: float) -> Tensor:
    """Return the weights after training in one process on the batches of all ranks."""
    batches = [torch.cat(parts) for parts in zip(*(inputs(place, rank) for rank in range(place.size)), strict=True)]
    return train(place, slow(place, Lateness.NONE), batches, rate, waits=True)


def late_weights(place: Place, rate: float, *, stand_in: bool, side: bool, fault: Fault = Fault.NONE) -> Tensor:
    """Return the weights after the same training with the wrapper, with delays and no waits of the host."""
    model = with_buckets(slow(place, Lateness.GRADIENTS), bucket_cap_mb=CAPACITY_MB)
    replaced = StandIn(model, fault) if stand_in else None
    batches = inputs(place, place.rank)
    place.synchronize()
    stream = torch.cuda.Stream(place.device) if side and place.on_gpu else None
    with torch.cuda.stream(stream):
        weights = train(place, model, batches, rate, waits=False)
    place.synchronize()
    if replaced is not None:
        assert replaced.launched >= 2 * len(batches), "the stand-in did not get the buckets"
    return weights


def late_gradients(place: Place) -> Iterator[Row]:
    """Delayed gradients do not change the weights when training with NCCL."""
    expected = expected_weights(place, 0.1)
    for side, name in SIDES.items():
        error = difference([late_weights(place, 0.1, stand_in=False, side=side)], [expected])
        yield holds(f"late gradients, training in {name}: weights differ by", f"{error:.1e}", error < 1e-5)


def doubled(place: Place) -> Iterator[Row]:
    """A late collective on a separate stream does not change the weights, unless a wait is left out."""
    expected = expected_weights(place, 0.2)  # twice the rate, because the stand-in doubles gradients
    for side, name in SIDES.items():
        error = difference([late_weights(place, 0.1, stand_in=True, side=side)], [expected])
        yield holds(f"stand-in for NCCL, training in {name}: weights differ by", f"{error:.1e}", error < 1e-5)
    for fault in (Fault.READ, Fault.LAUNCH):
        what = f"negative control, {fault.value}: weights differ by"
        if fault is Fault.LAUNCH and not place.on_gpu:
            yield not_run(what, "on a CPU, gradients are complete when they are launched")
            continue
        error = difference([late_weights(place, 0.1, stand_in=True, side=False, fault=fault)], [expected])
        remedy = "the check does not detect a missing wait, so its other lines are not valid; raise CYCLES"
        yield holds(what, f"{error:.1e} (must be large)", error > 1e-3, remedy)


def hooked(
    place: Place, register: Register, lateness: Lateness, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Any]:
    """Train with a communication hook. Without delays, wait for the device after every call."""
    model = with_buckets(slow(place, lateness, dtype), bucket_cap_mb=CAPACITY_MB)
    state = register(model)
    batches = [x.to(dtype) for x in inputs(place, place.rank)]
    place.synchronize()
    train(place, model, batches, 0.01, waits=lateness is Lateness.NONE)
    place.synchronize()
    return model, state


def compressors(place: Place) -> Iterator[Row]:
    """Delays do not change weights or residuals, even though freed memory is overwritten."""
    for kind in COMPRESSORS:
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            register = partial(compress, kind=kind)
            expected, state = hooked(place, register, Lateness.NONE, dtype)
            wanted = residuals(state)
            for lateness in (Lateness.GRADIENTS, Lateness.OTHER_STREAMS)[: place.steps(2, 1)]:  # a CPU has one stream
                model, state = hooked(place, register, lateness, dtype)
                error, apart = between(model, expected), difference(residuals(state), wanted)
                what = f"{kind}, {str(dtype).partition('.')[2]}, {lateness.value} late: weights, residuals differ by"
                # Residuals may differ more, because rounding may change which values are sent.
                yield holds(what, f"{error:.1e}, {apart:.1e}", max(error, apart / 100) < tolerance)
    yield early_free(place)


def residuals(state: Any) -> list[Tensor]:
    return [tensor.clone() for tensor in state.state_dict().get("residuals", {}).values()]


def early_free(place: Place) -> Row:
    """Check, as a negative control, that a hook that frees memory too early changes the weights."""
    what = "negative control, a hook frees memory that its stream still reads: weights differ by"
    if not place.on_gpu:
        return not_run(what, "a CPU has one stream")
    if dist.get_backend() == "gloo":
        return not_run(what, "over Gloo the host waits for the GPU, so work is never late")
    if "NCCL_HOSTID" in os.environ:
        return not_run(what, "collectives of ranks that share a GPU take longer than all delays")
    models = [
        hooked(place, lambda model: model.register_comm_hook(None, copies_late), lateness)[0]
        for lateness in (Lateness.OTHER_STREAMS, Lateness.NONE)
    ]
    error = between(*models)
    remedy = "the check does not detect memory that is freed too early; send us the JSON"
    return holds(what, f"{error:.1e} (must be large)", error > 1e-3, remedy)


def copies_late(_state: object, bucket: Any) -> torch.futures.Future[Tensor]:
    """Copy a bucket, and copy it back on another stream without calling `record_stream`."""
    flat_bucket = bucket.buffer()
    aside = flat_bucket.clone()
    stream = torch.cuda.Stream(flat_bucket.device)
    stream.wait_stream(torch.cuda.current_stream())
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat_bucket.device])
    with torch.cuda.stream(stream):
        flat_bucket.copy_(aside)
        done.set_result(flat_bucket)
    return done
