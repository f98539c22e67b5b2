"""Speed, host time, kernels per step, overlap and peak memory, compared with torch DDP."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from gpu_checks.rows import Place, Row, holds, measured, not_run
from gpu_checks.timing import Trainee, Workload, in_turn, mlp, resnet50, smollm2, trainees
from gpu_checks.wrapping import bucket_bytes, variants
from paceline.ddp.buckets import CAPACITY
from paceline.tools.bench.measure import median_ratio

SLOWER = 1.03
"""Maximum ratio of step times to torch's faster mode. Smaller differences are noise."""
TORCH = ("torch views", "torch batched")


def steps(place: Place, workload: Workload, at_once: int = 2) -> Iterator[Row]:
    """Time whole training steps with fused AdamW. A turn has `at_once` steps, and ends when the GPU is idle."""
    built = trainees(workload, variants(place), place)
    turns = {name: partial(trainee.timed, place.steps(at_once, 1)) for name, trainee in built.items()}
    seconds = in_turn(place, turns)
    best = min((name for name in TORCH if name in seconds), key=lambda name: statistics.median(seconds[name]))
    for name, took in seconds.items():
        against = median_ratio(seconds[best], took)
        milliseconds = 1000 * statistics.median(took)
        shown = f"{milliseconds:.2f} ms; {best} / this = {against:.3f}"
        what = f"{workload.name}: {name}"
        if name.startswith("paceline") and place.on_gpu:
            remedy = f"slower than {best}; send us the JSON of the parts speed and syncs"
            yield holds(what, shown, against > 1 / SLOWER, remedy, ms=milliseconds, ratio=against)
        else:
            yield measured(what, shown, ms=milliseconds, ratio=against)


def speed_of(workload: Callable[..., Workload], *sizes: int) -> Callable[[Place], Iterator[Row]]:
    """Return a check that times a workload of the given sizes."""
    return lambda place: steps(place, workload(place, *sizes))


def host_bound(place: Place) -> Iterator[Row]:
    """Steps whose kernels run faster than the host can launch them."""
    for width in (128, 512, 2048) if place.on_gpu else (16,):
        yield from steps(place, mlp(place, 4, width, 64), 20)


def host(place: Place) -> Iterator[Row]:
    """Host time that the wrapper adds to backward, with batches so small that training is host-bound."""
    for workload in (smollm2(place, 16), resnet50(place, 1)):
        built = trainees(workload, variants(place), place)
        parameters = len(list(built["bare"].model.parameters()))
        seconds = in_turn(place, {name: trainee.host_timed for name, trainee in built.items()}, rounds=100)
        bare = seconds.pop("bare")
        added = {
            name: 1000 * statistics.median(a - b for a, b in zip(took, bare, strict=True))
            for name, took in seconds.items()
        }
        for name, extra in added.items():
            what = f"{parameters} parameters: {name} adds to the host's backward"
            if name.startswith("paceline") and place.on_gpu:
                most = 1.1 * added["torch views"] + 0.05
                remedy = f"torch's view mode adds {added['torch views']:.2f} ms; send us the JSON"
                yield holds(what, f"{extra:.2f} ms", extra <= most, remedy, ms=extra)
            else:
                yield measured(what, f"{extra:.2f} ms", ms=extra)
        del built


def kernels(place: Place) -> Iterator[Row]:
    """Kernels and copies of one step after warm-up."""
    counts: dict[str, Counter[str]] = {}
    buckets = 0
    workload = smollm2(place, 2048)
    for name, wrap in variants(place).items():
        trainee = Trainee(workload, wrap, place)
        counts[name] = launched(trainee, place)
        if name == "paceline":
            buckets = len(bucket_bytes(trainee.model))
        del trainee
        place.tidy()
    bare = counts["bare"].total()
    kind = "kernels" if place.on_gpu else "operators"
    for name, names in counts.items():
        extra = names.total() - bare
        added = ", ".join(f"{count} × {what[:40]}" for what, count in (names - counts["bare"]).most_common(4))
        shown = f"{names.total()} {kind}, {extra:+d} ({added})" if extra else f"{names.total()} {kind}"
        if name == "paceline" and place.on_gpu:
            # Per bucket: a copy in two parts, the collective, and the scaling.
            yield holds(f"one step: {name}, {buckets} buckets", shown, extra <= 4 * buckets + 8, "", more=extra)
        else:
            yield measured(f"one step: {name}", shown, more=extra)


