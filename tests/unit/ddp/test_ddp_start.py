"""Construction of the wrapper: refusals, comparison and broadcast of replicas, and release of resources."""

from __future__ import annotations

import copy
import gc
import os
import threading
import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim.optimizer import _global_optimizer_post_hooks

from insides import engine_of, get_known_groups, has_hook, weights_sha256
from paceline import World, unwrap
from paceline.ddp import DistributedDataParallel
from paceline.errors import ReplicaMismatch, UsageError, WorldError
from processes import until
from trainings import digest
from twins import Pools

TINY = 1e-4


class Net(nn.Module):
    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(5, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.last = nn.Linear(hidden, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).tanh())


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, seed: int = 0) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, 5)).sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def error_of(make: Any, *arguments: Any, **options: Any) -> tuple[str, str]:
    """Return the type and message of the error that `make` raises."""
    try:
        make(*arguments, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


# -- equal replicas ----------------------------------------------------------------------------------------------------


def wrap_with(world: World, init_sync: Any, equal: bool) -> tuple[str, str, str, str]:
    torch.manual_seed(0 if equal else world.rank)
    net = Net()
    if not equal:
        net.norm.running_mean.fill_(world.rank)
    before = weights_sha256(net)
    kind, message = error_of(DistributedDataParallel, net, init_sync=init_sync)
    return before, weights_sha256(net), kind, message


def test_init_sync_broadcasts_rank_0s_parameters_and_buffers(pools: Pools) -> None:
    results = pools.run(3, wrap_with, True, False)
    before, after, kinds, _ = zip(*results, strict=True)
    assert len(set(before)) == 3
    assert set(after) == {before[0]}
    assert set(kinds) == {"nothing"}


def test_init_sync_false_changes_nothing(pools: Pools) -> None:
    for before, after, kind, _ in pools.run(2, wrap_with, False, False):
        assert before == after
        assert kind == "nothing"


def test_verify_accepts_equal_replicas_and_names_differences(pools: Pools) -> None:
    assert {kind for _, _, kind, _ in pools.run(2, wrap_with, "verify", True)} == {"nothing"}
    for before, after, kind, message in pools.run(3, wrap_with, "verify", False):
        assert kind == "ReplicaMismatch"
        assert message.startswith("'first.weight' has different values on rank 1 than on rank 0; ")
        assert before == after
    assert issubclass(ReplicaMismatch, ValueError)


class Reordered(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(2)))


def wrap_differing(world: World, kind: str) -> tuple[str, str]:
    differs = world.rank == 1
    net: nn.Module = Net(7 if differs and kind == "shape" else 6)
    if differs and kind == "dtype":
        net.last.double()
    if differs and kind == "missing":
        net.last.register_parameter("bias", None)
    if differs and kind == "extra":
        net.extra = nn.Parameter(torch.zeros(1))
    if differs and kind == "gradient":
        net.first.weight.requires_grad_(False)
    if differs and kind == "strides":
        net.first.weight = nn.Parameter(net.first.weight.detach().t().contiguous().t())
    if differs and kind == "buffer":
        net.register_buffer("more", torch.zeros(1))
    if kind == "order":
        net = Reordered(["b", "a"] if differs else ["a", "b"])
    return error_of(DistributedDataParallel, net)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            "shape",
            "'first.weight' has shape (7, 5), torch.float32 on rank 1 but shape (6, 5), torch.float32 on rank 0",
        ),
        ("dtype", "'last.weight' has shape (3, 6), torch.float64 on rank 1 but shape (3, 6), torch.float32 on rank 0"),
        ("missing", "'last.bias' is in the model of rank 0 but not on rank 1"),
        ("extra", "'extra' is in the model of rank 1 but not on rank 0"),
        ("gradient", "'first.weight' has shape (6, 5), torch.float32, no gradient on rank 1 but shape (6, 5)"),
        ("strides", "'first.weight' has shape (6, 5), torch.float32, strides (1, 6) on rank 1 but shape (6, 5)"),
        ("buffer", "'more' is in the model of rank 1 but not on rank 0"),
        ("order", "parameter 0 is 'b' on rank 1 but 'a' on rank 0, so the order differs"),
    ],
)
def test_different_models_are_refused_on_every_rank(pools: Pools, kind: str, expected: str) -> None:
    for error, message in pools.run(3, wrap_differing, kind):
        assert error == "ReplicaMismatch"
        assert message.startswith(expected)
        assert message.endswith("build the same model on every rank")


