"""SyncBatchNorm on several ranks equals BatchNorm in one process on the whole batch."""

from __future__ import annotations

import copy
import inspect
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drawn import draws
from insides import sync_batch_norm
from paceline import SyncBatchNorm, World
from paceline.errors import ReplicaMismatch, UsageError
from twins import Pools, no_warning_about_cycles, norm_beside_twin, whole_batch

SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "1d, features": ((3, 3), (4,)),
    "3d": ((1, 2), (2, 3, 2, 2)),
    "one sample in all, with space": ((1, 0), (2, 3, 3)),
    "uneven": ((1, 5, 2), (3, 2, 2)),
    "empty first": ((0, 3, 2), (3, 2, 2)),
    "all empty": ((0, 0), (3, 2)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no affine": {"affine": False},
    "no running statistics": {"track_running_stats": False},
    "cumulative": {"momentum": None},
    "no momentum": {"momentum": 0.0},
    "large eps": {"eps": 0.5, "momentum": 0.9},
}
if "bias" in inspect.signature(nn.BatchNorm1d).parameters:  # not in torch 2.11
    OPTIONS["no bias"] = {"bias": False}


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_batch_norm_of_the_whole_batch(pools: Pools, shape: str) -> None:
    sizes, rest = SHAPES[shape]
    results = pools.run(len(sizes), norm_beside_twin, sizes, rest, {})
    assert len({tuple(bits) for bits in results}) == 1


def test_equals_batch_norm_with_every_option(pools: Pools) -> None:
    for options in OPTIONS.values():
        results = pools.run(2, norm_beside_twin, (2, 3), (3, 4), options)
        assert len({tuple(bits) for bits in results}) == 1, options


@pytest.mark.parametrize(
    ("dtype", "options", "rtol"),
    [
        (torch.float32, {}, 2e-5),
        (torch.bfloat16, {}, 2e-2),
        (torch.float16, {}, 3e-3),
        (torch.bfloat16, {"dtype": torch.bfloat16}, 3e-2),
        (torch.float16, {"dtype": torch.float16}, 5e-3),
    ],
)
def test_types_follow_batch_norm(pools: Pools, dtype: torch.dtype, options: dict[str, Any], rtol: float) -> None:
    pools.run(2, norm_beside_twin, (4, 5), (3, 4, 4), options, False, dtype, rtol)


def test_a_mean_far_from_zero_costs_no_precision(pools: Pools) -> None:
    """E[x²] - E[x]² would lose all digits in float32, because the squared mean is 1e8 times the variance."""
    results = pools.run(2, variance_beside_mean)
    for variance, exact in results:
        torch.testing.assert_close(variance, exact, rtol=1e-3, atol=0)


def variance_beside_mean(world: World) -> tuple[Tensor, Tensor]:
    x = (whole_batch((40, 24), (3,), torch.float64) + 1e4).float()
    layer = SyncBatchNorm(3, momentum=1.0)
    layer(x.split((40, 24))[world.rank])
    return layer.running_var, x.double().var(0).float()


@draws(25)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=2, max_size=2).map(tuple),
    rest=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    options=st.sampled_from(list(OPTIONS)),
    last=st.booleans(),
)
def test_any_shape(pools: Pools, sizes: tuple[int, ...], rest: tuple[int, ...], options: str, last: bool) -> None:
    values = sum(sizes) * torch.Size(rest[1:]).numel()
    if values != 1:
        pools.run(2, norm_beside_twin, sizes, rest, OPTIONS[options], last and len(rest) > 2)


def test_counts_are_exact_in_float32() -> None:
    for count in (1, 2**20 - 1, 2**20, 2**24 + 1, 2**40 + 12345):
        message = torch.zeros(1, sync_batch_norm.HEAD + 2)
        message[0, :2] = torch.tensor([count // sync_batch_norm.PART, count % sync_batch_norm.PART])
        assert sync_batch_norm.reports(message)[0].count == count


# -- double backward, checkpointing, and no communication --------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5, dtype=torch.float64), nn.Linear(5, 2, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(5, dtype=torch.float64)

    def middle(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)).tanh()

    def forward(self, x: Tensor, how: str = "plain") -> Tensor:
        if how == "plain":
            return self.last(self.middle(x))
        return self.last(checkpoint(self.middle, x, use_reentrant=how == "reentrant"))


def net_and_twin() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    twin = Net()
    return SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(twin)), twin


