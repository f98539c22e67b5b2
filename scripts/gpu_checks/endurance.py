"""Whether anything is left behind: by backwards that exceptions end, and by wrappers that go."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch import nn

from gpu_checks.models import MLP
from gpu_checks.rows import Place, Row, holds
from gpu_checks.several_ranks import aborted
from gpu_checks.wrapping import difference, gradient_of, rows_of, with_buckets

WIDTH = 256


@dataclass(frozen=True)
class Held:
    """Resources that this process holds."""

    tensors: float
    """MiB that PyTorch's allocator has given out."""
    outside: float
    """MiB of the GPU beside PyTorch's own, such as NCCL's."""
    files: int
    threads: int

    @classmethod
    def now(cls, place: Place) -> Held:
        """Count, once the GPU is done and garbage is gone."""
        place.synchronize()
        gc.collect()
        threads = Path("/proc/self/task")
        count = len(list(threads.iterdir())) if threads.exists() else threading.active_count()
        files = Path("/proc/self/fd")
        opened = len(list(files.iterdir())) if files.exists() else 0
        if not place.on_gpu:
            return cls(0.0, 0.0, opened, count)
        free, total = torch.cuda.mem_get_info()
        outside = (total - free - torch.cuda.memory_reserved()) / 2**20
        return cls(torch.cuda.memory_allocated() / 2**20, outside, opened, count)

    def growth(self, before: Held) -> str:
        """«tensors +0.0 MiB, …»."""
        tensors, outside, files, threads = (a - b for a, b in zip(astuple(self), astuple(before), strict=True))
        return f"tensors {tensors:+.1f} MiB, outside {outside:+.0f} MiB, files {files:+d}, threads {threads:+d}"

    def is_like(self, before: Held, *, outside: float) -> bool:
        """Whether nothing to speak of was left behind since `before`; other processes may use the GPU, too."""
        more = [a - b for a, b in zip(astuple(self), astuple(before), strict=True)]
        return bool(more[0] <= 0.1 and more[1] <= outside and more[2] <= 2 and more[3] <= 2)


def model_of(place: Place) -> nn.Module:
    torch.manual_seed(0)
    return MLP(WIDTH, WIDTH, WIDTH, WIDTH, WIDTH).to(place.device)


def aborts(place: Place) -> Iterator[Row]:
    """200 backwards that an exception ends on every rank leave nothing behind; the next one is right."""
    module = model_of(place)
    model = with_buckets(module, bucket_cap_mb=0.3)
    count = place.steps(200, 10)
    whole, mine = rows_of(place, 0, WIDTH)
    model(whole[mine]).backward()
    model.zero_grad()
    before = None
    told = 0
    for number in range(count):
        told += aborted(model, whole[mine], True)
        model.zero_grad()
        if number == 4:
            before = Held.now(place)
    assert before is not None
    after = Held.now(place)
    yield holds(f"{count} aborted backwards, each an error", str(told), told == count)
    yield holds("they leave behind", after.growth(before), after.is_like(before, outside=64))
    model(whole[mine]).backward()
    reference = model_of(place)
    reference(whole).backward()
    pairs = list(zip(module.parameters(), reference.parameters(), strict=True))
    error = difference([gradient_of(a) for a, _ in pairs], [gradient_of(b) for _, b in pairs])
    yield holds("the next one: gradients differ by", f"{error:.1e}", error < 1e-5)


def wrappers(place: Place) -> Iterator[Row]:
    """20 wrappers that are made, trained and dropped, at different times on different ranks, leave nothing behind."""
    module = model_of(place)
    count = place.steps(20, 6)
    kept: deque[nn.Module] = deque(maxlen=1 + place.rank)  # so ranks collect different ones in the same step
    x = rows_of(place, 0, WIDTH)[0][:4]
    before = None
    for number in range(count):
        model = with_buckets(module)
        model(x).backward()
        module.zero_grad()
        kept.append(model)
        del model
        if number == 3:
            before = Held.now(place)
    assert before is not None
    after = Held.now(place)
    shown = after.growth(before)
    yield holds(f"{count} wrappers made and dropped leave behind", shown, after.is_like(before, outside=128))
