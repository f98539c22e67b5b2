"""One rank of the trainings that ``slow_links.py`` compares: the lm recipe's model, or a measurement of the link."""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

import paceline
from paceline.data import DataLoader
from paceline.optim import DiLoCo
from paceline.tools.recipes.configs import LmConfig
from paceline.tools.recipes.lm import GPT, loss, optimizer_for
from paceline.train import lr_factor
from slow_link import SLOW

MEGABYTES, PINGS = 25, 21
"""Size of the measured transfer, and number of measured round trips."""
SKIPPED = 3
"""Steps before the measured ones; the wrapper lays out its buckets again after the first."""


def sent() -> int:
    """Return the bytes that this host has sent over the slow link, including the headers of TCP and IP."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        device, _, counters = line.partition(":")
        if device.strip() == SLOW:
            return int(counters.split()[8])
    raise OSError(f"this host has no device {SLOW!r}")


def link(rank: int) -> dict[str, float]:
    """Measure the link with Gloo's messages: Mbit/s in one direction and in both at once, and the round trip."""
    tiny, large = torch.zeros(1, device="cpu"), torch.zeros(MEGABYTES * 250_000, device="cpu")
    other, trips, speeds = 1 - rank, [], dict[str, float]()

    def ping() -> None:
        dist.send(tiny, other)
        dist.recv(tiny, other)

    def pong() -> None:
        dist.recv(tiny, other)
        dist.send(tiny, other)

    for _ in range(PINGS):
        began = time.perf_counter()
        (pong if rank else ping)()
        trips.append(time.perf_counter() - began)
    for name in ("one way", "all-reduce"):  # an all-reduce of two ranks sends the whole tensor in both directions
        dist.barrier()
        began = time.perf_counter()
        if name == "all-reduce":
            dist.all_reduce(large)
        else:
            (dist.recv if rank else dist.send)(large, other)
            (pong if rank else ping)()
        speeds[name] = 8 * MEGABYTES / (time.perf_counter() - began)
    return {**speeds, "round trip": 1e3 * sorted(trips)[PINGS // 2]}


def train(steps: int, config: LmConfig, diloco: dict[str, Any]) -> dict[str, float]:
    """Train for `steps` of the recipe's steps; return the seconds and the bytes sent per step, and the held-out loss.

    Args:
        diloco: options of DiLoCo, and ``outer_lr`` and ``outer_momentum`` of its outer SGD; empty for DDP.
    """
    corpus = config.corpus()
    with paceline.set_seed(config.seed):
        net = GPT(corpus.tokenizer.size, config.context, config.width, config.layers, config.heads)
    # An island of two has half of the batch, which calls for a lower rate.
    inner = optimizer_for(net, config.lr * (0.5**0.5 if diloco else 1.0))
    warmup_steps = min(config.warmup_steps, (config.max_steps or 0) // 8)  # fewer than the recipe's in a quick run
    schedule = partial(lr_factor, warmup_steps=warmup_steps, decay="linear", total_steps=config.max_steps)
    scheduler = LambdaLR(inner, schedule)
    model: nn.Module = net
    optimizer: torch.optim.Optimizer = inner
    if not diloco:
        model = paceline.DistributedDataParallel(net)
    else:
        momentum = diloco.pop("outer_momentum")
        rate = diloco.pop("outer_lr")
        outer = torch.optim.SGD(net.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0)
        optimizer = DiLoCo(net, inner, outer, **diloco)  # with the plain module, each rank is an island
    loader = DataLoader(corpus.training, config.batch_size, shuffle=True, seed=config.seed)
    batches = chain.from_iterable(repeat(loader))
    skipped = 0 if diloco else SKIPPED
    for step, batch in enumerate(islice(batches, steps)):
        if step == skipped:
            dist.barrier()
            began, sent_before = time.perf_counter(), sent()
        total, count = loss(model, batch)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    if isinstance(optimizer, DiLoCo):
        optimizer.sync()
    dist.barrier()  # so that the slower rank counts
    timed = steps - skipped
    return {
        "step": (time.perf_counter() - began) / timed,
        "sent": (sent() - sent_before) / timed,
        "loss": held_out(net, corpus.validation, config.batch_size),
        "gradients": sum(4 * parameter.numel() for parameter in net.parameters()),
    }


@torch.no_grad()
def held_out(net: nn.Module, windows: Dataset[Any], batch_size: int) -> float:
    """Return the mean loss over the held-out text; each rank reads a share of the text."""
    sums = torch.zeros(2, dtype=torch.float64, device="cpu")
    for batch in DataLoader(windows, 4 * batch_size):
        total, count = loss(net, batch)
        sums += torch.tensor([total, count], dtype=torch.float64, device="cpu")
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", help="JSON: out; to train, also data, seed, steps, max_steps and diloco")
    settings = json.loads(parser.parse_args().settings)
    torch.set_num_threads(1)
    with paceline.init(backend="gloo", timeout=300) as world:
        if "steps" not in settings:
            result = link(world.rank)
        else:
            config = LmConfig(data=settings["data"], seed=settings["seed"], max_steps=settings["max_steps"])
            result = train(settings["steps"], config, settings["diloco"])
        if world.rank == 0:
            Path(settings["out"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
