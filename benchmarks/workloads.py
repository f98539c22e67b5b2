"""The models and batches of the benchmarks, from 200 tiny layers to 100 million parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """A model and a rank's batch."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    heavy: bool
    """Whether communication takes long compared with computation."""


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same."""
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        mixed: Tensor = x + self.mlp(self.norm2(x))
        return mixed


class SmallGPT(nn.Module):
    """A GPT of 17 million parameters: 8 blocks of width 384, vocabulary 7,000."""

    def __init__(self, vocabulary: int = 7000, width: int = 384, blocks: int = 8, length: int = 128) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, 6) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) to logits (batch × length, vocabulary)."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits.flatten(0, 1)


def mlp(width: int, layers: int) -> nn.Module:
    """Build `layers` square layers of `width`, and a small head."""
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts, nn.Linear(width, 10))


def cnn() -> nn.Module:
    """Build a plain convolutional network of 3 million parameters for 32 × 32 pictures."""
    widths = (3, 64, 128, 256, 512)
    parts: list[nn.Module] = []
    for a, b in pairwise(widths):
        parts += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1, groups=4), nn.ReLU()]
        parts.append(nn.MaxPool2d(2))
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(512 * 4, 256), nn.ReLU(), nn.Linear(256, 10))


def tiny_layers() -> nn.Module:
    """Build 200 layers of 16 × 16, so that hooks and bookkeeping dominate."""
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(200)])


def normed_layers() -> nn.Module:
    """Return 50 layers of 64 × 64, each with BatchNorm, whose 150 buffers have to be synchronized."""
    parts = [part for _ in range(50) for part in (nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU())]
    return nn.Sequential(*parts, nn.Linear(64, 10))


class ThousandParameters(nn.Module):
    """1,000 parameters of 1 KB, to show a wrapper's cost per parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(256)) for _ in range(1000)])
        self.head = nn.Linear(256, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 256) to logits (batch, 16)."""
        logits: Tensor = self.head(x + torch.stack(list(self.parts)).sum(0))
        return logits


class CausalModel(nn.Module):
    """A causal language model of transformers, with random weights in float32."""

    def __init__(self, config: Path) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        automatic: Any = AutoModelForCausalLM
        self.model: nn.Module = automatic.from_config(AutoConfig.from_pretrained(str(config)), dtype=torch.float32)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) to logits (batch × length, vocabulary)."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits.flatten(0, 1)


def language_model(config: Path, length: int) -> Workload:
    """Return a workload that trains the model of a ``config.json`` on one sequence of `length` tokens."""
    vocabulary = int(json.loads(config.read_text())["vocab_size"])

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randint(vocabulary, (1, length)), torch.randint(vocabulary, (length,))

    return Workload(config.stem, lambda: CausalModel(config), batch, True)


def _vectors(rows: int, width: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(rows, width), torch.randint(10, (rows,)))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mlp-10M", lambda: mlp(1024, 10), _vectors(64, 1024), True),
        Workload("gpt-17M", SmallGPT, lambda: (torch.randint(7000, (2, 64)), torch.randint(7000, (128,))), True),
        Workload("mlp-100M", lambda: mlp(3200, 10), _vectors(32, 3200), True),
        Workload("cnn-3M", cnn, lambda: (torch.randn(16, 3, 32, 32), torch.randint(10, (16,))), False),
        Workload("tiny-200", tiny_layers, _vectors(16, 16), False),
        Workload("normed-50", normed_layers, _vectors(32, 64), False),
        Workload("thousand-1KB", ThousandParameters, _vectors(16, 256), False),
    )
}
