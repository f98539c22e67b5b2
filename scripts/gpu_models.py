"""What the GPU check works with: a rank's place, rows of the table, and models made of PyTorch alone."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama, and the tokens of a rank's batch as (sequences, length)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tokens: tuple[int, int]


SHAPES = {
    "SmolLM2-360M": Shape(960, 32, 15, 5, 2560, 49152, (4, 512)),
    "small": Shape(256, 4, 4, 2, 512, 4096, (4, 128)),
    "tiny": Shape(16, 2, 4, 2, 24, 64, (2, 8)),
}


@dataclass(frozen=True)
class Row:
    """One line of the table; `ok` is None for what is measured and not judged."""

    ranks: int
    what: str
    value: str
    ok: bool | None = None


@dataclass(frozen=True)
class Place:
    """Where a rank's checks run."""

    rank: int
    size: int
    device: torch.device
    timed: str
    """The shape of the model that is timed."""
    rounds: int

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def compared(self) -> Shape:
        """The shape of the model that is compared with torch's."""
        return SHAPES["small" if self.on_gpu else "tiny"]

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


class Layer(nn.Module):
    """Attention with rotary positions and grouped keys, then a gated feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.hidden // shape.heads
        self.norms = nn.ModuleList(nn.RMSNorm(shape.hidden) for _ in range(2))
        self.q = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k = nn.Linear(shape.hidden, shape.kv_heads * self.head, bias=False)
        self.v = nn.Linear(shape.hidden, shape.kv_heads * self.head, bias=False)
        self.o = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (part(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(
            rotate(q, rotation), rotate(k, rotation), v, is_causal=True, enable_gqa=True
        )
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding (Su et al., "RoFormer", 2021)."""
    a, b = x.chunk(2, -1)
    cos, sin = rotation
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Llama(nn.Module):
    """A Llama of `shape` with tied embeddings; forward gives the mean loss of predicting each next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.angles = shape.hidden // shape.heads // 2

    def forward(self, ids: Tensor) -> Tensor:
        rates = 1e4 ** -(torch.arange(self.angles, device=ids.device) / self.angles)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * rates
        x = self.embedding(ids)
        rotation = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, rotation)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class Late(torch.autograd.Function):
    """Hands its gradient on late: the kernels that make it are launched, and have not run."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        pause(gradient.device)
        return gradient.clone()


def pause(device: torch.device) -> None:
    """Some milliseconds of the device's time, in the current stream."""
    if device.type == "cuda":
        torch.cuda._sleep(20_000_000)
    else:
        time.sleep(0.002)


class Slow(nn.Module):
    """Layers whose gradients come late."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.late = True

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            if self.late:
                x = Late.apply(x)  # type: ignore[no-untyped-call]
        return x.square().mean()
