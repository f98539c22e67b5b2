"""A Llama, a ResNet and small networks in plain PyTorch. Their ``forward`` returns the loss."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int


SMOLLM2_360M = Shape(960, 32, 15, 5, 2560, 49152)
SMALL = Shape(256, 4, 4, 2, 512, 4096)
TINY = Shape(16, 2, 4, 2, 24, 64)


class Layer(nn.Module):
    """Attention with rotary positions and grouped keys, followed by a gated feed-forward part."""

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
    """A Llama of `shape` with tied embeddings; forward returns the mean loss of next-token prediction."""

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


class Bottleneck(nn.Module):
    """A residual block of three convolutions, with stride in the second (He et al., "Deep Residual Learning", 2015)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-50 by default; forward returns the mean loss of images with class 0."""

    def __init__(self, width: int = 64, blocks: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
        channels = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                layers.append(Bottleneck(channels, width << stage, 2 if stage and not block else 1))
                channels = 4 * (width << stage)
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        scores = self.head(self.features(images))
        return F.cross_entropy(scores, torch.zeros(len(images), dtype=torch.int64, device=images.device))


class Net(nn.Module):
    """`layers` in turn; forward returns the mean square of their outputs."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out.square().mean()


def perceptron(*widths: int) -> Net:
    """Return linear layers with the given `widths`, each followed by tanh."""
    return Net(*(part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.Tanh())))