def expect_summed_gradients(net: nn.Module, twin: nn.Module) -> None:
    for (name, parameter), other in zip(net.named_parameters(), twin.named_parameters(), strict=True):
        total = parameter.grad.clone()
        dist.all_reduce(total)
        # The gradient of a bias before a normalization consists of rounding errors.
        torch.testing.assert_close(total, other[1].grad, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
    for mine, other in zip(net.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, other)


def gradient_penalty(world: World, sizes: tuple[int, ...]) -> None:
    net, twin = net_and_twin()
    x = whole_batch(sizes, (4,), torch.float64)
    with no_warning_about_cycles():
        for model, part in ((net, x.split(sizes)[world.rank].clone()), (twin, x.clone())):
            part.requires_grad_()
            out = model(part)
            (slope,) = torch.autograd.grad((out**2).sum(), part, create_graph=True)
            ((slope**2).sum() + out.sum()).backward()
    expect_summed_gradients(net, twin)


@pytest.mark.parametrize("sizes", [(3, 4), (5, 0)])
def test_a_gradient_penalty_equals_one_process(pools: Pools, sizes: tuple[int, ...]) -> None:
    pools.run(2, gradient_penalty, sizes)


def checkpointed(world: World, how: str) -> None:
    net, twin = net_and_twin()
    x = whole_batch((3, 2), (4,), torch.float64)
    for model, part in ((net, x.split((3, 2))[world.rank].clone()), (twin, x.clone())):
        model(part.requires_grad_(), how).square().sum().backward()
    assert int(net.norm.num_batches_tracked) == 2
    expect_summed_gradients(net, twin)


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_a_recomputed_forward_updates_statistics_twice_as_in_torch(pools: Pools, how: str) -> None:
    pools.run(2, checkpointed, how)


def silent(world: World) -> None:
    net, twin = net_and_twin()
    x = whole_batch((6,), (4,), torch.float64)
    if world.rank == 0:  # only on this rank, so any communication would hang
        for mode in (nullcontext(), torch.no_grad()):
            with mode:
                torch.testing.assert_close(net.eval()(x), twin.eval()(x))
    group = dist.new_group([0], use_local_synchronization=True) if world.rank == 0 else None
    if group is not None:
        alone = SyncBatchNorm.convert_sync_batchnorm(twin, group).train()
        alone(x)
        assert int(alone.norm.num_batches_tracked) == 1


def test_eval_mode_and_single_rank_groups_do_not_communicate(pools: Pools) -> None:
    pools.run(2, silent)


def test_without_a_process_group_it_is_batch_norm() -> None:
    net, twin = net_and_twin()
    x = whole_batch((6,), (4,), torch.float64)
    torch.testing.assert_close(net(x), twin(x), rtol=0, atol=0)
    torch.testing.assert_close(net.norm.running_var, twin.norm.running_var, rtol=0, atol=0)


def compiled(world: World) -> None:
    net, twin = net_and_twin()
    x = whole_batch((3, 2), (4,), torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from torch.compile
        out = torch.compile(net, backend="eager")(x.split((3, 2))[world.rank])
    out.square().sum().backward()
    twin(x).square().sum().backward()
    expect_summed_gradients(net, twin)


@pytest.mark.slow
def test_inside_a_compiled_model_it_equals_one_process(pools: Pools) -> None:
    pools.run(2, compiled)


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused(world: World, shapes: list[tuple[int, ...]]) -> str:
    layer = SyncBatchNorm(3)
    with pytest.raises(UsageError) as caught:
        layer(torch.randn(*shapes[world.rank]))
    layer(torch.randn(2, 3))  # ranks are still in step
    assert int(layer.num_batches_tracked) == 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([(2, 3), (2, 4)], "channels on rank 1"),
        ([(2, 3, 2), (3,)], "1 dimensions with 0 channels on rank 1"),
        ([(2, 3, 2), (2, 3)], "3 dimensions on rank 0 but of 2 on rank 1"),
        ([(0, 3), (1, 3)], "one value per channel on all 2 ranks"),
    ],
)
def test_mismatched_inputs_are_refused_on_every_rank(pools: Pools, shapes: Any, words: str) -> None:
    first, second = pools.run(2, refused, shapes)
    assert first == second
    assert words in first


def wrong_weight(world: World) -> str:
    with pytest.raises(UsageError) as caught:
        SyncBatchNorm(3, dtype=torch.float64)(torch.randn(2, 3))
    return str(caught.value)


def test_a_weight_of_a_different_dtype_is_refused(pools: Pools) -> None:
    for rank, message in enumerate(pools.run(2, wrong_weight)):
        assert message.startswith(
            f"rank {rank}: SyncBatchNorm got a torch.float32 input but its weight is torch.float64"
        )


def other_layer(world: World, layers: list[int], dtypes: list[torch.dtype]) -> str:
    features, dtype = layers[world.rank], dtypes[world.rank]
    with pytest.raises(ReplicaMismatch) as caught:
        SyncBatchNorm(features, dtype=dtype)(torch.randn(2, features, dtype=dtype))
    return str(caught.value)


def test_different_layers_are_named_before_the_first_forward(pools: Pools, gloo: Pools) -> None:
    """Gloo would abort the process if sizes differ."""
    single, double = torch.float32, torch.float64
    for world in (pools, gloo):
        for message in world.run(2, other_layer, [3, 4], [single] * 2):
            assert message.startswith("a SyncBatchNorm has 3 channels on rank 0 but 4 on rank 1")
        for message in world.run(2, other_layer, [3, 3], [single, double]):
            assert message.startswith(
                "a SyncBatchNorm's statistics are torch.float32 on rank 0 but torch.float64 on rank 1"
            )


# -- conversion --------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, momentum=0.3)
        self.again = self.norm
        self.others = nn.ModuleList([nn.BatchNorm1d(2, affine=False), nn.SyncBatchNorm(4), nn.LayerNorm(2)])
        self.nested = nn.Sequential(nn.Linear(2, 2), self.norm)
        self.nothing = None
        self.register_module("none", None)


def test_conversion_only_changes_the_class() -> None:
    model = Shared()
    model.norm.eval()
    model.norm.qconfig = "kept"
    seen: list[str] = []
    model.norm.register_forward_hook(lambda *_: seen.append("hook"))
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = list(model.state_dict())
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert list(converted.state_dict()) == names
    after = {**dict(converted.named_parameters()), **dict(converted.named_buffers())}
    assert all(after[name] is tensor for name, tensor in before.items())
    norms = [type(module) for module in converted.modules() if isinstance(module, nn.SyncBatchNorm)]
    assert norms == [SyncBatchNorm] * 3
    assert converted.norm is converted.again is converted.nested[1]
    assert (converted.norm.momentum, converted.norm.training, converted.norm.qconfig) == (0.3, False, "kept")
    assert converted.others[0].training
    converted.norm(torch.randn(2, 3, 2, 2))
    assert seen == ["hook"]
    assert "momentum=0.3" in repr(converted.norm)
