"""The lm recipe: a compact GPT on the characters of a text file.

The reported loss is the mean cross-entropy, in nats, over every character of the last tenth of the file, read in
windows of ``--context`` characters that do not overlap. The perplexity is e to the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.processes.world import World, init
from paceline.core.state.rng import set_seed
from paceline.core.state.unwrapping import unwrap
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.tools.recipes.configs import LmConfig
from paceline.tools.recipes.gpt import GPT
from paceline.tools.recipes.report import Report, finish, gather_report
from paceline.tools.recipes.text import Corpus
from paceline.train import Evaluation, Result

OTHER_LR = 0.15
"""Learning rate of embeddings, gains and the output layer, relative to ``--lr``."""
TEMPERATURE = 0.8
"""Temperature of the sample; values below 1 favor likely tokens."""


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
    optimizer = optimizer_for(net, config.lr)
    model = DistributedDataParallel(net, virtual_ranks=config.virtual_ranks)
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
