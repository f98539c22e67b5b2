"""Timed workloads. In each round, variants run in turn; medians over rounds are compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gpu_checks.models import SMOLLM2_360M, TINY, ResNet, perceptron
from gpu_checks.rows import Place
from gpu_checks.wrapping import Wrap, llama, tokens
from paceline.tools.bench.measure import take_turns


@dataclass(frozen=True)
class Workload:
    """A model, this rank's batch, and whether to use bf16 autocast in forward. On the CPU, sizes are tiny."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    autocast: bool = False


def smollm2(place: Place, count: int) -> Workload:
    """SmolLM2-360M in bf16 with `count` tokens, in sequences of at most 2048."""
    shape = SMOLLM2_360M if place.on_gpu else TINY
    length = min(count, 2048) if place.on_gpu else 8
    sizes = (max(1, count // length) if place.on_gpu else 2, length)
    return Workload(
        f"SmolLM2-360M, {count:,} tokens",
        lambda: llama(place, shape, torch.bfloat16),
        lambda: tokens(place, shape, 0, sizes),
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

    return Workload(f"ResNet-50, batch {batch}", build, images, autocast=True)


def mlp(place: Place, layers: int, width: int, batch: int) -> Workload:
    """Square layers in fp32."""
    real_width = width if place.on_gpu else 16

    def build() -> nn.Module:
        torch.manual_seed(0)
        return perceptron(*[real_width] * (layers + 1)).to(place.device)

    name = f"MLP {layers} × {width}, batch {batch}"
    return Workload(name, build, lambda: torch.randn(batch, real_width, device=place.device))


class Trainee:
    """One variant of a workload: a wrapped model with its optimizer."""

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
        self.forward().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def timed(self, steps: int) -> float:
        """Return the seconds per step, including the GPU's work."""
        self._place.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._place.synchronize()
        return (time.perf_counter() - start) / steps

    def host_timed(self) -> float:
        """Return the host time in seconds of a backward pass that starts while the GPU is idle."""
        loss = self.forward()
        self._place.barrier()
        start = time.perf_counter()
        loss.backward()
        took = time.perf_counter() - start
        self._optimizer.zero_grad()
        return took


def trainees(workload: Workload, wraps: Mapping[str, Wrap], place: Place) -> dict[str, Trainee]:
    return {name: Trainee(workload, wrap, place) for name, wrap in wraps.items()}


def in_turn(place: Place, turns: Mapping[str, Callable[[], float]], rounds: int = 20) -> dict[str, list[float]]:
    """Return the measurements of each variant, by round."""
    return take_turns(turns, place.steps(rounds, 1), warm_up=place.steps(3, 1), rotated=True)