# -- arguments ---------------------------------------------------------------------------------------------------------


BOTH_PRECISIONS = {"mixed_precision": _MixedPrecision(reduce_dtype=torch.bfloat16), "reduce_dtype": torch.float32}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"param_to_hook_all_reduce": 1}, "give both"),
    ({"output_device": 0}, "output_device"),
    ({"device_ids": [0]}, "device_ids=[0]"),
    ({"init_sync": "yes"}, "init_sync must be True, False or 'verify', not 'yes'"),
    ({"unused_parameters": "maybe"}, "must be 'allow', 'warn' or 'error', not 'maybe'"),
    *(({"check_replicas_every": value}, "check_replicas_every must be") for value in (0, -1, 1.5, True)),
    ({"mixed_precision": object()}, "_MixedPrecision; for autocast"),
    (BOTH_PRECISIONS, "not to both"),
]


def wrap_with_refused(world: World) -> list[tuple[str, str]]:
    errors = [error_of(DistributedDataParallel, Net(), **options) for options, _ in REFUSED]
    both = {"process_group": torch.distributed.group.WORLD, "device_mesh": object()}
    errors.append(error_of(DistributedDataParallel, Net(), **both))
    errors.append(error_of(DistributedDataParallel, Net().requires_grad_(False)))
    return errors


def test_refused_arguments_explain_why(pools: Pools) -> None:
    expected = [*(message for _, message in REFUSED), "device_mesh", "no parameter that requires a gradient"]
    for errors in pools.run(2, wrap_with_refused):
        for (kind, message), part in zip(errors, expected, strict=True):
            assert kind in ("UsageError", "WrapError")
            assert part in message


def test_missing_process_group_error_names_the_remedy() -> None:
    with pytest.raises(WorldError, match=r"call paceline\.init\(\)"):
        DistributedDataParallel(Net())


def ignored_parameters(world: World) -> tuple[bool, list[float]]:
    torch.manual_seed(world.rank)
    net = Net()
    net._ddp_params_and_buffers_to_ignore = ["first.weight", "norm.running_mean"]
    net.norm.running_mean.fill_(world.rank)
    model = DistributedDataParallel(net, broadcast_buffers=True)
    named = "first.weight" in chain(*model.bucket_layout())
    return named, net.norm.running_mean.tolist()


def test_ignored_parameters_and_buffers_stay_local(pools: Pools) -> None:
    assert pools.run(2, ignored_parameters) == [(False, [0.0] * 6), (False, [1.0] * 6)]


def _csr() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a beta feature
        return torch.eye(3).to_sparse_csr()


def _quantized() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8)


class Packed(Tensor):
    """A tensor without accessible elements, like a quantized weight."""

    @staticmethod
    def __new__(cls) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, (2, 2))

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Packed:
        if function is not torch.ops.aten.detach.default:
            raise NotImplementedError(f"Packed has no {function}")
        return Packed()


UNFIT: dict[str, Callable[[], Tensor]] = {
    "expanded, of dtype torch.float32": lambda: torch.zeros(1, 3).expand(2, 3),
    "of dtype torch.float8_e4m3fn": lambda: torch.zeros(4, dtype=torch.float8_e4m3fn),
    "of dtype torch.bits8": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8),
    "of dtype torch.uint16": lambda: torch.zeros(4, dtype=torch.uint16),
    "a {kind} of dtype torch.float32 and layout torch.sparse_coo on cpu": lambda: torch.eye(3).to_sparse(),
    "a {kind} of dtype torch.float32 and layout torch.sparse_csr on cpu": _csr,
    "a {kind} of dtype torch.qint8 and layout torch.strided on cpu": _quantized,
    "a {kind} of dtype torch.float32 and layout torch.strided on meta": lambda: torch.zeros(2, device="meta"),
    "a Packed of dtype torch.float32 and layout torch.strided on cpu": Packed,
}
COMPARED = ({"init_sync": "verify"}, {"init_sync": False, "check_replicas_every": 1})


