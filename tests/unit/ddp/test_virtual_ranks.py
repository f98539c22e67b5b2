"""Virtual ranks: a training gives the same bits on any number of ranks, also with stateful modules."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import paceline
from insides import seed_all, seed_of_slice
from models import Average, Trip
from paceline import World, compression
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel, accumulate
from paceline.errors import UsageError
from ranks import Pools, RankFailed, run_ranks
from sliced import BATCH, SAMPLES, Steps, bits, model_and_data

COUNT = 4


def train(world: World, kind: str, options: dict[str, Any]) -> bytes:
    """Train one epoch and one step; return weights and buffers."""
    return Steps(kind, options).run(5)


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
    """Train one epoch; return the largest difference of weights from a plain loop over all slices."""
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
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    return max(float((ours.detach() - theirs.detach()).abs().max()) for ours, theirs in pairs)


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


IN_A_HOOK = "the call runs in a hook, before this backward has averaged its gradients"
LOOP = "loop over paceline.accumulate(model, loader)"
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "not divided": (lambda: wrap(count=1), "2 ranks do not divide virtual_ranks=1; start 1"),
    "no power of two": (lambda: wrap(count=6), "virtual_ranks must be a power of two"),
    "no number": (lambda: wrap(count=True), "virtual_ranks must be a whole number, not True"),
    "fp16": (lambda: wrap(nn.Linear(4, 4).half()), "'weight' is float16"),
    "sync batch norm": (lambda: wrap(nn.SyncBatchNorm(4)), "normalizes over all ranks at once"),
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
    "every": (lambda: next(accumulate(wrap(), DataLoader([1.0] * 8, 8), every=2)), "remove every="),
    "small batch": (
        lambda: next(accumulate(wrap(), DataLoader([1.0] * 8, 2))),
        "a global batch of 2 samples cannot be cut into virtual_ranks=4 slices",
    ),
}


def make_listed_mistake(mistake: str) -> None:
    MISTAKES[mistake][0]()


def refusal(world: World, make: Callable[..., Any], *arguments: Any) -> str:
    gc.collect()  # on both ranks: a wrapper of the previous test left on one rank only would wait for the other
    with pytest.raises(UsageError) as refused:
        make(*arguments)
    return str(refused.value)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_in_one_line(pools: Pools, mistake: str) -> None:
    for message in pools.run(2, refusal, make_listed_mistake, mistake):
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


# -- modules with buffers, copies and changes --------------------------------------------------------------------------


ROWS, ROWS_OF_A_BATCH = 2 * 16 + 10, 16


class Twice(nn.Module):
    """A block checkpointed twice, so that its gradient arrives in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.head = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return self.head(x)


def network(kind: str) -> nn.Module:
    torch.manual_seed(3)
    match kind:
        case "buffers":
            return nn.Sequential(Average(), nn.Linear(8, 32), nn.Tanh(), Average8(), nn.Linear(8, 4))
        case "spectral":
            normed = parametrizations.spectral_norm(nn.Linear(8, 32))
            tracked = nn.InstanceNorm1d(4, track_running_stats=True)
            return nn.Sequential(normed, nn.Unflatten(1, (4, 8)), tracked, nn.Flatten(), nn.Linear(32, 4))
        case "twice":
            return Twice()
    frozen = nn.Linear(8, 64).requires_grad_(False)
    return nn.Sequential(frozen, nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 4))


