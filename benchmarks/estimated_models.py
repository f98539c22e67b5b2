"""Various kinds of models for ``memory_estimate.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from workloads import Block, SmallGPT, mlp


@dataclass(frozen=True)
class Case:
    """A model with a batch of one rank, as options of the command."""

    build: Callable[[], nn.Module] | dict[str, Any]
    """A function in this file, or the content of a ``config.json`` of transformers."""
    size: int
    shape: tuple[int, ...] = ()
    """Shape of one sample; empty for tokens."""
    length: int = 0
    """Tokens of a sample."""
    optimizer: str = "adamw"
    autocast: bool = False
    """Whether the forward runs in bfloat16."""
    checkpointing: bool = False
    """Whether the layers of a transformers model are recomputed in backward."""

    @property
    def options(self) -> list[str]:
        """Arguments of ``paceline estimate-memory`` after the model."""
        inputs = ["--sequence-length", str(self.length)] if self.length else ["--input-shape", _joined(self.shape)]
        flags = [*["--autocast", "bfloat16"] * self.autocast, *["--checkpointing"] * self.checkpointing]
        return ["--batch-size", str(self.size), *inputs, "--optimizer", self.optimizer, *flags]

    def module(self) -> nn.Module:
        """Build the model."""
        if callable(self.build):
            return self.build()
        import transformers

        config = transformers.AutoConfig.for_model(**self.build)
        module: nn.Module = getattr(transformers, self.build["architectures"][0])(config)
        if self.checkpointing:
            module.gradient_checkpointing_enable()  # type: ignore[operator]
        return module

    def inputs(self) -> Tensor:
        """Draw a batch."""
        if self.length:
            return torch.randint(1000, (self.size, self.length))
        return torch.randn(self.size, *self.shape)


def _joined(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))


class Residual(nn.Module):
    """Two convolutions with batch norms and a residual connection."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        if before == after:
            self.shortcut = nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        """Map pictures to pictures."""
        return torch.relu(self.body(x) + self.shortcut(x))


class Recurrent(nn.Module):
    """A language model with recurrent layers of `kind`."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(vocabulary, width), kind(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) to logits (batch, length, vocabulary)."""
        logits: Tensor = self.head(self.layers(self.tokens(tokens))[0])
        return logits


class Embedded(nn.Module):
    """Large embedding tables below a small network, as in recommenders."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(3 * width, 256), nn.ReLU(), nn.Linear(256, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) to logits (batch, 2)."""
        logits: Tensor = self.head(torch.cat([table(tokens).mean(1) for table in self.tables], 1))
        return logits


class Vision(nn.Module):
    """A vision transformer: patches of 8 × 8 as tokens."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.places = nn.Parameter(torch.zeros(1, 144, width))
        self.blocks, self.head = nn.Sequential(*[Block(width, 6) for _ in range(blocks)]), nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        """Map pictures of 96 × 96 to logits (batch, 100)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        logits: Tensor = self.head(self.blocks(tokens).mean(1))
        return logits


class Encoder(nn.Module):
    """A classifier of sequences with torch's transformer layers and dropout."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5000, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, layers), nn.Linear(width, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) to logits (batch, 20)."""
        logits: Tensor = self.head(self.layers(self.tokens(tokens)).mean(1))
        return logits


