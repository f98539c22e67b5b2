"""Forward and backward of the full SmolLM2-360M in bfloat16: bare, torch DDP on Gloo, and Paceline, in one run.

The architecture comes from the model's published configuration by transformers, the weights are random, and every rank
has 2 × 64 tokens. No optimizer steps, so that all variants fit into memory side by side; its work would be the
same in each. The share of all-reduce is the time to reduce all gradients by themselves, bucket by bucket, over the
fastest bare step plus that time; the exposed share is the wait at the end of Paceline's backward.
Needs the extra ``bench``. Run by: paceline run --nproc 2 benchmarks/smollm2.py --config CONFIG.json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import paceline
from dated_results import save
from paceline.comm.c10d.process_group import PacelineProcessGroup
from paceline.tools.bench.turns import median_ratio, take_turns, timed
from step_time import torch_ddp


def build(config: LlamaConfig) -> nn.Module:
    """Build the model in bfloat16, with the same random weights on every rank."""
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(config)
    return model.bfloat16()


def step_of(
    model: nn.Module, tokens: torch.Tensor, *, barrier: bool = False, to_none: bool = True
) -> Callable[[], None]:
    """Return a function that does forward and backward, then sets gradients to None or to zero."""

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        if barrier:
            dist.barrier()
        model.zero_grad(set_to_none=to_none)

    return step


def reduction_of(numel: int, group: dist.ProcessGroup, *, shared: bool) -> Callable[[], None]:
    """Return a function that all-reduces `numel` bfloat16 elements in buckets of 25 MiB."""
    length = 25 * 2**20 // 2
    if shared:
        assert isinstance(group, PacelineProcessGroup)
        bucket = group.allocate(length, torch.bfloat16)
    else:
        bucket = torch.zeros(length, dtype=torch.bfloat16)

    def reduce() -> None:
        for start in range(0, numel, length):
            dist.all_reduce(bucket[: min(length, numel - start)], group=group)

    return reduce


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="config.json of SmolLM2-360M")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if not options.config.is_file():
        parser.error(f"there is no file {options.config}")
    config = LlamaConfig.from_pretrained(str(options.config), use_cache=False)
    world = paceline.init("paceline")
    gloo = dist.new_group(backend="gloo")
    torch.manual_seed(world.rank)
    tokens = torch.randint(config.vocab_size, (2, 64))
    ours = paceline.DistributedDataParallel(build(config))
    steps = {
        "bare": step_of(build(config), tokens, barrier=True),
        "bare, zeroed": step_of(build(config), tokens, barrier=True, to_none=False),
        "torch": step_of(torch_ddp(build(config), gloo), tokens),
        "paceline": step_of(ours, tokens),
    }
    numel = sum(parameter.numel() for parameter in ours.parameters())
    default_group = dist.distributed_c10d._get_default_group()
    reductions = {
        "gloo all-reduce": reduction_of(numel, gloo, shared=False),
        "our all-reduce": reduction_of(numel, default_group, shared=True),
    }
    exposed: list[float] = []

    def paceline_step() -> None:
        before = ours.exposed_seconds
        steps["paceline"]()
        exposed.append(ours.exposed_seconds - before)

    world.print(f"{numel:,} parameters, {options.rounds} rounds", flush=True)
    runs = {**steps, "paceline": paceline_step, **reductions}
    seconds = take_turns({name: partial(timed, run, 1) for name, run in runs.items()}, options.rounds)
    medians = {name: statistics.median(took) for name, took in seconds.items()}
    bare = min("bare", "bare, zeroed", key=medians.__getitem__)
    results: dict[str, float] = {
        **{f"{name} ms": round(1000 * value, 1) for name, value in medians.items()},
        "torch / paceline": median_ratio(seconds["torch"], seconds["paceline"]),
        **{f"{name} / {bare}": median_ratio(seconds[name], seconds[bare]) for name in ("torch", "paceline")},
        **{f"{name} share": medians[name] / (medians[bare] + medians[name]) for name in reductions},
        "exposed share": statistics.median(exposed[1:]) / medians["paceline"],
    }
    if world.is_main:
        for name, value in results.items():
            print(f"{name:26} {value:.3f}")
        print("kept in", save("smollm2-360m", results))
    world.close()


if __name__ == "__main__":
    main()