class Average8(Average):
    """Averages the first 8 features."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :8])


def rows() -> TensorDataset:
    drawn = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(ROWS, 8, generator=drawn), torch.randint(4, (ROWS,), generator=drawn))


def change(kind: str, module: Any, optimizer: torch.optim.Optimizer) -> None:
    """Change the module between two steps."""
    match kind:
        case "thawed":
            module[0].requires_grad_(True)
        case "new layers":
            torch.manual_seed(5)
            module.extend([nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)])
            optimizer.add_param_group({"params": [*module[-3].parameters(), *module[-2].parameters()]})


def train_module(world: World, kind: str, forwards: int = 1) -> bytes:
    """Train and return weights and buffers."""
    module = network(kind)
    model = DistributedDataParallel(module, virtual_ranks=COUNT)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    steps, loader = 0, DataLoader(rows(), ROWS_OF_A_BATCH, shuffle=True)
    for _ in range(2):
        for x, y in accumulate(model, loader):
            with model.weight(len(y)):
                sum(
                    F.cross_entropy(model(x * number), y, reduction="sum") for number in range(1, 1 + forwards)
                ).backward()
            if model.do_sync:
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                if steps == 2:
                    change(kind, module, optimizer)
    return bits(module)


@pytest.mark.parametrize(
    ("run", "kind", "options"),
    [
        (train, "mlp", {"sharded": True, "dtype": torch.bfloat16, "workers": 2}),
        (train, "cnn", {"weighted": False, "count": 8}),
        (train, "branches", {"count": 8}),
        (train_module, "buffers", 2),
        *((train_module, kind, 1) for kind in ("spectral", "thawed", "new layers")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_weights_have_the_same_bits_on_1_2_and_4_ranks(pools: Pools, run: Any, kind: str, options: Any) -> None:
    results = [pools.run(size, run, kind, options) for size in (1, 2, 4)]
    assert len({weights for of_world in results for weights in of_world}) == 1


def buffers_after_a_step(world: World, kind: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return the buffers after a step, and a plain module's buffers after a forward pass of the first slice."""
    module, plain = network(kind), network(kind)
    model = DistributedDataParallel(module, virtual_ranks=COUNT)
    for x, y in accumulate(model, DataLoader(rows(), ROWS_OF_A_BATCH)):
        F.cross_entropy(model(x), y).backward()
        if model.do_sync:
            break
    plain(rows().tensors[0][: ROWS_OF_A_BATCH // COUNT])
    return list(module.buffers()), list(plain.buffers())


@pytest.mark.parametrize("kind", ["buffers", "thawed"])
def test_buffers_are_those_of_the_first_slice(pools: Pools, kind: str) -> None:
    for size in (1, 4):
        for actual, expected in pools.run(size, buffers_after_a_step, kind):
            torch.testing.assert_close(actual, expected)


def compare_with_whole_batch(world: World) -> float:
    """Thaw a layer before step 2; return the largest difference of its gradients from a plain backward."""
    module = network("thawed").eval()  # BatchNorm would depend on the slices
    model = DistributedDataParallel(module, virtual_ranks=COUNT)
    for x, y in accumulate(model, DataLoader(rows(), ROWS_OF_A_BATCH)):
        F.cross_entropy(model(x), y).backward()
        if model.do_sync and any(parameter.grad is not None for parameter in module[0].parameters()):
            break
        if model.do_sync:
            model.zero_grad()
            module[0].requires_grad_(True)
    plain = copy.deepcopy(module)
    plain.zero_grad()
    x, y = (tensor[ROWS_OF_A_BATCH : 2 * ROWS_OF_A_BATCH] for tensor in rows().tensors)
    F.cross_entropy(plain(x), y).backward()
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    return max(float((ours.grad - theirs.grad).abs().max()) for ours, theirs in pairs)  # type: ignore[operator]


def test_first_gradient_of_a_thawed_layer_covers_the_whole_batch(pools: Pools) -> None:
    for size in (1, 4):
        assert max(pools.run(size, compare_with_whole_batch)) < 1e-6


class Normed(nn.Module):
    """A class outside of torch, because torch.compile starts graphs only there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network("thawed")

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def compilations(world: World) -> list[int]:
    """Return the number of compiled graphs after each slice."""
    graphs: list[Any] = []

    def count(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled: Any = torch.compile(Normed(), backend=count)
    model = DistributedDataParallel(compiled, virtual_ranks=16)
    after = []
    for x, y in accumulate(model, DataLoader(rows(), 32, drop_last=True)):
        F.cross_entropy(model(x), y).backward()
        after.append(len(graphs))
    return after


def test_compiled_model_with_batch_norm_is_not_recompiled_for_each_slice(pools: Pools) -> None:
    # Recompilation made torch fall back to eager mode at a slice that depends on the number of ranks, changing bits.
    [after] = pools.run(1, compilations)
    assert after == [after[0]] * 16


# -- wrappers and copies --------------------------------------------------------------------------------------------


def weighted_in_part(world: World) -> None:
    model = DistributedDataParallel(network("twice"), virtual_ranks=2)
    for number, (x, y) in enumerate(accumulate(model, DataLoader(rows(), ROWS_OF_A_BATCH))):
        if (number + world.rank) % 2:
            F.cross_entropy(model(x), y).backward()
            continue
        with model.weight(len(y)):
            F.cross_entropy(model(x), y, reduction="sum").backward()


def test_weighting_only_some_slices_is_refused(pools: Pools) -> None:
    for size in (1, 2):
        with pytest.raises(RankFailed, match=r"outside model\.weight\(\)"):
            pools.run(size, weighted_in_part)


# -- more refusals --------------------------------------------------------------------------------------------------


class Rows(nn.Module):
    """A table with sparse gradients; `announces` uses a layer, which makes them visible in advance."""

    def __init__(self, *, announces: bool) -> None:
        super().__init__()
        self.table, self.announces = nn.Embedding(9, 4, sparse=announces), announces

    def forward(self, x: Tensor) -> Tensor:
        index = x.abs().long().clamp(0, 8)
        return (self.table(index) if self.announces else F.embedding(index, self.table.weight, sparse=True)).mean(1)


def make_mistake(mistake: str, virtual_ranks: int) -> None:
    if mistake.startswith("sync"):
        kind: Any = paceline.SyncBatchNorm if "ours" in mistake else nn.SyncBatchNorm
        DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), kind(4, track_running_stats=False)), virtual_ranks=4)
    module: Any = Rows(announces="layer" in mistake) if "sparse" in mistake else network("twice")
    if mistake == "no backward":
        module = network("thawed")
    count = 4 if mistake == "no backward" else virtual_ranks
    if mistake == "ignored parameter":
        module._ddp_params_and_buffers_to_ignore = ["head.bias"]
    if mistake == "buffers":
        module = network("buffers")
    broadcast = {"broadcast_buffers": False} if mistake == "buffers" else {}
    model = DistributedDataParallel(module, virtual_ranks=count, bucket_cap_mb=1e-5, **broadcast)
    other = DistributedDataParallel(nn.Sequential(module)) if mistake == "shared" else None
    for x, y in accumulate(model, DataLoader(rows(), ROWS_OF_A_BATCH)):
        if mistake != "no backward" or not model.do_sync:
            loss = F.cross_entropy(model(x), y)
            (loss if other is None else loss + other(x).mean()).backward()


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("sync without statistics", "normalizes over all ranks at once"),
        ("sync of ours without statistics", "normalizes over all ranks at once"),
        ("sparse layer", "'table.weight' has a torch.sparse_coo gradient"),
        ("sparse", "'table.weight' has a torch.sparse_coo gradient"),
        ("gradient in parts", "got its gradient in several parts in one backward"),
        ("shared", "which another wrapper also has"),
        ("buffers", "leave out broadcast_buffers=False"),
        ("ignored parameter", "parameter 'head.bias' is trained but not averaged"),
        ("no backward", "the last slice of a step did not run backward"),
    ],
)
def test_mistake_is_refused_on_every_rank_in_one_line(pools: Pools, mistake: str, words: str) -> None:
    for size in (1, 2):
        for message in pools.run(size, refusal, make_mistake, mistake, size):  # one slice per rank: no accumulation
            assert words in message
            assert "\n" not in message


# -- abandoned steps ---------------------------------------------------------------------------------------------------


class Training:
    """A model and data for two steps."""

    def __init__(self, virtual_ranks: int) -> None:
        torch.manual_seed(3)
        self.module = nn.Sequential(Average(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.model = DistributedDataParallel(self.module, virtual_ranks=virtual_ranks)
        self.data = TensorDataset(torch.randn(32, 8), torch.arange(32) % 4)

    def leave(self, way: str, number: int) -> None:
        """Abandon the first step at slice `number` of the loop."""
        try:
            for count, (x, y) in enumerate(accumulate(self.model, DataLoader(self.data, 16))):
                out = self.model(x)
                if count == number and way == "break":
                    break
                if count == number and way == "exception":
                    raise ArithmeticError("in the loop")
                F.cross_entropy(Trip.apply(out) if count == number else out, y).backward()
        except ArithmeticError:
            pass
        self.model.zero_grad()

    def train(self) -> bytes:
        """Train two steps and return weights and buffers."""
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        for x, y in accumulate(self.model, DataLoader(self.data, 16)):
            F.cross_entropy(self.model(x), y).backward()
            if self.model.do_sync:
                optimizer.step()
                optimizer.zero_grad()
        return bits(self.module)


def train_after_abandoned_step(world: World, virtual_ranks: int, leaves: list[tuple[str, list[int]]]) -> set[Any]:
    """Train after abandoning a step in several ways; return the weights and the names of changed buffers."""
    results: set[Any] = set()
    for way, numbers in leaves:
        training = Training(virtual_ranks)
        module, before = training.module, copy.deepcopy(training.module.state_dict())
        if numbers:
            training.leave(way, numbers[world.rank % len(numbers)])
            if virtual_ranks > world.size:  # otherwise buffers are synchronized when the next step begins
                results |= {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
            plain, batches = copy.deepcopy(module), list(torch.randn(2, 16, 8))
            torch.optim.swa_utils.update_bn(batches, training.model)
            torch.optim.swa_utils.update_bn(batches, plain)
            if not torch.equal(module[2].running_mean, plain[2].running_mean):
                results.add("recomputed statistics")
        module.load_state_dict(before)
        results.add(training.train())
    return results


LAST_OF_FOUR = {1: 3, 2: 1}
"""Index of a rank's last slice by number of ranks, for four virtual ranks."""


@pytest.mark.parametrize("size", [1, 2])
def test_abandoned_step_does_not_affect_later_steps(pools: Pools, size: int) -> None:
    """It used to stay open: later forwards collected statistics for it, and buffers stayed local."""
    leaves: list[tuple[str, list[int]]] = [("", []), ("break", [0]), ("exception", [0]), ("backward", [0])]
    last = LAST_OF_FOUR[size]
    leaves += [("exception", [last]), ("backward", [last]), ("break", [0, last])]
    assert [len(results) for results in pools.run(size, train_after_abandoned_step, 4, leaves)] == [1] * size
    if size == 2:
        leaves = [("", []), ("break", [0]), ("backward", [0])]
        assert [len(results) for results in pools.run(size, train_after_abandoned_step, 2, leaves)] == [1] * size
