"""Virtual ranks and stateful modules: buffers, copies, and changes after wrapping."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import paceline
from models import Average
from paceline.core.world import World
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel, accumulate
from paceline.errors import UsageError
from ranks import Pools, RankFailed
from sliced import bits

SAMPLES, BATCH, COUNT = 2 * 16 + 10, 16, 4


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


def data() -> TensorDataset:
    drawn = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 8, generator=drawn), torch.randint(4, (SAMPLES,), generator=drawn))


def change(kind: str, module: Any, optimizer: torch.optim.Optimizer) -> None:
    """Change the module between two steps."""
    match kind:
        case "thawed":
            module[0].requires_grad_(True)
        case "new layers":
            torch.manual_seed(5)
            module.extend([nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)])
            optimizer.add_param_group({"params": [*module[-3].parameters(), *module[-2].parameters()]})


def train(world: World, kind: str, forwards: int = 1, check: int | None = None) -> bytes:
    """Train and return weights and buffers."""
    module = network(kind)
    model = DistributedDataParallel(module, virtual_ranks=COUNT, check_compute_every=check)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    steps, loader = 0, DataLoader(data(), BATCH, shuffle=True)
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
    ("kind", "forwards"),
    [("buffers", 2), ("spectral", 1), ("thawed", 1), ("new layers", 1)],
)
def test_bits_are_the_same_on_1_2_and_4_ranks(pools: Pools, kind: str, forwards: int) -> None:
    results = [pools.run(size, train, kind, forwards) for size in (1, 2, 4)]
    assert len({weights for of_world in results for weights in of_world}) == 1


@pytest.mark.parametrize("kind", ["buffers", "thawed"])
def test_repeated_slices_do_not_change_the_result(pools: Pools, kind: str) -> None:
    assert pools.run(4, train, kind, 1, 1) == pools.run(1, train, kind) * 4


def buffers_after_a_step(world: World) -> tuple[int, Tensor, Tensor]:
    module = network("buffers")
    model = DistributedDataParallel(module, virtual_ranks=COUNT)
    for x, y in accumulate(model, DataLoader(data(), BATCH)):
        F.cross_entropy(model(x), y).backward()
        if model.do_sync:
            break
    average: Any = module[0]
    return int(average.calls), average.mean, 0.1 * data().tensors[0][: BATCH // COUNT].mean(0)


def test_buffers_are_those_of_the_first_slice(pools: Pools) -> None:
    for size in (1, 4):
        for calls, mean, expected in pools.run(size, buffers_after_a_step):
            assert calls == 1
            torch.testing.assert_close(mean, expected)


def compare_with_whole_batch(world: World) -> float:
    """Thaw a layer before step 2; return the largest difference of its gradients from a plain backward."""
    module = network("thawed").eval()  # BatchNorm would depend on the slices
    model = DistributedDataParallel(module, virtual_ranks=COUNT)
    for x, y in accumulate(model, DataLoader(data(), BATCH)):
        F.cross_entropy(model(x), y).backward()
        if model.do_sync and any(parameter.grad is not None for parameter in module[0].parameters()):
            break
        if model.do_sync:
            model.zero_grad()
            module[0].requires_grad_(True)
    plain = copy.deepcopy(module)
    plain.zero_grad()
    x, y = (tensor[BATCH : 2 * BATCH] for tensor in data().tensors)
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
    for x, y in accumulate(model, DataLoader(data(), 32, drop_last=True)):
        F.cross_entropy(model(x), y).backward()
        after.append(len(graphs))
    return after


def test_compiled_model_with_batch_norm_is_not_recompiled_for_each_slice(pools: Pools) -> None:
    # Recompilation made torch fall back to eager mode at a slice that depends on the number of ranks, changing bits.
    [after] = pools.run(1, compilations)
    assert after == [after[0]] * 16


# -- wrappers and copies --------------------------------------------------------------------------------------------


def updates(module: Any) -> bool:
    """Return whether a plain forward in training mode updates the running statistics."""
    before = module[1].running_mean.clone()
    module.train()(torch.randn(4, 8))
    return not torch.equal(before, module[1].running_mean)


def copies(world: World) -> list[bool]:
    module = network("thawed")
    model = DistributedDataParallel(module, virtual_ranks=COUNT)
    slices = accumulate(model, DataLoader(data(), BATCH))
    x, y = next(slices)
    F.cross_entropy(model(x), y).backward()
    copied, saved = copy.deepcopy(module), io.BytesIO()  # in the middle of a step
    torch.save(module, saved)
    saved.seek(0)
    return [updates(copied), updates(torch.load(saved, weights_only=False)), updates(copy.deepcopy(model).module)]


def test_copies_of_the_module_update_their_own_statistics(pools: Pools) -> None:
    assert pools.run(1, copies) == [[True] * 3]


def wrapped_again(world: World) -> tuple[bool, float]:
    """Wrap a module twice; return whether it is plain afterwards and how its statistics differ from wrapping once."""
    statistics = []
    for times in (1, 2):
        module: Any = network("thawed")
        for _ in range(times):
            model = DistributedDataParallel(module, virtual_ranks=COUNT)
        for x, y in accumulate(model, DataLoader(data(), BATCH, drop_last=True)):
            F.cross_entropy(model(x), y).backward()
            if model.do_sync:
                model.zero_grad()
        statistics.append(module[1].running_mean.clone())
        del model
    return updates(module), float((statistics[0] - statistics[1]).abs().max())


def test_deleted_wrapper_leaves_the_statistics_alone(pools: Pools) -> None:
    assert pools.run(1, wrapped_again) == [(True, 0.0)]


def weighted_in_part(world: World) -> None:
    model = DistributedDataParallel(network("twice"), virtual_ranks=2)
    for number, (x, y) in enumerate(accumulate(model, DataLoader(data(), BATCH))):
        if (number + world.rank) % 2:
            F.cross_entropy(model(x), y).backward()
            continue
        with model.weight(len(y)):
            F.cross_entropy(model(x), y, reduction="sum").backward()


def test_weighting_only_some_slices_is_refused(pools: Pools) -> None:
    for size in (1, 2):
        with pytest.raises(RankFailed, match=r"outside model\.weight\(\)"):
            pools.run(size, weighted_in_part)


# -- refusals -------------------------------------------------------------------------------------------------------


class Rows(nn.Module):
    """A table with sparse gradients; `announces` uses a layer, which makes them visible in advance."""

    def __init__(self, *, announces: bool) -> None:
        super().__init__()
        self.table, self.announces = nn.Embedding(9, 4, sparse=announces), announces

    def forward(self, x: Tensor) -> Tensor:
        index = x.abs().long().clamp(0, 8)
        return (self.table(index) if self.announces else F.embedding(index, self.table.weight, sparse=True)).mean(1)


def refusal(world: World, mistake: str) -> str:
    gc.collect()  # free the refused wrapper of the previous case: a rank that alone has it would wait for the others
    with pytest.raises(UsageError) as refused:
        make_mistake(mistake, virtual_ranks=world.size)  # one slice per rank, without accumulation
    return str(refused.value)


def make_mistake(mistake: str, virtual_ranks: int) -> None:
    if mistake.startswith("sync"):
        kind: Any = paceline.SyncBatchNorm if "ours" in mistake else nn.SyncBatchNorm
        DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), kind(4, track_running_stats=False)), virtual_ranks=4)
    module: Any = Rows(announces="layer" in mistake) if "sparse" in mistake else network("twice")
    if "momentum" in mistake or mistake == "no backward":
        module = network("thawed")
    count = 4 if mistake == "no backward" else virtual_ranks
    if mistake == "ignored parameter":
        module._ddp_params_and_buffers_to_ignore = ["head.bias"]
    if "buffer" in mistake:
        module = network("buffers")
        if "data" in mistake:
            module[0].calls, module[3].calls = None, None  # leaves only the writes through .data
        if "ignored" in mistake:
            module._ddp_params_and_buffers_to_ignore = ["3.mean"]
    broadcast = {"broadcast_buffers": False} if mistake.startswith("buffers") else {}
    model = DistributedDataParallel(module, virtual_ranks=count, bucket_cap_mb=1e-5, **broadcast)
    other = DistributedDataParallel(nn.Sequential(module)) if mistake == "shared" else None
    if "momentum" in mistake:
        module[1].momentum = None
    for x, y in accumulate(model, DataLoader(data(), BATCH)):
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
        ("buffers", "a forward has changed buffer '0.mean', which would differ between ranks"),
        (
            "buffers through .data",
            "buffer '0.mean', which would differ between ranks without a broadcast; leave",
        ),
        ("ignored buffer", "leave its name in _ddp_params_and_buffers_to_ignore out with virtual_ranks"),
        ("ignored parameter", "parameter 'head.bias' is trained but not averaged"),
        ("momentum taken away", "'1' has momentum=None"),
        ("no backward", "the last slice of a step did not run backward"),
    ],
)
def test_mistake_is_refused_on_every_rank_in_one_line(pools: Pools, mistake: str, words: str) -> None:
    for size in (1, 2):
        for message in pools.run(size, refusal, mistake):
            assert words in message
            assert "\n" not in message
