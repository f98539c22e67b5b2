"""A mixture of experts: a router sends each token to experts. The loss is the same on any number of ranks.

python examples/mixture_of_experts.py                               one process
paceline run --nproc 4 examples/mixture_of_experts.py --top 2       four ranks, two experts for each token

The text is in eight made-up languages. The next token depends on the current token and on the language. Two things are
different from an ordinary model. First, an expert has no gradient on ranks where it received no token;
``unused_parameters="allow"`` silences the warning. Second, the load-balancing loss (Fedus et al. 2021, Switch
Transformers, eq. 4-6) is a product of two means over the batch, so it needs each expert's share of the *global* batch.
With the shares of its local batch, every rank would minimize a different loss. Tests on GPUs: docs/gpu-status.md.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.data import DataLoader

LANGUAGES, TOKENS, EXPERTS, WIDTH, LONGEST = 8, 32, 8, 32, 24


def make_texts(count: int) -> TensorDataset:
    """Return token sequences, (count, LONGEST + 1), padded with -1, and their languages, (count,)."""
    orders = torch.stack([torch.randperm(TOKENS) for _ in range(LANGUAGES)])
    language, length = torch.randint(LANGUAGES, (count,)), torch.randint(4, LONGEST + 1, (count, 1))
    tokens = torch.randint(TOKENS, (count, 1))
    for _ in range(LONGEST):
        tokens = torch.cat([tokens, orders[language, tokens[:, -1]][:, None]], 1)
    return TensorDataset(tokens.where(torch.arange(LONGEST + 1) <= length, -1), language)


class Experts(nn.Module):
    """A layer that sends each token through `top` experts and sums their outputs, weighted by the router."""

    def __init__(self, top: int) -> None:
        super().__init__()
        self.router, self.top = nn.Linear(WIDTH, EXPERTS), top
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, (tokens, WIDTH), the router's probabilities, (tokens, EXPERTS), and the chosen experts."""
        probabilities = self.router(x).softmax(1)
        weights, chosen = probabilities.topk(self.top, 1)  # (tokens, top)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if len(token):  # otherwise, its parameters are unused on this rank
                output = output.index_add(0, token, weights[token, place, None] * expert(x[token]))
        return output, probabilities, chosen


class Model(nn.Module):
    """Predicts the next token from a token and its language."""

    def __init__(self, top: int) -> None:
        super().__init__()
        self.tokens, self.languages = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LANGUAGES, WIDTH)
        self.experts, self.head = Experts(top), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor, languages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits, (tokens, TOKENS), the router's probabilities, and the chosen experts."""
        x = self.tokens(tokens) + self.languages(languages)
        output, probabilities, chosen = self.experts(x)
        return self.head(x + output), probabilities, chosen


def flat(batch: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the input tokens of a batch, their languages, and the target tokens, each (tokens,)."""
    texts, languages = (part.to(device) for part in batch)
    real = texts[:, 1:] >= 0
    return texts[:, :-1][real], languages[:, None].expand_as(real)[real], texts[:, 1:][real]


def main() -> None:
    """Train, and print the losses and the experts of each language."""
    parser = argparse.ArgumentParser(description="A mixture of experts, trained data-parallel.")
    parser.add_argument("--top", type=int, default=1, help="experts for each token, 1 or 2 (default: 1)")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the balancing loss (default: 0.01)")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the texts (default: 8)")
    options = parser.parse_args()
    world = paceline.init()
    if options.top not in (1, 2) or options.balance < 0 or options.epochs < 1:
        raise paceline.UsageError("--top must be 1 or 2, --balance at least 0, and --epochs at least 1")
    with paceline.set_seed(0):
        # In float64, because rounding can decide between two nearly equal experts, and runs would diverge.
        texts, net = make_texts(512), Model(options.top).double().to(world.device)
    model = paceline.DistributedDataParallel(net, unused_parameters="allow")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(texts, batch_size=16, shuffle=True)
    unused = steps = 0
    for epoch in range(options.epochs):
        for batch in loader:
            tokens, languages, targets = flat(batch, world.device)
            logits, probabilities, chosen = model(tokens, languages)
            counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).double()
            # Each expert's share of the tokens on all ranks. Only the probabilities have a gradient.
            shares = paceline.mean_over_ranks(counts / chosen.numel(), weight=len(tokens))
            balance = EXPERTS * (shares * probabilities).sum()  # a sum over tokens, like the loss
            loss = F.cross_entropy(logits, targets, reduction="sum") + options.balance * balance
            with model.weight(len(tokens)):  # the mean over the tokens of all ranks
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            unused, steps = unused + int((counts == 0).sum()), steps + 1
        mean = paceline.mean_over_ranks(loss.item() / len(tokens), weight=len(tokens))
        world.print(f"epoch {epoch + 1}: loss {mean:.8f}")  # in its last step
    tokens, languages, targets = flat(list(texts.tensors), world.device)
    with torch.no_grad():
        logits, _, chosen = model(tokens, languages)
    right = (logits.argmax(1) == targets).double().mean().item()
    world.print(f"{right:.1%} right; on rank 0 {unused / steps:.1f} of {EXPERTS} experts had no token in a step")
    world.print("tokens of each language that went to an expert:")
    for expert in range(EXPERTS):
        share = (chosen == expert).any(1)
        found = torch.bincount(languages[share], minlength=LANGUAGES) / torch.bincount(languages)
        world.print(f"expert {expert}: " + " ".join(f"{part:4.0%}" for part in found.tolist()))
    world.close()


if __name__ == "__main__":
    main()