def unfit(world: World) -> None:
    for description, make in UNFIT.items():
        comparable = description.startswith(("expanded", "of dtype"))
        sent: list[tuple[bool, dict[str, Any]]] = [(True, {}), (False, {}), (False, {"init_sync": False})]
        for as_parameter, options in (*sent, *((True, {} if comparable else options) for options in COMPARED)):
            net = nn.Linear(1, 1)
            if as_parameter:
                net.odd = nn.Parameter(make(), requires_grad=False)
            else:
                net.register_buffer("odd", make())
            with pytest.raises(UsageError) as caught:
                DistributedDataParallel(net, **options)
            kind = type(net.odd).__name__
            assert str(caught.value).startswith(f"'odd' is {description.format(kind=kind)}"), caught.value


def test_a_tensor_that_cannot_be_broadcast_is_named_with_its_dtype(pools: Pools) -> None:
    """The error came from inside the broadcast and suspected a dead rank; a comparison could even crash."""
    pools.run(2, unfit)


def unfit_but_ignored(world: World) -> None:
    for tensor in (nn.Buffer(torch.zeros(4, dtype=torch.uint16)), nn.Parameter(Packed(), requires_grad=False)):
        net = nn.Linear(5, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net.odd = tensor
        net._ddp_params_and_buffers_to_ignore = ["odd"]
        model = DistributedDataParallel(net, check_replicas_every=1)
        for _ in range(2):
            step(model, optimizer)


def test_a_tensor_that_cannot_be_broadcast_may_be_ignored(pools: Pools) -> None:
    pools.run(2, unfit_but_ignored)


def trained_unfit(world: World) -> None:
    """Name the parameter and its dtype if its gradient cannot be averaged."""
    for tensor in (torch.eye(3).to_sparse(), torch.zeros(4).to(torch.float8_e5m2), Packed()):
        net = nn.Linear(1, 1)
        net.odd = nn.Parameter(tensor)
        kind = "Packed" if isinstance(tensor, Packed) else str(tensor.dtype)
        with pytest.raises(UsageError, match=rf"'odd' is .*{kind}.*, whose gradient cannot be"):
            DistributedDataParallel(net)
    with torch.inference_mode():
        net = nn.Linear(1, 1)
    with pytest.raises(UsageError, match=INFERENCE):
        DistributedDataParallel(net)


INFERENCE = r"'weight' was created under torch\.inference_mode\(\), .* build, load and convert the model outside"


def unfit_later(world: World) -> None:
    """Replace a parameter by an unsupported one after wrapping."""
    net = nn.Linear(5, 1)
    model = DistributedDataParallel(net)
    step(model)
    with torch.inference_mode():
        net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)
    loss = model(torch.ones(4, 5)).sum()
    with pytest.raises(UsageError, match=INFERENCE):
        loss.backward()
    another = DistributedDataParallel(nn.Linear(5, 1))
    step(another)  # works while the other wrapper's loss is alive
    if world.size > 1:
        net = nn.Linear(5, 1)
        model, optimizer = DistributedDataParallel(net, check_replicas_every=1), torch.optim.SGD(net.parameters(), 0.1)
        step(model, optimizer)
        net.base = nn.Parameter(Packed(), requires_grad=False)
        with pytest.raises(UsageError, match=r"'base' is a Packed .* cannot be compared"):
            step(model)


def lazy(world: World) -> None:
    """A lazy layer needs a dummy forward before it is wrapped."""
    for net in (nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)), nn.Sequential(nn.LazyBatchNorm1d(affine=False))):
        with pytest.raises(RuntimeError, match=r"is not initialized, .* run a dummy forward"):
            DistributedDataParallel(net)
    net = nn.Sequential(nn.LazyLinear(3))
    net(torch.ones(1, 2))
    model = DistributedDataParallel(net)
    model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("wrap", [trained_unfit, unfit_later, lazy])
