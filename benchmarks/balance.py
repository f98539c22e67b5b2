"""The cost of sentences of uneven length on several ranks, with batches split by count and by cost, in turns.

    paceline run --nproc 2 benchmarks/balance.py DIR/msr_paraphrase_train.txt

A network reads the words of each rank's sentences, whose time is in proportion to their number: first one after the
other, without padding; then in batches that are padded to their longest sentence. Without padding, the result is how
long ranks wait for the one with the most words; with padding, it is the time of a step, which is that of the rank with
the most padded words. Both are computed from the words alone, for 2, 4 and 8 ranks, and measured on the ranks that run,
where they include the wait for communication.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline
from dated_results import save
from paceline.data import DataLoader, GlobalBatchSampler
from paceline.tools.bench.turns import median_ratio, take_turns

BATCH, WIDTH, ROUNDS, STEPS = 32, 384, 5, 20


def parts_of(lengths: list[int], ranks: int, **split: Any) -> Iterator[tuple[list[int], ...]]:
    """Yield the lengths in every rank's slice of each global batch."""
    for parts in zip(
        *(GlobalBatchSampler(len(lengths), BATCH, rank=rank, world_size=ranks, **split) for rank in range(ranks)),
        strict=True,
    ):
        yield tuple([lengths[index] for index in part] for part in parts)


def waiting_by_words(lengths: list[int], ranks: int, **split: Any) -> float:
    """Return the share of all ranks' time that is waiting, if a word takes the same time everywhere."""
    loads = [[sum(part) for part in parts] for parts in parts_of(lengths, ranks, **split)]
    return 1 - sum(map(sum, loads)) / (ranks * sum(map(max, loads)))


def padded_words(lengths: list[int], ranks: int, **split: Any) -> int:
    """Return the words, padding included, of the rank that has most of them, summed over the steps."""
    return sum(max(len(part) * max(part, default=0) for part in parts) for parts in parts_of(lengths, ranks, **split))


def measured(
    model: paceline.DistributedDataParallel,
    sentences: list[Tensor],
    collate: Callable[[list[Tensor]], Tensor],
    **split: Any,
) -> tuple[float, float]:
    """Return the share of the ranks' time that was waiting, and the seconds of a step."""
    loader = DataLoader(sentences, BATCH, shuffle=True, collate_fn=collate, **split)
    dist.barrier()
    before, start = model.exposed_seconds, time.perf_counter()
    for words in islice(loader, STEPS):
        with model.weight(len(words)):
            model(words).square().sum().backward()
        model.zero_grad()
    figures = torch.tensor([model.exposed_seconds - before, time.perf_counter() - start])
    dist.all_reduce(figures)
    return float(figures[0] / figures[1]), float(figures[1]) / dist.get_world_size() / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="MRPC's msr_paraphrase_train.txt")
    lines = parser.parse_args().file.read_text("utf-8-sig").splitlines()[1:]
    lengths = [len(" ".join(line.split("\t")[3:]).split()) for line in lines]
    with paceline.init() as world:
        torch.manual_seed(0)
        layers = [nn.Embedding(1000, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(6))]
        model = paceline.DistributedDataParallel(nn.Sequential(*layers))
        sentences = [torch.randint(1000, (length,)) for length in lengths]
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
        variants = {
            "count": partial(measured, model, sentences, torch.cat),
            "cost": partial(measured, model, sentences, torch.cat, cost=lengths),
            "padded, count": partial(measured, model, sentences, pad),
            "padded, cost": partial(measured, model, sentences, pad, cost=lengths, padded=True),
        }
        turns = take_turns(variants, ROUNDS)
        if world.is_main:
            results: dict[str, Any] = {}
            for ranks in (2, 4, 8):
                shares = [waiting_by_words(lengths, ranks), waiting_by_words(lengths, ranks, cost=lengths)]
                results[f"{ranks} ranks, waiting by words"] = shares
            results[f"{world.size} ranks, waiting measured"] = [
                median(waiting for waiting, _ in turns[name]) for name in ("count", "cost")
            ]
            for name, (count, cost) in results.items():
                print(f"{name:<28} by count {count:6.2%}, by cost {cost:6.2%}: {1 - cost / count:.0%} is gone")
            padded = {}
            for ranks in (2, 4, 8):
                work = [padded_words(lengths, ranks, **split) for split in ({}, {"cost": lengths, "padded": True})]
                padded[f"{ranks} ranks, padded words"] = work[1] / work[0] - 1
            by_count, by_cost = ([seconds for _, seconds in turns[f"padded, {name}"]] for name in ("count", "cost"))
            padded[f"{world.size} ranks, padded, seconds measured"] = median_ratio(by_cost, by_count) - 1
            for name, change in padded.items():
                print(f"{name:<36} {change:+.1%}")
            save("balance", results | padded)


if __name__ == "__main__":
    main()
