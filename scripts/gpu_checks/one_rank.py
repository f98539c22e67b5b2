"""Numerical results, the process group, checkpoints, and starting and leaving a world. Most need only one rank."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

import paceline
from gpu_checks.models import SMALL, TINY
from gpu_checks.rows import Place, Row, holds, not_run
from gpu_checks.wrapping import (
    alike,
    between,
    difference,
    gradient_of,
    gradients_differ,
    llama,
    tokens,
    torch_views,
    with_buckets,
)  # fmt: skip
from paceline.core.digests import weights_sha256
from paceline.errors import NonFiniteGradient


def equality(place: Place) -> Iterator[Row]:
    """Losses and weights over several steps are as with torch DDP."""
    shape, batch = (SMALL, (4, 128)) if place.on_gpu else (TINY, (2, 8))
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        ends = []
        for wrap in (torch_views, paceline.DistributedDataParallel, with_buckets):
            module = llama(place, shape, dtype)
            model = wrap(module)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            losses = []
            for step in range(8):
                loss = model(tokens(place, shape, step, batch))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            ends.append((torch.stack(losses), module))
            del model, optimizer
        name_of_dtype = str(dtype).partition(".")[2]
        for name, (losses_, module) in zip(("paceline", "with buckets"), ends[1:], strict=True):
            errors = difference([losses_], [ends[0][0]]), between(module, ends[0][1])
            what = f"{name} against torch DDP, {name_of_dtype}: loss, weights differ by"
            yield holds(what, "{:.1e}, {:.1e}".format(*errors), max(errors) < tolerance)
            if place.size > 1:
                yield holds(f"{name}, {name_of_dtype}: bits alike on all ranks", "", alike(module))


def own_group(place: Place) -> Iterator[Row]:
    """The "paceline" process group uses NCCL for tensors on the GPU."""
    group = dist.new_group(backend="paceline")
    for device in {torch.device("cpu"), place.device}:
        tensor = torch.full((1000,), float(place.rank + 1), device=device)
        dist.all_reduce(tensor, group=group)
        right = bool((tensor == place.size * (place.size + 1) / 2).all())
        yield holds(f"all-reduce of the group paceline, {device.type}", "", right)
    if place.on_gpu:
        name = group._get_backend(place.device).name()
        yield holds("its backend for the GPU", name, name == "nccl")
    torch.manual_seed(0)
    module = nn.Linear(8, 4).to(place.device)
    other = copy.deepcopy(module)
    model, twin = with_buckets(module, process_group=group), torch_views(other)
    x = torch.randn(6, 8, device=place.device) + place.rank
    for wrapper in (model, twin):
        wrapper(x).square().mean().backward()
    error = gradients_differ(module, other)
    yield holds("a model on the group paceline: gradients differ by", f"{error:.1e}", error < 1e-5)


def finite(place: Place) -> Iterator[Row]:
    """A NaN on one rank raises an error on every rank, and the next step is correct."""
    last = place.size - 1
    linear = nn.Linear(4, 4).to(place.device)
    model = with_buckets(linear, check_finite=True)
    x = torch.ones(2, 4, device=place.device)
    message = "no error"
    try:
        model(x * (float("nan") if place.rank == last else 1.0)).sum().backward()
        list(model.parameters())  # on a GPU, the error may not be raised until here
    except NonFiniteGradient as error:
        message = str(error)
    named = f"rank {last}" in message
    yield holds("check_finite names the rank whose gradient is NaN", "" if named else message, named)
    model.zero_grad()
    model(x).sum().backward()
    apart = difference([gradient_of(linear.weight)], [torch.full((4, 4), 2.0, device=place.device)])
    yield holds("and the next gradient differs by", f"{apart:.1e}", apart < 1e-6)


def checkpoint(place: Place) -> Iterator[Row]:
    """A checkpoint of rank 0 is restored to each rank's device."""
    shape = SMALL if place.on_gpu else TINY
    module = llama(place, shape, torch.float32)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    model = with_buckets(module)
    model(tokens(place, shape, 0, (2, 8))).backward()
    optimizer.step()
    saved = weights_sha256(module)
    checkpointer = paceline.Checkpointer(place.folder / "checkpoints")
    checkpointer.register("model", model)
    checkpointer.register("optimizer", optimizer)
    checkpointer.save(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    others = [torch.cuda.memory_allocated(at) for at in others_of(place)]
    checkpointer.restore()
    checkpointer.close()
    yield holds("a restored checkpoint has the same bits", "", weights_sha256(module) == saved)
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    stayed = all(tensor.device == place.device for tensor in [*module.parameters(), *states])
    stayed = stayed and others == [torch.cuda.memory_allocated(at) for at in others_of(place)]
    yield holds("weights and optimizer state are on the rank's device, and no other device is used", "", stayed)


def others_of(place: Place) -> list[int]:
    """Return the indices of the GPUs that this rank does not use."""
    return [at for at in range(torch.cuda.device_count()) if at != place.device.index] if place.on_gpu else []


def start(place: Place) -> Iterator[Row]:
    """``paceline.init()`` selects the right device, with and without the variables of a scheduler."""
    wanted = torch.device("cuda", 0) if place.on_gpu else torch.device("cpu")
    for backend in (None, "paceline"):
        with paceline.init(backend) as world:
            device = world.device
        called = f'init("{backend}")' if backend else "init()"
        yield holds(f"the device of {called}", str(device), device == wanted)
    what = "LOCAL_RANK=1 where each task sees one GPU: device"
    if place.on_gpu and torch.cuda.device_count() != 1:
        yield not_run(what, f"this process sees {torch.cuda.device_count()} GPUs; set CUDA_VISIBLE_DEVICES=0")
        return
    scheduled = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update(scheduled, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    try:
        with paceline.init() as world:
            value = str(world.device)
    except paceline.errors.WorldError as error:
        value = str(error)
    yield holds(what, value, value == str(wanted))


def leave(place: Place) -> Iterator[Row]:
    """An error ends ``with paceline.init()`` promptly, even during a collective that cannot complete."""
    began = time.monotonic()
    tensor = torch.ones(1 << 20, device=place.device)
    message = ""
    try:
        with paceline.init():
            dist.barrier()
            if place.rank == 0:
                dist.all_reduce(tensor, async_op=True)  # the other ranks never join
            began = time.monotonic()
            raise KeyError("the user's own error")
    except KeyError as error:
        message = str(error)
    took = time.monotonic() - began
    yield holds("seconds until an error leaves the world", f"{took:.1f}", bool(message) and took < 30, seconds=took)
