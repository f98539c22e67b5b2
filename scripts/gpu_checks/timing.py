"""Workloads that are timed, and how: variants take turns within a round, and medians are compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from gpu_checks.models import MLP, SMOLLM2_360M, TINY, ResNet
from gpu_checks.rows import Place
from gpu_checks.wrapping import Wrap, llama, tokens
from paceline.tools.bench.turns import take_turns


@dataclass(frozen=True)
class Workload:
    """A model and this rank's batch for it."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    autocast: bool
    """Whether the forward runs under bf16 autocast; if not, the model is in bf16 itself."""


def named(place: Place, name: str) -> str:
    """`name`, and whether it is the real size."""
    return name if place.on_gpu else f"tiny in place of {name}"


def smollm2(place: Place, count: int) -> Workload:
    """SmolLM2-360M in bf16 with `count` tokens, in sequences of at most 2048."""
    shape = SMOLLM2_360M if place.on_gpu else TINY
    length = min(count, 2048) if place.on_gpu else 8
    sizes = (max(1, count // length) if place.on_gpu else 2, length)
    return Workload(
        named(place, f"SmolLM2-360M, {count:,} tokens"),
        lambda: llama(place, shape, torch.bfloat16),
        lambda: tokens(place, shape, 0, sizes),
        autocast=False,
    )


def resnet50(place: Place, batch: int) -> Workload:
    """ResNet-50 under bf16 autocast, channels last, with `batch` images."""
    side = 224 if place.on_gpu else 32

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = ResNet() if place.on_gpu else ResNet(4, (1, 1, 1, 1), 10)
        return model.to(place.device).to(memory_format=torch.channels_last)  # type: ignore[no-any-return, call-overload]

    def images() -> Tensor:
        whole = torch.randn(batch if place.on_gpu else 2, 3, side, side, device=place.device)
        return whole.to(memory_format=torch.channels_last)

    return Workload(named(place, f"ResNet-50, batch {batch}"), build, images, autocast=True)


def small_mlp(place: Place) -> Workload:
    """Eight layers of 1024 in fp32."""
    width = 1024 if place.on_gpu else 16

    def build() -> nn.Module:
        torch.manual_seed(0)
        return MLP(*[width] * 9).to(place.device)

    x = torch.randn(256, width, device=place.device)
    return Workload(named(place, "MLP 8 × 1024, batch 256"), build, lambda: x, autocast=False)


def narrow_mlp(place: Place, width: int) -> Workload:
    """Four layers of `width` in fp32, whose step the host launches more slowly than a GPU computes it."""
    width = width if place.on_gpu else 16

    def build() -> nn.Module:
        torch.manual_seed(0)
        return MLP(*[width] * 5).to(place.device)

    x = torch.randn(64, width, device=place.device)
    return Workload(named(place, f"MLP 4 × {width}, batch 64"), build, lambda: x, autocast=False)


class Trainee:
    """One variant of a workload: a model that is wrapped and its optimizer."""

    def __init__(self, workload: Workload, wrap: Wrap, place: Place) -> None:
        self._place, self._autocast = place, workload.autocast
        self.model = wrap(workload.build())
        self.batch = workload.batch()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def forward(self) -> Tensor:
        with torch.autocast(self._place.device.type, torch.bfloat16, enabled=self._autocast):
            loss: Tensor = self.model(self.batch)
        return loss

    def step(self) -> None:
        """Train one step."""
        self.forward().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def timed(self, steps: int) -> float:
        """Return the seconds of a step, to the end of its kernels."""
        self._place.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._place.synchronize()
        return (time.perf_counter() - start) / steps

    def host_timed(self) -> float:
        """Return the seconds for which a backward keeps the host, where the GPU has nothing else to do."""
        loss = self.forward()
        self._place.barrier()
        start = time.perf_counter()
        loss.backward()
        took = time.perf_counter() - start
        self._optimizer.zero_grad()
        return took


def trainees(workload: Workload, wraps: Mapping[str, Wrap], place: Place) -> dict[str, Trainee]:
    """Build every variant."""
    return {name: Trainee(workload, wrap, place) for name, wrap in wraps.items()}


def step_times(built: Mapping[str, Trainee], place: Place, steps: int = 2) -> dict[str, list[float]]:
    """Seconds of a step of each variant, by round."""
    turns = {name: partial(trainee.timed, steps) for name, trainee in built.items()}
    return take_turns(turns, place.rounds, warm_up=place.steps(3, 1), rotated=True)


def host_times(built: Mapping[str, Trainee], place: Place) -> dict[str, list[float]]:
    """Seconds of the host for a backward of each variant, by round."""
    rounds = place.rounds * place.steps(5, 1)
    turns = {name: trainee.host_timed for name, trainee in built.items()}
    return take_turns(turns, rounds, warm_up=place.steps(5, 1), rotated=True)
