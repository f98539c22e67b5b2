"""Promise: sparse embedding gradients equal one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import NonFiniteGradient
from ranks import run_ranks
from twins import Pools, same_tensor

ROWS, WIDTH = 12, 4


class Words(nn.Module):
    """A sparse embedding, a sparse embedding bag, and a dense head."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.word = nn.Embedding(ROWS, WIDTH, sparse=sparse, dtype=torch.float64)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, sparse=sparse, mode="sum", dtype=torch.float64)
        self.head = nn.Linear(WIDTH, 2, dtype=torch.float64)

    def forward(self, words: Tensor, use_bag: bool = True) -> Tensor:
        out = self.word(words).sum(1)
        if use_bag:
            out = out + self.bag(words)
        return self.head(out.tanh())


class Tied(nn.Module):
    """A sparse embedding whose gradient is dense if `also_writes` reuses its weight for the output."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.read = nn.Embedding(ROWS, WIDTH, sparse=sparse, dtype=torch.float64)
        self.head = nn.Linear(WIDTH, 2, dtype=torch.float64)

    def forward(self, words: Tensor, also_writes: bool = True) -> Tensor:
        hidden = nn.functional.embedding(words, self.read.weight, sparse=True).sum(1)
        out = self.head(hidden)
        return out.sum() + (hidden @ self.read.weight.t()).sin().sum() if also_writes else out.sum()


class UnflaggedTied(Tied):
    def __init__(self) -> None:
        super().__init__(sparse=False)


def words(step: int, rank: int, count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, ROWS, (count, 2), generator=generator)


def compare(ours: nn.Module, twin: nn.Module, where: str) -> None:
    for (name, mine), other in zip(ours.named_parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), f"{where} {name}"
        if mine.grad is None or other.grad is None:
            continue
        assert mine.grad.is_sparse == other.grad.is_sparse, f"{where} {name}"
        if mine.grad.is_sparse:
            rows = other.grad.coalesce().indices()
            assert torch.equal(mine.grad.coalesce().indices(), rows), f"{where} {name}"
        same_tensor(mine.grad.to_dense(), other.grad.to_dense(), 1e-9, f"{where} {name}")


def optimizers(*modules: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]


def compare_with_twin(world: World, build: Any, micros: int, use: Any, weighted: bool, set_to_none: bool) -> None:
    """Pass ``use(rank, step)`` to forward; a rank without samples calls sync_gradients()."""
    torch.manual_seed(0)
    module = build()
    twin = copy.deepcopy(module)
    model = DistributedDataParallel(module, bucket_cap_mb=1e-4, unused_parameters="allow")
    both = optimizers(module, twin)
    for step in range(6):
        counts = [1 + (rank + step) % 3 if weighted else 2 for rank in range(world.size)]
        total = sum(counts) * micros
        if weighted and step == 2:
            counts[0] = 0
            total = sum(counts) * micros
        for micro in range(micros):
            mine = words(10 * step + micro, world.rank, counts[world.rank])
            model.require_backward_grad_sync = micro == micros - 1
            if not len(mine):
                if model.do_sync:
                    model.sync_gradients()
            elif weighted:
                with model.weight(len(mine)):
                    model(mine, use(world.rank, step)).sum().backward()
            else:
                (model(mine, use(world.rank, step)).sum() * world.size / total).backward()
            for rank, count in enumerate(counts):
                if count:
                    (twin(words(10 * step + micro, rank, count), use(rank, step)).sum() / total).backward()
        compare(module, twin, f"rank {world.rank}, step {step}:")
        digests = [None] * world.size
        torch.distributed.all_gather_object(
            digests, [p.grad.to_dense() for p in module.parameters() if p.grad is not None]
        )
        for other in digests:
            assert all(map(torch.equal, other, digests[0]))
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad(set_to_none)


def always(rank: int, step: int) -> bool:
    return True


def only_on_rank_0(rank: int, step: int) -> bool:
    return rank == 0


def in_odd_steps(rank: int, step: int) -> bool:
    return step % 2 == 1


@pytest.mark.parametrize("build", [Words, UnflaggedTied])
@pytest.mark.parametrize("use", [always, only_on_rank_0, in_odd_steps], ids=lambda use: use.__name__)
def test_equals_one_process(pools: Pools, build: Any, use: Any) -> None:
    for micros, weighted, set_to_none in [(3, False, True), (1, True, False), (2, True, True)]:
        pools.run(2, compare_with_twin, build, micros, use, weighted, set_to_none)


def test_sparse_gradients_equal_one_process_over_gloo() -> None:
    run_ranks(2, compare_with_twin, Words, 2, only_on_rank_0, True, True, backend="gloo")


def test_sparse_embeddings_take_no_bucket_space(pools: Pools) -> None:
    for size in pools.run(2, bytes_in_buckets):
        assert size == 8 * (2 * WIDTH + 2)


def bytes_in_buckets(world: World) -> int:
    model = DistributedDataParallel(Words())
    for step in range(3):
        model.zero_grad()
        model(words(step, world.rank)).sum().backward()
        model.load_bucket_layout(model.bucket_layout())
    return model.gradient_bytes_per_step


def sparse_alone(world: World) -> list[float]:
    model = DistributedDataParallel(nn.Embedding(2, 2, sparse=True))
    optimizer = torch.optim.SparseAdam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        with model.weight(1):
            model(torch.tensor([world.rank])).sum().backward()
        gradient = model.module.weight.grad.to_dense().flatten().tolist()
        optimizer.step()
    return gradient


@pytest.mark.parametrize("size", [1, 2])
def test_model_may_have_only_sparse_gradients(pools: Pools, size: int) -> None:
    assert pools.run(size, sparse_alone) == ([[1.0, 1, 0, 0]] if size == 1 else [[0.5] * 4] * 2)


def train_with_nan_row(world: World) -> str:
    model = DistributedDataParallel(Words(), check_finite=True)
    loss = model(words(0, world.rank)).sum()
    with pytest.raises(NonFiniteGradient) as caught:
        (loss * float("nan") if world.rank else loss).backward()
    return str(caught.value)


def test_nonfinite_sparse_row_is_named(pools: Pools) -> None:
    for message in pools.run(2, train_with_nan_row):
        assert "rank 1" in message
        assert "'word.weight'" in message


def large_half_gradient(world: World) -> float:
    model = DistributedDataParallel(nn.Embedding(2, 1, sparse=True).half())
    (model(torch.tensor([0])) * 40000.0).sum().backward()
    return float(model.module.weight.grad.to_dense()[0])


def test_large_half_precision_gradients_do_not_overflow(pools: Pools) -> None:
    assert pools.run(2, large_half_gradient) == [40000.0, 40000.0]
