"""A compact GPT: a decoder-only transformer that learns quickly from little text.

    tokens ─► embeddings ─► block × layers ─► norm ─► head ─► logits

It learns in minutes on a CPU for three reasons: the input includes embeddings of the last two and the last three
tokens, so attention need not learn them; every block's output is zero at first; and ``torch.optim.Muon`` trains the
blocks' matrices.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NGRAM_SLOTS = 16_384
"""Rows of the tables of token pairs and triples; colliding entries share a row."""


class GPT(nn.Module):
    """Maps (batch, time) tokens to (batch, time, vocabulary) logits of the next token; time is at most `context`."""

    rotation: Tensor
    """Angles of the positions; see :func:`rotation`."""

    def __init__(self, vocabulary: int, context: int, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.ngrams = nn.ModuleList([nn.Embedding(NGRAM_SLOTS, width) for _ in range(2)])
        for table in (self.token, *self.ngrams):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.zeros_(self.head.weight)  # at first, all tokens are equally likely
        self.register_buffer("rotation", rotation(context, width // heads), persistent=False)

    def matrices(self) -> list[nn.Parameter]:
        """Return the weights of the blocks' linear layers."""
        return [parameter for parameter in self.blocks.parameters() if parameter.dim() > 1]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        x = self.token(tokens)
        for table, slots in zip(self.ngrams, ngram_slots(tokens), strict=True):
            x = x + table(slots)
        for block in self.blocks:
            x = block(x, self.rotation[: tokens.shape[1]])
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention, then a perceptron with one hidden layer, both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        # Three separate layers, because Muon updates each matrix as a whole.
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.attention_out = nn.Linear(width, width, bias=False)
        self.perceptron_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        for layer in (self.query, self.key, self.value, self.up):
            nn.init.normal_(layer.weight, std=0.7 * width**-0.5)
        for layer in (self.attention_out, self.down):
            nn.init.zeros_(layer.weight)  # so that a block is the identity at first

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Return (batch, time, width) for (batch, time, width)."""
        x = x + self.attention(self.attention_norm(x), rotation)
        hidden = F.gelu(self.up(self.perceptron_norm(x)), approximate="tanh")
        return x + self.down(hidden)  # type: ignore[no-any-return]

    def attention(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Return causal attention, (batch, time, width)."""
        batch, time, width = x.shape
        query, key, value = (
            layer(x).view(batch, time, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        query, key = (rotate(F.rms_norm(part, part.shape[-1:]), rotation) for part in (query, key))
        read = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.attention_out(read.transpose(1, 2).reshape(batch, time, width))
        return mixed


def rotation(context: int, size: int) -> Tensor:
    """Return cosine and sine of each position's angles, (context, size / 2, 2) (Su et al., 2021)."""
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2, device="cpu") / size)
    angles = torch.outer(torch.arange(context, device="cpu"), frequencies)
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each pair of neighbors in the last dimension of `x`, (batch, heads, time, size), by its angle."""
    turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.view_as_complex(rotation)
    return torch.view_as_real(turned).flatten(-2)


def ngram_slots(tokens: Tensor) -> list[Tensor]:
    """Return, for each position, the table rows of the last two and the last three tokens; token 0 pads the start."""
    slots, code = [], tokens
    for distance in (1, 2):
        previous = F.pad(tokens, (distance, 0))[:, : tokens.shape[1]]
        code = code * 1_000_003 + previous + 1  # a hash; a prime spreads neighboring tokens over the table
        slots.append(code.remainder(NGRAM_SLOTS))
    return slots
