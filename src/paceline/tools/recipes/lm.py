"""The lm recipe: a compact GPT on the characters of a text file.

    tokens ─► embeddings ─► block × layers ─► norm ─► head ─► logits

It learns in minutes on a CPU for three reasons: the input includes embeddings of the last two and the last three
tokens, so attention need not learn them; every block's output is zero at first; and ``torch.optim.Muon`` trains the
blocks' matrices.

The reported loss is the mean cross-entropy, in nats, over every character of the last tenth of the file, read in
windows of ``--context`` characters that do not overlap. The perplexity is e to the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from paceline.core.rng import set_seed
from paceline.core.unwrapping import unwrap
from paceline.core.world import World, init
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.optim import DiLoCo
from paceline.tools.recipes.configs import LmConfig
from paceline.tools.recipes.datasets import Corpus
from paceline.tools.recipes.report import Report, finish, gather_report
from paceline.train import Evaluation, Result

NGRAM_SLOTS = 16_384
"""Rows of the tables of token pairs and triples; colliding entries share a row."""
OTHER_LR = 0.15
"""Learning rate of embeddings, gains and the output layer, relative to ``--lr``."""
TEMPERATURE = 0.8
"""Temperature of the sample; values below 1 favor likely tokens."""


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


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return (batch, time, vocabulary) logits in float32."""
    logits: Tensor = model(tokens.to(next(model.parameters()).device))
    return logits.float()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Return the summed cross-entropy of a batch, and its number of targets."""
    tokens, targets = batch
    logits = logits_of(model, tokens)
    total = F.cross_entropy(logits.flatten(0, 1), targets.to(logits.device).flatten(), reduction="sum")
    # Counted on the host, because reading a count from the device would wait for it; ignored targets are negative.
    return total, int((targets >= 0).sum())


def sums(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Return the summed loss of a batch, and its number of targets."""
    total, count = loss(model, batch)
    return {"loss": total}, count


@torch.no_grad()
def written_on(model: nn.Module, start: Tensor, count: int, context: int, seed: int) -> Tensor:
    """Return `start` followed by `count` sampled tokens, (n,), each predicted from at most `context` tokens."""
    # Sample on the CPU, so that the text does not depend on the device.
    generator = torch.Generator().manual_seed(seed)
    tokens = start
    model.eval()
    for _ in range(count):
        chances = (logits_of(model, tokens[None, -context:])[0, -1].cpu() / TEMPERATURE).softmax(0)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)])
    return tokens


class MuonAndAdamW(torch.optim.Optimizer):
    """Combines ``torch.optim.Muon`` for `matrices` and ``AdamW`` for `others` in one optimizer."""

    def __init__(self, matrices: Sequence[nn.Parameter], others: Sequence[nn.Parameter], lr: float) -> None:
        # A small epsilon, because gradients of rare tokens are small.
        adamw = torch.optim.AdamW(others, OTHER_LR * lr, (0.9, 0.99), eps=1e-10, weight_decay=0.0, fused=True)
        self._parts = torch.optim.Muon(matrices, lr), adamw
        super().__init__([part.param_groups[0] for part in self._parts], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            # Set in every step, because load_state_dict() and a sharded optimizer replace these objects.
            part.param_groups, part.state = [group], self.state
            part.step()


def optimizer_for(gpt: GPT, lr: float) -> MuonAndAdamW:
    """Return the optimizer: Muon for the matrices of the blocks, AdamW for the rest."""
    matrices = gpt.matrices()
    return MuonAndAdamW(matrices, [parameter for parameter in gpt.parameters() if parameter not in set(matrices)], lr)


def train_lm(config: LmConfig, corpus: Corpus, world: World) -> tuple[DistributedDataParallel, Report, Result]:
    """Train on this rank; the report is the same on every rank."""
    with set_seed(config.seed):
        net = GPT(corpus.tokenizer.size, config.context, config.width, config.layers, config.heads).to(world.device)
    # Each host is an island, or each rank on a single host.
    inside = world.local_size if world.local_size < world.size else 1
    if config.sync_every is None:
        optimizer: torch.optim.Optimizer = optimizer_for(net, config.lr)
        model = DistributedDataParallel(net, virtual_ranks=config.virtual_ranks)
    else:
        mesh = init_device_mesh(world.device.type, (world.size // inside, inside), mesh_dim_names=("between", "inside"))
        model = DistributedDataParallel(net, device_mesh=mesh["inside"])
        # An island's batch is smaller, which calls for a lower rate. More momentum costs loss in trainings this short.
        inner = optimizer_for(net, config.lr * (inside / world.size) ** 0.5)
        optimizer = DiLoCo(model, inner, torch.optim.SGD(net.parameters(), 1.0, 0.3, nesterov=True), config.sync_every)
    # A larger batch than in training, because no activations are kept.
    held_out = DataLoader(corpus.validation, batch_size=4 * config.batch_size // config.micro_batches)
    result = config.train(model, optimizer, loss, corpus.training, Evaluation(held_out, sums, ("loss",)))
    nats = result.metrics["loss"]
    result.metrics["perplexity"] = math.exp(nats) if nats < 700 else math.inf  # exp() overflows above 709
    result.metrics["tokens_per_second"] = result.samples_per_second * config.context
    return model, gather_report(model, result, world), result


def main(text: str) -> None:
    """Train on this rank, and print the report and a sample on rank 0."""
    config = LmConfig.from_json(text)
    with init(config.backend) as world:
        corpus = config.corpus()
        model, report, result = train_lm(config, corpus, world)
        finish("lm", report, ("loss", "perplexity", "tokens_per_second"), result, config)
        if world.is_main and config.sample:
            start = corpus.validation[0][0][:1]
            sample = written_on(unwrap(model), start, config.sample, config.context, config.seed)
            print(f"\nA sample of the model's text:\n{corpus.tokenizer.decode(sample)}")
