"""Waiting that sentences of uneven length cause, with batches split by count and by cost, in turns.

    paceline run --nproc 2 benchmarks/balance.py DIR/msr_paraphrase_train.txt

A network reads the words of each rank's sentences one after the other, without padding, so that its time is in
proportion to their number. What counts is how long ranks wait for the one with the most words: by the words alone, for
2, 4 and 8 ranks, and measured on the ranks that run, where the waiting for communication itself is part of both.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline
from dated_results import save
from paceline.data import DataLoader, GlobalBatchSampler

BATCH, WIDTH, ROUNDS, STEPS = 32, 384, 7, 30


def by_words(lengths: list[int], ranks: int, *, balanced: bool) -> float:
    """Return the share of all ranks' time that is waiting, if a word takes the same time everywhere."""
    cost = lengths if balanced else None
    samplers = [
        GlobalBatchSampler(len(lengths), BATCH, cost=cost, rank=rank, world_size=ranks) for rank in range(ranks)
    ]
    waiting = total = 0
    for parts in zip(*samplers, strict=True):
        loads = [sum(lengths[index] for index in part) for part in parts]
        waiting += sum(max(loads) - load for load in loads)
        total += ranks * max(loads)
    return waiting / total


def measured(model: paceline.DistributedDataParallel, sentences: list[Tensor], *, balanced: bool) -> float:
    """Return the share of the ranks' time that was waiting, over some steps."""
    loader = DataLoader(sentences, BATCH, shuffle=True, cost=len if balanced else None, collate_fn=torch.cat)
    before, start = model.exposed_seconds, time.perf_counter()
    for step, words in enumerate(loader):
        if step == STEPS:
            break
        with model.weight(len(words)):
            model(words).square().sum().backward()
        model.zero_grad()
    figures = torch.tensor([model.exposed_seconds - before, time.perf_counter() - start])
    dist.all_reduce(figures)
    return float(figures[0] / figures[1])


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
        turns = [
            [measured(model, sentences, balanced=balanced) for balanced in (False, True)] for _ in range(ROUNDS + 1)
        ][1:]
        if world.is_main:
            results = {}
            for ranks in (2, 4, 8):
                shares = [by_words(lengths, ranks, balanced=balanced) for balanced in (False, True)]
                results[f"{ranks} ranks, by words"] = shares
            results[f"{world.size} ranks, measured"] = [median(turn[at] for turn in turns) for at in (0, 1)]
            for name, (count, cost) in results.items():
                print(f"{name:<22} waiting by count {count:6.2%}, by cost {cost:6.2%}: {1 - cost / count:.0%} is gone")
            save("balance", results)


if __name__ == "__main__":
    main()