def test_parameters_without_a_possible_average_are_named(
    pools: Pools, size: int, wrap: Callable[[World], None]
) -> None:
    pools.run(size, wrap)


def other_layouts(world: World) -> None:
    model = DistributedDataParallel(Net(), bucket_cap_mb=TINY)
    layout = model.bucket_layout()
    for other in ([], layout[:-1], [*layout, layout[0]], [["nobody"]]):
        model.load_bucket_layout(other)
        assert model.bucket_layout() == layout
    step(model)


def test_a_layout_of_another_model_has_no_effect(pools: Pools) -> None:
    pools.run(2, other_layouts)


def layouts_of_compiled(world: World) -> list[list[str]]:
    plain, compiled = DistributedDataParallel(Net()), DistributedDataParallel(torch.compile(Net(), backend="eager"))
    compiled.load_state_dict(plain.module.state_dict())
    compiled.load_state_dict(compiled.state_dict())
    return [sorted(chain(*model.bucket_layout())) for model in (plain, compiled)]


def test_compiled_module_keeps_the_original_parameter_names(pools: Pools) -> None:
    for plain, compiled in pools.run(2, layouts_of_compiled):
        assert plain == compiled


# -- state dicts -------------------------------------------------------------------------------------------------------


class Nested(nn.Module):
    """A model with a submodule named `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def loading(world: World) -> None:
    model = DistributedDataParallel(Net())
    bare = {key: value.clone() + 1 for key, value in unwrap(model).state_dict().items()}
    assert list(model.state_dict()) == [f"module.{key}" for key in bare]
    for state in (bare, {f"module.{key}": value + 1 for key, value in bare.items()}):
        model.load_state_dict(state)
        for loaded, given in zip(model.state_dict().values(), state.values(), strict=True):
            assert torch.equal(loaded, given)
    outer = nn.ModuleDict({"net": model})
    outer.load_state_dict({f"net.{key}": value for key, value in bare.items()})
    outer.load_state_dict({f"net.module.{key}": value for key, value in bare.items()})
    result = model.load_state_dict({"first.weight": bare["first.weight"], "more": bare["last.bias"]}, strict=False)
    assert "module.last.bias" in result.missing_keys
    assert result.unexpected_keys == ["more"]
    nested = DistributedDataParallel(Nested())
    assert list(nested.state_dict()) == ["module.module.weight", "module.module.bias"]
    nested.load_state_dict(nested.state_dict())
    nested.load_state_dict(unwrap(nested).state_dict())


def test_state_dict_has_the_module_prefix_and_loads_with_or_without_it(pools: Pools) -> None:
    pools.run(2, loading)


def through_dcp(world: World) -> None:
    torch.manual_seed(0)
    ours = DistributedDataParallel(Net())
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(unwrap(ours)))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (ours, theirs)]
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        # Before the first step, Distributed Checkpoint sets zero gradients and steps with a learning rate of 0.
        assert len(get_optimizer_state_dict(model, optimizer)["state"]) == 6
        for seed in range(2):
            step(model, optimizer, seed)
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True, cpu_offload=True)):
        mine, reference = get_model_state_dict(ours, options=options), get_model_state_dict(theirs, options=options)
        assert digest(mine) == digest(reference)
        if mine:  # full state dicts exist on rank 0 alone
            assert next(iter(mine)) == "first.weight"
        mine, reference = (
            get_state_dict(model, optimizer, options=options)
            for model, optimizer in zip((ours, theirs), optimizers, strict=True)
        )
        assert digest(mine) == digest(reference)
    saved, saved_optimizer = copy.deepcopy(get_state_dict(ours, optimizers[0]))
    weights = weights_sha256(ours)
    step(ours, optimizers[0], 5)
    assert weights_sha256(ours) != weights
    set_state_dict(ours, optimizers[0], model_state_dict=copy.copy(saved), optim_state_dict=saved_optimizer)
    assert weights_sha256(ours) == weights
    assert digest(get_state_dict(ours, optimizers[0])[1]) == digest(saved_optimizer)
    step(ours, optimizers[0], 5)
    set_model_state_dict(ours, saved)
    assert weights_sha256(ours) == weights


def test_distributed_state_dicts_match_torch_ddp_and_round_trip(pools: Pools) -> None:
    pools.run(2, through_dcp)


# -- a single rank, and deletion ---------------------------------------------------------------------------------------


@pytest.mark.ranks(1)
def test_single_rank_has_no_hooks_or_buckets_but_supports_weights() -> None:
    net = Net()
    groups = len(get_known_groups())
    model = DistributedDataParallel(net)
    assert len(get_known_groups()) == groups
    assert not any(has_hook(parameter) for parameter in net.parameters())
    assert model.bucket_layout() == []
    assert model.gradient_bytes_per_step == 0
    step(model)
    expected = [parameter.grad.clone() for parameter in net.parameters()]
    model.zero_grad()
    step(net)
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    model.zero_grad()
    net.double()  # normalizing two rows may magnify rounding errors a hundred times
    x = torch.randn(6, 5, dtype=torch.float64)
    for part in (x[:2], x[2:]):
        last = len(part) == 4
        model.require_backward_grad_sync = last
        with model.weight(len(part)):
            model.eval().module(part)
            model.train()(part).sum().backward()
    weighted = [parameter.grad.clone() for parameter in net.parameters()]
    model.zero_grad()
    (sum(net(part).sum() for part in (x[:2], x[2:])) / 6).backward()
    for parameter, gradient in zip(net.parameters(), weighted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-9)
    model.zero_grad()
    model.sync_gradients()
    assert all(parameter.grad is None for parameter in net.parameters())


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.ranks(2)
def test_deleted_wrapper_releases_hooks_descriptors_and_threads(world: World) -> None:
    net = Net()
    descriptors, threads, guards = [], [], []
    for round_ in range(8):
        model = DistributedDataParallel(net, bucket_cap_mb=TINY)
        step(model)
        step(model)
        assert any(has_hook(parameter) for parameter in net.parameters())
        guards.append(len(_global_optimizer_post_hooks))
        del model
        assert not any(has_hook(parameter) for parameter in net.parameters())
        world.barrier()
        if round_ % 2:
            gc.collect()
            descriptors.append(len(os.listdir("/proc/self/fd")))
            until(lambda: not threads or tasks() <= threads[0])  # threads of a group end asynchronously
            threads.append(tasks())
    assert set(guards) == {guards[0]}  # one per process for any number of wrappers
    assert threading.active_count() < 5
    net.zero_grad()
    step(net)  # the bare module still trains
    assert max(descriptors[1:]) <= descriptors[0]


def refuse_repeatedly(world: World) -> None:
    descriptors = []
    for _ in range(4):
        kind, _ = error_of(DistributedDataParallel, Net() if world.rank == 0 else nn.Linear(1, 1))
        assert kind == "ReplicaMismatch"
        gc.collect()
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert max(descriptors) == descriptors[0]


def test_refused_wrapper_leaks_no_file_descriptors(pools: Pools) -> None:
    pools.run(2, refuse_repeatedly)


def failed_engine() -> Any:
    """Fail in a backward and drop the wrapper; return its engine, which a kept exception may reference."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30)), bucket_cap_mb=TINY)
    model.module[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 30)).sum().backward()
    return engine_of(model)


@pytest.mark.ranks(2)
def test_other_wrappers_do_not_settle_a_deleted_one() -> None:
    """Its group is destroyed, so no rank can wait for the unfinished collectives of its last backward."""
    kept = failed_engine()
    gc.collect()
    model = DistributedDataParallel(nn.Linear(3, 3))
    for _ in range(2):
        with model.weight(3):
            model(torch.ones(2, 3)).sum().backward()
        assert model.module.weight.grad is not None
        assert torch.equal(model.module.weight.grad, torch.full((3, 3), 2 / 3))
        model.zero_grad()
    del kept