def launched(trainee: Trainee, place: Place) -> Counter[str]:
    """Count, by name, the kernels that a step launches after warm-up. On the CPU, count the operators."""
    for _ in range(place.steps(5, 2)):
        trainee.step()
    place.synchronize()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if place.on_gpu else [])]
    with profile(activities=activities) as profiler:
        trainee.step()
        place.synchronize()
    wanted = "CUDA" if place.on_gpu else "CPU"
    events = [event for event in profiler.events() or () if event.device_type.name == wanted]
    return Counter(event.name for event in events if not getattr(event, "is_user_annotation", False))


def overlap(place: Place) -> Iterator[Row]:
    """Share of the communication that overlaps with backward, without lengthening the step."""
    for workload in (smollm2(place, 4096), resnet50(place, 64)):
        wraps = {name: wrap for name, wrap in variants(place).items() if not name.endswith("alone")}
        built = trainees(workload, wraps, place)
        numel = sum(parameter.numel() for parameter in built["bare"].model.parameters())
        dtype = next(built["bare"].model.parameters()).dtype
        bucket = torch.zeros(min(numel, CAPACITY // dtype.itemsize), dtype=dtype, device=place.device)

        turns = {name: partial(trainee.timed, 2) for name, trainee in built.items()}
        turns["all-reduce"] = partial(timed_reductions, place, bucket, -(-numel // len(bucket)))
        seconds = in_turn(place, turns)
        medians = {name: statistics.median(took) for name, took in seconds.items()}
        alone = medians["all-reduce"]
        shown = f"{1000 * alone:.2f} ms beside a bare step of {1000 * medians['bare']:.2f} ms"
        yield measured(f"{workload.name}: all-reduce by itself", shown, ms=1000 * alone)
        hidden = {name: 1 - (medians[name] - medians["bare"]) / alone for name in wraps if name != "bare"}
        for name, share in hidden.items():
            what = f"{workload.name}: {name} hides"
            if name == "paceline" and place.on_gpu:
                best = max(hidden[peer] for peer in TORCH if peer in hidden)
                remedy = f"torch hides {best:.0%}; send us the JSON"
                yield holds(what, f"{share:.0%} of it", share >= best - 0.1, remedy, hidden=share)
            else:
                yield measured(what, f"{share:.0%} of it", hidden=share)
        del built


def timed_reductions(place: Place, bucket: torch.Tensor, times: int) -> float:
    """Return the seconds for `times` all-reduces of `bucket`."""
    place.barrier()
    start = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(bucket)
    place.synchronize()
    return time.perf_counter() - start


def memory(place: Place) -> Iterator[Row]:
    """The peak of a bf16 step is at most torch's peak plus the largest bucket."""
    peaks: dict[str, float] = {}
    workload, largest = smollm2(place, 2048), 0.0
    for name, wrap in variants(place).items():
        place.tidy()
        base, free = allocated(place), free_outside(place)
        trainee = Trainee(workload, wrap, place)
        for step in range(place.steps(5, 2)):
            if step == 3 and place.on_gpu:  # the buckets now have their final layout
                torch.cuda.reset_peak_memory_stats()
            trainee.step()
        place.synchronize()
        peaks[name] = (torch.cuda.max_memory_allocated() - base) / 2**20 if place.on_gpu else 0.0
        outside = (free - free_outside(place)) / 2**20
        if name == "paceline":
            largest = max(bucket_bytes(trainee.model)) / 2**20
        what, shown = f"peak of a step: {name}", f"{peaks[name]:.0f} MiB, and {outside:.0f} outside PyTorch's allocator"
        if name.startswith("paceline") and place.on_gpu:
            most = peaks["torch views"] + largest
            yield holds(what, shown, peaks[name] <= most, f"at most {most:.0f} MiB", mib=peaks[name])
        else:
            yield measured(what, shown, mib=peaks[name])
        del trainee
    if not place.on_gpu:
        yield not_run("peaks", "PyTorch counts them on GPUs only")


def allocated(place: Place) -> int:
    """Return the bytes in use according to PyTorch's allocator."""
    return torch.cuda.memory_allocated() if place.on_gpu else 0


def free_outside(place: Place) -> int:
    """Return the bytes of the GPU that are free or reserved by PyTorch's allocator."""
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() if place.on_gpu else 0
