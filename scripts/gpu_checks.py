"""What ``gpu_check.py`` checks: each check gives the same number of rows on every rank."""

from __future__ import annotations

import copy
import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from gpu_models import SHAPES, Llama, Place, Row, Shape, Slow
from torch import Tensor, nn

import paceline
from paceline.digests import weights_sha256
from paceline.errors import NonFiniteGradient

TorchDDP = nn.parallel.DistributedDataParallel


def build(place: Place, shape: Shape, dtype: torch.dtype) -> Llama:
    """The same random weights on every rank, and each time."""
    torch.manual_seed(0)
    with torch.device(place.device):
        return Llama(shape).to(dtype)


def batch(place: Place, shape: Shape, step: int) -> Tensor:
    """This rank's tokens in `step`."""
    generator = torch.Generator().manual_seed(1000 * step + place.rank)
    return torch.randint(shape.vocabulary, shape.tokens, generator=generator).to(place.device)


def with_torch(module: nn.Module, **options: Any) -> nn.Module:
    """torch's wrapper in its fastest setting."""
    return TorchDDP(module, gradient_as_bucket_view=True, **options)


def with_paceline(module: nn.Module, **options: Any) -> paceline.DistributedDataParallel:
    """Our wrapper, with buckets and collectives also where the rank is alone."""
    model = paceline.DistributedDataParallel(module, **options)
    model._whole_reducer()
    return model


def equality(place: Place) -> Iterator[Row]:
    """Losses and weights over several steps are those of torch's DDP."""
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        ends = []
        for wrap in (with_torch, paceline.DistributedDataParallel, with_paceline):
            module = build(place, place.compared, dtype)
            model = wrap(module)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            losses = []
            for step in range(8):
                loss = model(batch(place, place.compared, step))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            ends.append((torch.stack(losses), module))
            del model, optimizer
        for name, (losses_, module) in zip(("paceline", "buckets"), ends[1:], strict=True):
            loss_error = float((losses_ - ends[0][0]).abs().max() / ends[0][0].abs().max())
            pairs = [
                (a.detach(), b.detach()) for a, b in zip(module.parameters(), ends[0][1].parameters(), strict=True)
            ]
            error = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
            what = f"{name} against torch DDP, {str(dtype).partition('.')[2]}: loss, weights differ by"
            yield Row(place.size, what, f"{loss_error:.1e}, {error:.1e}", max(loss_error, error) < tolerance)
            yield Row(place.size, f"{name}: bits alike on all ranks", "", alike(weights_sha256(module)))