class UNet(nn.Module):
    """A U-Net: convolutions down and up again with skip connections. ``norm`` returns a norm for n channels."""

    def __init__(self, widths: tuple[int, ...], norm: Callable[[int], nn.Module], has_upsampling: bool) -> None:
        super().__init__()

        def stage(before: int, after: int) -> nn.Module:
            first = (nn.Conv2d(before, after, 3, padding=1), norm(after), nn.SiLU())
            return nn.Sequential(*first, nn.Conv2d(after, after, 3, padding=1), norm(after), nn.SiLU())

        def upward(before: int, after: int) -> nn.Module:
            if has_upsampling:
                return nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(before, after, 3, padding=1))
            return nn.ConvTranspose2d(before, after, 2, 2)

        self.down = nn.ModuleList(stage(a, b) for a, b in pairwise((3, *widths)))
        self.up = nn.ModuleList(upward(b, a) for a, b in pairwise(widths))
        self.joined = nn.ModuleList(stage(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map pictures to pictures."""
        kept: list[Tensor] = []
        for stage in self.down:
            x = stage(F.max_pool2d(kept[-1], 2) if kept else x)
            kept.append(x)
        kept.pop()
        for upward, joined in zip(reversed(self.up), reversed(self.joined), strict=True):
            x = joined(torch.cat([upward(x), kept.pop()], 1))
        found: Tensor = self.head(x)
        return found


class Waves(nn.Module):
    """Gated convolutions with doubling dilation over sound, as in WaveNet."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first, self.head = nn.Conv1d(1, width, 3, padding=1), nn.Conv1d(width, 1, 1)
        self.gated = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 3, padding=2**place, dilation=2**place) for place in range(layers)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(8, 2 * width) for _ in range(layers))
        self.mixed = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 1, length) to the same."""
        x, skipped = self.first(x), torch.zeros(())
        for gated, norm, mixed in zip(self.gated, self.norms, self.mixed, strict=True):
            value, gate = norm(gated(x)).chunk(2, 1)
            more, skip = mixed(torch.tanh(value) * torch.sigmoid(gate)).chunk(2, 1)
            x, skipped = x + more, skipped + skip
        found: Tensor = self.head(torch.relu(skipped))
        return found


class Bottleneck(nn.Module):
    """A 3 × 3 convolution between two 1 × 1 convolutions with a residual connection, as in ResNet-50 and MobileNet.

    The inner convolution is narrow, or wide with one filter per channel if `is_depthwise`.
    """

    def __init__(self, before: int, inner: int, after: int, stride: int, *, is_depthwise: bool = False) -> None:
        super().__init__()
        act = nn.Hardswish if is_depthwise else nn.ReLU
        groups = inner if is_depthwise else 1
        self.body = nn.Sequential(
            *(nn.Conv2d(before, inner, 1, bias=False), nn.BatchNorm2d(inner), act(inplace=True)),
            *(nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False), nn.BatchNorm2d(inner), act(True)),
            *(nn.Conv2d(inner, after, 1, bias=False), nn.BatchNorm2d(after)),
        )
        self.is_added = before == after and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        """Map pictures to pictures."""
        mixed: Tensor = self.body(x)
        return mixed + x if self.is_added else mixed


class Recomputed(nn.Sequential):
    """Layers that are recomputed in backward, one after another."""

    is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same."""
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=self.is_reentrant)
        return x


class CheckpointedGPT(SmallGPT):
    """A GPT whose blocks are recomputed in backward."""

    def __init__(self, vocabulary: int, width: int, blocks: int, *, is_reentrant: bool) -> None:
        super().__init__(vocabulary, width, blocks)
        self.blocks = Recomputed(*self.blocks)
        self.blocks.is_reentrant = is_reentrant


