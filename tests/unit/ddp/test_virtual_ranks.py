"""Virtual ranks: a training gives the same bits on any number of ranks."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import paceline
from paceline import compression
from paceline.core.rng import seed_all
from paceline.core.virtual_ranks import seed_of_slice
from paceline.core.world import World
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel, accumulate
from paceline.errors import UsageError
from ranks import Pools, run_ranks
from sliced import BATCH, SAMPLES, Steps, model_and_data

COUNT = 4


def train(world: World, kind: str, options: dict[str, Any]) -> bytes:
    """Train one epoch and one step; return weights and buffers."""
    return Steps(kind, options).run(5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mlp", {"sharded": True, "dtype": torch.bfloat16, "workers": 2}),
        ("cnn", {"weighted": False, "count": 8}),
        ("branches", {"count": 8}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_weights_have_the_same_bits_on_1_2_and_4_ranks(pools: Pools, kind: str, options: dict[str, Any]) -> None:
    results = [pools.run(size, train, kind, options) for size in (1, 2, 4)]
    assert len({weights for of_world in results for weights in of_world}) == 1


@pytest.mark.slow
def test_weights_have_the_same_bits_over_gloo_and_on_8_ranks() -> None:
    results = {
        weights
        for size, backend in ((1, None), (4, "gloo"), (8, None))
        for weights in run_ranks(size, train, "cnn", {"count": 8}, backend=backend)
    }
    assert len(results) == 1


# -- against a plain loop -------------------------------------------------------------------------------------------


def compare_with_plain_loop(world: World, kind: str) -> float:
    """Train one epoch; return the largest difference of weights and buffers from a plain loop over all slices."""
    module, data = model_and_data(kind)
    model = DistributedDataParallel(module, virtual_ranks=COUNT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in accumulate(model, DataLoader(data, BATCH)):
        with model.weight(len(x)):
            model(x).pow(2).flatten(1).mean(1).sum().backward()
        if model.do_sync:
            optimizer.step()
            optimizer.zero_grad()
    plain, _ = model_and_data(kind)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    alone = [DataLoader(data, batch_sampler=sampler(rank)) for rank in range(COUNT)]  # like the loaders of four ranks
    for number, slices in enumerate(zip(*alone, strict=True)):
        total = sum(len(x) for x in slices)
        for at, x in enumerate(slices):
            seed_all(seed_of_slice(0, 0, number, at))
            (plain(x).pow(2).flatten(1).mean(1).sum() / total).backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(module.state_dict().values(), plain.state_dict().values(), strict=True)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def sampler(rank: int) -> Any:
    return paceline.data.GlobalBatchSampler(SAMPLES, BATCH, shuffle=False, rank=rank, world_size=COUNT)


def test_step_equals_a_plain_loop_over_all_slices(pools: Pools) -> None:
    for size in (1, 2):
        assert max(pools.run(size, compare_with_plain_loop, "cnn")) < 1e-5


# -- refusals -------------------------------------------------------------------------------------------------------


def wrap(module: nn.Module | None = None, count: int = 4, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module or nn.Linear(4, 4), virtual_ranks=count, **options)


def hook() -> None:
    model = wrap()
    model.register_comm_hook(compression.Int8(model), compression.hook)


def plain_loop() -> None:
    model = wrap()
    model(torch.ones(2, 4)).sum().backward()


def two_backwards() -> None:
    model = wrap()
    for batch in accumulate(model, DataLoader(torch.ones(8, 4), 8)):
        model(batch).sum().backward()
        model(batch).sum().backward()


def step_in_a_hook(count: int) -> None:
    model = wrap(count=count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    for batch in accumulate(model, DataLoader(torch.ones(8, 4), 8)):
        model(batch).sum().backward()


class Unpicklable(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return lambda: index


def unpicklable() -> None:
    next(accumulate(wrap(check_compute_every=10), DataLoader(Unpicklable(), 8, collate_fn=list)))


IN_A_HOOK = "the call runs in a hook, before this backward has averaged its gradients"
SAME_BITS = "check_compute_every=10 compares slices and needs virtual_ranks; also give virtual"
EVERY = "check_compute_every must be a number of optimizer steps >= 1, or None, not"
LOOP = "loop over paceline.accumulate(model, loader)"
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "not divided": (lambda: wrap(count=1), "2 ranks do not divide virtual_ranks=1; start 1"),
    "no power of two": (lambda: wrap(count=6), "virtual_ranks must be a power of two"),
    "no number": (lambda: wrap(count=True), "virtual_ranks must be a whole number, not True"),
    "fp16": (lambda: wrap(nn.Linear(4, 4).half()), "'weight' is float16"),
    "sync batch norm": (lambda: wrap(nn.SyncBatchNorm(4)), "normalizes over all ranks at once"),
    "cumulative": (lambda: wrap(nn.BatchNorm1d(4, momentum=None)), "momentum=None"),
    "hook": (hook, "adds up gradients in another order"),
    "join": (lambda: wrap().join(), "join cannot be combined with virtual_ranks=4"),
    "plain loop": (plain_loop, LOOP),
    "sync_gradients": (lambda: wrap().sync_gradients(), LOOP),
    # The error used to suggest accumulate(), which the loop already used.
    "two backwards": (two_backwards, "add up the losses of a slice before its one backward()"),
    # The error used to suggest calling the wrapper instead of model.module.
    "step in a hook": (lambda: step_in_a_hook(4), IN_A_HOOK),
    "step in a hook, one slice": (lambda: step_in_a_hook(2), IN_A_HOOK),
    "other loader": (lambda: next(accumulate(wrap(), [torch.ones(2, 4)])), "needs a loader that cuts each batch"),
    "every": (lambda: next(accumulate(wrap(), DataLoader([1.0] * 8, 8), every=2)), "leave every out"),
    "small batch": (
        lambda: next(accumulate(wrap(), DataLoader([1.0] * 8, 2))),
        "a global batch of 2 samples cannot be cut into virtual_ranks=4 slices",
    ),
    "check without": (lambda: DistributedDataParallel(nn.Linear(4, 4), check_compute_every=10), SAME_BITS),
    "check every 0": (lambda: wrap(check_compute_every=0), f"{EVERY} 0"),
    "check every -3": (lambda: wrap(check_compute_every=-3), f"{EVERY} -3"),
    "check of lambdas": (unpicklable, "a batch of rank 0 cannot be pickled"),
}


def refusal(world: World, mistake: str) -> str:
    gc.collect()  # on both ranks: a wrapper of the previous test left on one rank only would wait for the other
    with pytest.raises(UsageError) as refused:
        MISTAKES[mistake][0]()
    return str(refused.value)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_in_one_line(pools: Pools, mistake: str) -> None:
    for message in pools.run(2, refusal, mistake):
        assert MISTAKES[mistake][1] in message
        assert "\n" not in message


def train_with_skipped_slices(world: World, weighted: bool) -> list[list[float]]:
    """Return the gradients of two steps that skip the second slice and the two last slices, respectively."""
    module = nn.Linear(1, 1, bias=False).double()
    model, gradients = DistributedDataParallel(module, virtual_ranks=4), []
    for x in accumulate(model, DataLoader(torch.arange(1, 33).double()[:, None], 16)):
        number = int(x[0, 0]) // 4
        with model.weight(len(x)) if weighted else contextlib.nullcontext():
            if number not in (1, 6, 7):
                (model(x).sum() if weighted else model(x).mean()).backward()
            elif model.do_sync:
                model.sync_gradients()
        if model.do_sync:
            assert module.weight.grad is not None
            gradients.append(module.weight.grad.flatten().tolist())
            module.zero_grad()
    return gradients


@pytest.mark.parametrize(("weighted", "expected"), [(False, [[6.875], [10.25]]), (True, [[110 / 12], [20.5]])])
def test_skipped_slices_count_equally_on_any_number_of_ranks(
    pools: Pools, weighted: bool, expected: list[list[float]]
) -> None:
    """A rank that skipped its only slice did not count in the mean, so 4 ranks had a different gradient than 1."""
    for size in 1, 2, 4:
        for gradients in pools.run(size, train_with_skipped_slices, weighted):
            assert [value for (value,) in gradients] == pytest.approx([value for (value,) in expected])