def gradient_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def alike(value: str) -> bool:
    """Whether all ranks have the same value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return len(set(values)) == 1


def streams(place: Place) -> Iterator[Row]:
    """Nothing reads a gradient or a bucket too early: delayed kernels give what a device that is waited for gives."""

    def train(late: bool, side: bool) -> Tensor:
        torch.manual_seed(0)
        module = Slow().to(place.device)
        module.late = late
        model = with_paceline(module, bucket_cap_mb=0.02)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(place.rank)
        inputs = [torch.randn(32, 64, generator=generator).to(place.device) for _ in range(6)]
        place.synchronize()
        stream = torch.cuda.Stream(place.device) if side and place.on_gpu else None
        with torch.cuda.stream(stream):
            for x in inputs:
                model(x).backward()
                if not late:
                    place.synchronize()
                optimizer.step()
                optimizer.zero_grad()
                if not late:
                    place.synchronize()
            weights = torch.cat([p.detach().flatten() for p in module.parameters()])
        place.synchronize()
        return weights

    expected = train(late=False, side=False)
    for side in (False, True):
        error = float((train(late=True, side=side) - expected).abs().max() / expected.abs().max())
        where = "a side stream" if side else "one stream"
        yield Row(place.size, f"late gradients in {where}: weights differ by", f"{error:.1e}", error < 1e-5)


def own_group(place: Place) -> Iterator[Row]:
    """The process group "paceline" hands tensors on the GPU to NCCL."""
    group = dist.new_group(backend="paceline")
    for device in {torch.device("cpu"), place.device}:
        tensor = torch.full((1000,), float(place.rank + 1), device=device)
        dist.all_reduce(tensor, group=group)
        right = bool((tensor == place.size * (place.size + 1) / 2).all())
        yield Row(place.size, f"all-reduce of the group paceline, {device.type}", "", right)
    if place.on_gpu:
        name = group._get_backend(place.device).name()
        yield Row(place.size, "its backend for the GPU", name, name == "nccl")
    torch.manual_seed(0)
    module = nn.Linear(8, 4).to(place.device)
    other = copy.deepcopy(module)
    model, twin = with_paceline(module, process_group=group), with_torch(other)
    x = torch.randn(6, 8, device=place.device) + place.rank
    for one in (model, twin):
        one(x).square().mean().backward()
    error = float((gradient_of(module.weight) - gradient_of(other.weight)).abs().max())
    yield Row(place.size, "a model on the group paceline: gradients differ by", f"{error:.1e}", error < 1e-5)


def batch_norm(place: Place) -> Iterator[Row]:
    """SyncBatchNorm over uneven batches equals BatchNorm of one process."""
    parts = [torch.randn(3 + rank, 5, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(place.size)]
    torch.manual_seed(0)
    one = nn.BatchNorm1d(5).to(place.device)
    ours = paceline.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(one))
    whole = torch.cat(parts).to(place.device).requires_grad_()
    mine = parts[place.rank].to(place.device).requires_grad_()
    one(whole).sin().sum().backward()
    out = ours(mine)
    out.sin().sum().backward()
    start = sum(len(part) for part in parts[: place.rank])
    gradient = gradient_of(whole)[start : start + len(mine)]
    error = max(
        float((gradient_of(mine) - gradient).abs().max()), float((ours.running_var - one.running_var).abs().max())
    )
    yield Row(place.size, "SyncBatchNorm against one process: gradients, statistics", f"{error:.1e}", error < 1e-4)


def finite(place: Place) -> Iterator[Row]:
    """A NaN on one rank is an error on every rank."""
    model = with_paceline(nn.Linear(4, 4).to(place.device), check_finite=True)
    x = torch.ones(2, 4, device=place.device) * (float("nan") if place.rank == place.size - 1 else 1.0)
    try:
        model(x).sum().backward()
        raised = False
    except NonFiniteGradient as error:
        raised = f"rank {place.size - 1}" in str(error)
    yield Row(place.size, "check_finite names the rank whose gradient is NaN", "", raised)


def checkpoint(place: Place) -> Iterator[Row]:
    """A checkpoint of rank 0 comes back onto each rank's own device."""
    box: list[Any] = [tempfile.mkdtemp() if place.rank == 0 else None]
    dist.broadcast_object_list(box)
    module = build(place, place.compared, torch.float32)
    before = weights_sha256(module)
    checkpointer = paceline.Checkpointer(box[0])
    checkpointer.register("model", with_paceline(module))
    checkpointer.save(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    others = [torch.cuda.memory_allocated(at) for at in others_of(place)]
    checkpointer.restore()
    checkpointer.close()
    stayed = others == [torch.cuda.memory_allocated(at) for at in others_of(place)]
    stayed = stayed and all(parameter.device == place.device for parameter in module.parameters())
    yield Row(place.size, "a checkpoint comes back to the rank's own device", "", weights_sha256(module) == before)
    yield Row(place.size, "and touches no other", "", stayed)
    if place.rank == 0:
        shutil.rmtree(box[0])


def others_of(place: Place) -> list[int]:
    """GPUs that are not this rank's."""
    return [at for at in range(torch.cuda.device_count()) if at != place.device.index] if place.on_gpu else []


def memory(place: Place) -> Iterator[Row]:
    """The peak of a step is at most torch DDP's and the largest bucket; what NCCL takes is told beside it."""
    if not place.on_gpu:
        yield Row(place.size, "peak memory", "only on a GPU")
        return
    shape = SHAPES[place.timed]
    peaks, outside, largest = [], [], 0
    for wrap in (with_torch, with_paceline):
        tidy()
        base, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        model = wrap(build(place, shape, torch.bfloat16))
        for step in range(4):
            if step == 3:  # after the buckets were made anew
                torch.cuda.reset_peak_memory_stats()
            model(batch(place, shape, step)).backward()
            model.zero_grad()
        place.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - base)
        if isinstance(model, paceline.DistributedDataParallel):
            largest = max(bucket.flat.nbytes for bucket in model._whole_reducer().storage.buckets)
        outside.append(free - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved())
        del model
    shown = " / ".join(f"{peak / 2**20:.0f}" for peak in reversed(peaks))
    what = "peak memory of a step, paceline / torch, MiB"
    yield Row(place.size, what, shown, peaks[1] <= peaks[0] + largest)
    shown = " / ".join(f"{more / 2**20:.0f}" for more in reversed(outside))
    yield Row(place.size, "beside PyTorch's own memory, paceline / torch, MiB", shown)


def tidy() -> None:
    """Let go of what earlier models held."""
    gc.collect()
    torch.cuda.empty_cache()


def speed(place: Place) -> Iterator[Row]:
    """Medians over rounds in which the variants take turns."""
    shape = SHAPES[place.timed]
    dtype = torch.bfloat16
    models: dict[str, nn.Module] = {"bare": build(place, shape, dtype)}
    models["torch DDP"] = with_torch(build(place, shape, dtype))
    models["paceline"] = paceline.DistributedDataParallel(build(place, shape, dtype))
    if place.size == 1:
        models["buckets"] = with_paceline(build(place, shape, dtype))
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True) for name, model in models.items()}
    ids = batch(place, shape, 0)
    steps: dict[str, list[float]] = {name: [] for name in models}
    hosts: dict[str, list[float]] = {name: [] for name in models}
    for round_ in range(place.rounds + 2):
        for name, model in models.items():
            place.synchronize()
            dist.barrier()
            start = time.perf_counter()
            model(ids).backward()
            launched = time.perf_counter()
            for last in (False, True):
                optimizers[name].step()
                optimizers[name].zero_grad()
                if not last:
                    model(ids).backward()
            place.synchronize()
            if round_ >= 2:  # the first two warm up, and make the buckets anew
                steps[name].append((time.perf_counter() - start) / 2)
                hosts[name].append(launched - start)
    for name in models:
        took, host = (1000 * statistics.median(seconds[name]) for seconds in (steps, hosts))
        ratio = statistics.median(a / b for a, b in zip(steps["torch DDP"], steps[name], strict=True))
        shown = f"{took:.2f} ms, torch DDP / this {ratio:.3f}; host {host:.2f} ms"
        yield Row(place.size, f"{place.timed} bf16, {shape.tokens[0]} × {shape.tokens[1]} tokens a rank: {name}", shown)


CHECKS: tuple[Callable[[Place], Iterator[Row]], ...] = (
    equality, streams, own_group, batch_norm, finite, checkpoint, memory, speed,
)  # fmt: skip