class Segments(nn.Module):
    """Four segments of bottlenecks that are recomputed in backward, for pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 80, 3, 2, 1), nn.BatchNorm2d(80), nn.ReLU())
        self.body = nn.Sequential(*[Bottleneck(80, 48, 80, 1) for _ in range(12)])
        self.head = nn.Linear(80, 100)

    def forward(self, x: Tensor) -> Tensor:
        """Map pictures to logits (batch, 100)."""
        x = checkpoint_sequential(self.body, 4, self.stem(x), use_reentrant=False)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def mlp_25m() -> nn.Module:
    """Build six square layers of 2,048."""
    return mlp(2048, 6)


def mlp_small() -> nn.Module:
    """Build a network for pictures of digits."""
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))


def cnn_2m() -> nn.Module:
    """Build four convolutions, each with pooling, and two linear layers, for pictures of 32 × 32."""
    parts: list[nn.Module] = []
    for before, after in pairwise((3, 64, 128, 256, 384)):
        parts += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(384 * 4, 512), nn.ReLU(), nn.Linear(512, 10))


def resnet_18() -> nn.Module:
    """Build eight residual blocks of 64 to 512 channels."""
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    blocks = [Residual(a, b) for a, b in pairwise((64, 64, 64, 128, 128, 256, 256, 512, 512))]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def gpt_tiny() -> nn.Module:
    """Build four blocks of width 192."""
    return SmallGPT(2000, 192, 4)


def gpt_medium() -> nn.Module:
    """Build eight blocks of width 384."""
    return SmallGPT()


def lstm() -> nn.Module:
    """Build two LSTM layers of width 512."""
    return Recurrent(nn.LSTM, 4000, 512)


def embeddings() -> nn.Module:
    """Build three tables of 100,000 rows."""
    return Embedded(100_000, 48)


def autoencoder() -> nn.Module:
    """Build convolutions down to 8 × 8 and up again, for pictures of 64 × 64."""
    down, up = (3, 32, 64, 128), (128, 64, 32)
    parts: list[nn.Module] = []
    for before, after in pairwise(down):
        parts += [nn.Conv2d(before, after, 4, 2, 1), nn.GELU()]
    for before, after in pairwise(up):
        parts += [nn.ConvTranspose2d(before, after, 4, 2, 1), nn.GELU()]
    return nn.Sequential(*parts, nn.ConvTranspose2d(32, 3, 4, 2, 1))


def vit() -> nn.Module:
    """Build six blocks of width 384 over 144 patches."""
    return Vision(384, 6)


def mlp_norm() -> nn.Module:
    """Build eight layers of 1,024, each with a batch norm."""
    parts: list[nn.Module] = []
    for _ in range(8):
        parts += [nn.Linear(1024, 1024, bias=False), nn.BatchNorm1d(1024), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(1024, 100))


def separable() -> nn.Module:
    """Build depthwise and pointwise convolutions, as in MobileNet."""
    parts: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.Hardswish()]
    for before, after in pairwise((32, 64, 128, 128, 256, 256, 512)):
        parts += [nn.Conv2d(before, before, 3, 1 if before == after else 2, 1, groups=before, bias=False)]
        parts += [nn.BatchNorm2d(before), nn.Hardswish(), nn.Conv2d(before, after, 1, bias=False)]
        parts += [nn.BatchNorm2d(after), nn.Hardswish()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 100))


def encoder() -> nn.Module:
    """Build six layers of torch's transformer."""
    return Encoder(256, 6)


def unet() -> nn.Module:
    """Build a U-Net of 32 to 256 channels with group norms and transposed convolutions."""
    return UNet((32, 64, 128, 256), lambda width: nn.GroupNorm(8, width), has_upsampling=False)


def unet_upsampling() -> nn.Module:
    """Build a U-Net of 48 to 192 channels with batch norms and upsampling."""
    return UNet((48, 96, 192), nn.BatchNorm2d, has_upsampling=True)


def waves() -> nn.Module:
    """Build ten gated layers of 64 channels."""
    return Waves(64, 10)


def bottlenecks() -> nn.Module:
    """Build the stem of ResNet-50, and two of its blocks for each width."""
    parts: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    for before, inner, stride in ((64, 64, 1), (256, 128, 2), (512, 256, 2), (1024, 512, 2)):
        parts += [Bottleneck(before, inner, 4 * inner, stride), Bottleneck(4 * inner, inner, 4 * inner, 1)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 100))


