"""Resource leaks of aborted backward passes and of discarded wrappers."""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import torch
from torch import nn

from gpu_checks.models import MLP
from gpu_checks.rows import Place, Row, holds
from gpu_checks.several_ranks import aborted
from gpu_checks.wrapping import gradients_differ, rows_of, with_buckets

WIDTH = 256


@dataclass(frozen=True)
class Held:
    """Resources that this process holds."""

    tensors: float
    """MiB in use according to PyTorch's allocator."""
    outside: float
    """MiB of GPU memory in use outside of PyTorch's allocator, for example by NCCL."""
    files: int
    threads: int

    @classmethod
    def now(cls, place: Place) -> Held:
        """Measure after the GPU is idle and garbage has been collected."""
        place.synchronize()
        gc.collect()
        files, threads = (len(os.listdir(f"/proc/self/{folder}")) for folder in ("fd", "task"))
        if not place.on_gpu:
            return cls(0.0, 0.0, files, threads)
        free, total = torch.cuda.mem_get_info()
        outside = (total - free - torch.cuda.memory_reserved()) / 2**20
        return cls(torch.cuda.memory_allocated() / 2**20, outside, files, threads)


def leaks(what: str, earlier: Held, later: Held, *, outside: float) -> Row:
    """Return the line about leaked resources. Other processes may use the GPU, so `outside` MiB are tolerated."""
    growth = Held(*(b - a for a, b in zip(astuple(earlier), astuple(later), strict=True)))
    value = f"tensors {growth.tensors:+.1f} MiB, outside {growth.outside:+.0f} MiB"
    value += f", files {growth.files:+d}, threads {growth.threads:+d}"
    ok = growth.tensors <= 0.1 and growth.outside <= outside and growth.files <= 2 and growth.threads <= 2
    return holds(f"{what} leave behind", value, ok)


def model_of(place: Place) -> nn.Module:
    torch.manual_seed(0)
    return MLP(WIDTH, WIDTH, WIDTH, WIDTH, WIDTH).to(place.device)


def aborts(place: Place) -> Iterator[Row]:
    """200 backward passes that fail on every rank leak no resources, and the next one is correct."""
    module = model_of(place)
    model = with_buckets(module, bucket_cap_mb=0.3)
    count = place.steps(200, 10)
    whole, mine = rows_of(place, 0, WIDTH)
    model(mine).backward()
    model.zero_grad()
    errors = 0
    for number in range(count):
        errors += aborted(model, mine, True)
        model.zero_grad()
        if number == 4:
            earlier = Held.now(place)
    yield holds(f"{count} aborted backwards, each an error", str(errors), errors == count)
    yield leaks("they", earlier, Held.now(place), outside=64)
    model(mine).backward()
    reference = model_of(place)
    reference(whole).backward()
    error = gradients_differ(module, reference)
    yield holds("the next one: gradients differ by", f"{error:.1e}", error < 1e-5)


def wrappers(place: Place) -> Iterator[Row]:
    """20 wrappers that ranks discard at different times leak no resources."""
    module = model_of(place)
    count = place.steps(20, 6)
    kept: deque[nn.Module] = deque(maxlen=1 + place.rank)  # ranks discard different wrappers in the same step
    x = rows_of(place, 0, WIDTH)[0][:4]
    for number in range(count):
        model = with_buckets(module)
        model(x).backward()
        module.zero_grad()
        kept.append(model)
        del model
        if number == 3:
            earlier = Held.now(place)
    yield leaks(f"{count} wrappers created and discarded", earlier, Held.now(place), outside=128)