def mobile() -> nn.Module:
    """Build MobileNet's inverted bottlenecks of 16 to 160 channels."""
    parts: list[nn.Module] = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish()]
    for before, after in pairwise((16, 24, 24, 40, 40, 80, 80, 112, 112, 160, 160)):
        parts.append(Bottleneck(before, 6 * before, after, 1 if before == after else 2, is_depthwise=True))
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(160, 100))


def vit_small() -> nn.Module:
    """Build four blocks of width 192 over 144 patches."""
    return Vision(192, 4)


def gru() -> nn.Module:
    """Build two GRU layers of width 384."""
    return Recurrent(nn.GRU, 3000, 384)


def lstm_small() -> nn.Module:
    """Build two LSTM layers of width 256."""
    return Recurrent(nn.LSTM, 2000, 256)


def gpt_wide() -> nn.Module:
    """Build three blocks of width 768."""
    return SmallGPT(5000, 768, 3)


def checkpointed() -> nn.Module:
    """Build eight recomputed blocks of width 288."""
    return CheckpointedGPT(9000, 288, 8, is_reentrant=False)


def reentrant() -> nn.Module:
    """Build five recomputed blocks of width 432 with reentrant checkpoints."""
    return CheckpointedGPT(4000, 432, 5, is_reentrant=True)


def mlp_large_batch() -> nn.Module:
    """Build five square layers of 768."""
    return mlp(768, 5)


def cnn_single() -> nn.Module:
    """Build eight convolutions for one large picture."""
    widths = (3, 48, 48, 96, 96, 192, 192, 256, 256)
    parts: list[nn.Module] = []
    for before, after in pairwise(widths):
        parts += [nn.Conv2d(before, after, 3, 1 if before == after else 2, 1), nn.GroupNorm(8, after), nn.ReLU()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000))


def vit_wide() -> nn.Module:
    """Build five blocks of width 432 over 144 patches."""
    return Vision(432, 5)


def gru_wide() -> nn.Module:
    """Build two GRU layers of width 512."""
    return Recurrent(nn.GRU, 3000, 512)


def recommender() -> nn.Module:
    """Build three tables of 150,000 rows."""
    return Embedded(150_000, 40)


def gpt_long() -> nn.Module:
    """Build five blocks of width 240 for 1,536 tokens."""
    return SmallGPT(6000, 240, 5, 1536)


def encoder_wide() -> nn.Module:
    """Build four layers of torch's transformer of width 384."""
    return Encoder(384, 4)


CASES = {
    "mlp_25m": Case(mlp_25m, 64, (2048,)),
    "mlp_small": Case(mlp_small, 128, (784,)),
    "cnn_2m": Case(cnn_2m, 32, (3, 32, 32)),
    "resnet_18": Case(resnet_18, 8, (3, 112, 112), optimizer="sgd+momentum"),
    "gpt_tiny": Case(gpt_tiny, 8, length=128),
    "gpt_medium": Case(gpt_medium, 4, length=128),
    "lstm": Case(lstm, 16, length=32),
    "embeddings": Case(embeddings, 256, length=16),
    "autoencoder": Case(autoencoder, 32, (3, 64, 64)),
    "vit": Case(vit, 4, (3, 96, 96)),
}
"""The ten models that were used to choose the constants."""

HELD_OUT = {
    "mlp_norm": Case(mlp_norm, 256, (1024,), optimizer="sgd+momentum"),
    "separable": Case(separable, 16, (3, 128, 128), optimizer="rmsprop"),
    "encoder": Case(encoder, 4, length=128, optimizer="adam"),
    "unet": Case(unet, 4, (3, 96, 96)),
    "unet_upsampling": Case(unet_upsampling, 2, (3, 128, 128), optimizer="adam"),
    "waves": Case(waves, 4, (1, 4000)),
    "bottlenecks": Case(bottlenecks, 8, (3, 128, 128), optimizer="sgd+momentum"),
    "mobile": Case(mobile, 8, (3, 160, 160), optimizer="sgd+momentum"),
    "vit_small": Case(vit_small, 16, (3, 96, 96)),
    "gru": Case(gru, 32, length=48),
    "lstm_small": Case(lstm_small, 32, length=64, optimizer="adam"),
    "gpt_wide": Case(gpt_wide, 2, length=128, optimizer="sgd+momentum"),
}
"""Models with other layers and optimizers. A few were used to choose allowances: both U-Nets, ``separable``,
``bottlenecks``, ``mobile`` and ``waves`` for convolutions, ``lstm_small`` for LSTMs, and ``gpt_wide`` for the rest."""


def _hugging(name: str, kind: str, width: int, layers: int, vocabulary: int, **other: int | str) -> dict[str, Any]:
    """Return the configuration of a transformers class. `kind` is its ``model_type``."""
    names = {"hidden_size": width, "num_hidden_layers": layers, "vocab_size": vocabulary, "num_attention_heads": 8}
    return {"architectures": [name], "model_type": kind, **names, **other}


GPT2 = partial(_hugging, "GPT2LMHeadModel", "gpt2")
LLAMA = partial(_hugging, "LlamaForCausalLM", "llama", num_key_value_heads=4)
BERT = _hugging("BertForMaskedLM", "bert", 512, 4, 8000, intermediate_size=2048)
SIZES = {"d_model": 320, "d_kv": 40, "d_ff": 1024, "num_layers": 6, "num_heads": 8, "decoder_start_token_id": 0}
T5 = _hugging("T5ForConditionalGeneration", "t5", 320, 6, 7000, **SIZES)
MIXTRAL = _hugging("MixtralForCausalLM", "mixtral", 384, 2, 9000, intermediate_size=512, num_key_value_heads=4)
OLMOE = _hugging("OlmoeForCausalLM", "olmoe", 320, 4, 7000, intermediate_size=256, num_experts=8, num_experts_per_tok=2)
FRESH = {
    "checkpointed": Case(checkpointed, 6, length=128),
    "reentrant": Case(reentrant, 12, length=128, optimizer="adam"),
    "segments": Case(Segments, 12, (3, 96, 96), optimizer="sgd+momentum"),
    "gpt2": Case(GPT2(320, 8, 7000), 3, length=320, optimizer="sgd+momentum"),
    "gpt2_checkpointed": Case(GPT2(512, 6, 9000), 3, length=256, checkpointing=True),
    "llama_autocast": Case(LLAMA(384, 7, 12_000, intermediate_size=1024), 3, length=320, autocast=True),
    "llama_both": Case(LLAMA(512, 8, 6000, intermediate_size=1376), 6, length=192, autocast=True, checkpointing=True),
    "bert": Case(BERT, 4, length=256, optimizer="adafactor"),
    "t5_checkpointed": Case(T5, 4, length=192, optimizer="adafactor", checkpointing=True),
    "mixtral": Case(MIXTRAL, 3, length=256),
    "olmoe_checkpointed": Case(OLMOE, 4, length=192, checkpointing=True),
    "mlp_large_batch": Case(mlp_large_batch, 8192, (768,)),
    "cnn_single": Case(cnn_single, 1, (3, 640, 640), optimizer="sgd+momentum"),
    "vit_autocast": Case(vit_wide, 8, (3, 96, 96), autocast=True),
    "gru_wide": Case(gru_wide, 16, length=48, optimizer="adafactor"),
    "recommender": Case(recommender, 1024, length=12, optimizer="adafactor"),
    "gpt_long": Case(gpt_long, 1, length=1536),
    "encoder_autocast": Case(encoder_wide, 12, length=192, optimizer="adam", autocast=True),
}
"""Held out: recomputation, transformers, experts, autocast and ordinary shapes. The constants were chosen with the
models above and with these kinds in other sizes, but ``LIFETIME`` also with these (decision 52)."""
ALL = {**CASES, **HELD_OUT, **FRESH}
