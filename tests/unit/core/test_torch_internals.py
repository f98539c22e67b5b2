"""Contracts with torch: every private name that Paceline relies on exists and behaves as expected.

Each test is named after its private name in torch, so a release that changes one fails by that name. The names are
collected from the sources; only ``paceline.core.torch_internals`` may use them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import re
import signal
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.optim import SGD
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, LambdaLR, SequentialLR
from torch.utils.data import DataLoader, get_worker_info

import paceline
from insides import MEAN, GradBucket, torch_distributed, torch_elastic, torch_internals
from paceline import World
from paceline.errors import MissingExtra
from ranks import run_ranks

SOURCES = Path(paceline.__file__).parent
TIMEOUT = timedelta(seconds=30)
CONTRACTS: dict[str, Callable[[], None]] = {}
"""Contracts by name in torch; object members are written as ``Class._member``."""


def contract(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(check: Callable[[], None]) -> Callable[[], None]:
        once = cache(check)  # a check of several names runs once and passes or fails for all of them
        for name in names:
            assert name not in CONTRACTS
            CONTRACTS[name] = once
        return check

    return register


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """A process group of a single process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    yield
    dist.destroy_process_group()


def in_hook(backward: Callable[[torch.Tensor], None], ask: Callable[[Any], object]) -> list[object]:
    """Return the results of `ask` for a parameter's node, called from the parameter's hook inside `backward`."""
    parameter = nn.Parameter(torch.ones(2))
    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    answers: list[object] = []
    parameter.register_hook(lambda _: answers.append(ask(node)))
    backward(parameter)
    return answers


def backward(parameter: torch.Tensor) -> None:
    parameter.sum().backward()


# -- autograd ----------------------------------------------------------------------------------------------------------


@contract("torch._C._current_graph_task_id")
def _() -> None:
    (first,), (second,) = (in_hook(backward, lambda _: torch_internals.current_task()) for _attempt in range(2))
    assert torch_internals.current_task() == -1
    assert 0 <= cast("int", first) < cast("int", second)


@contract("torch.autograd.graph._engine_run_backward")
def _() -> None:
    counts: list[int] = []

    @torch.enable_grad()
    def nested(_: torch.Tensor) -> None:
        parameter = nn.Parameter(torch.ones(1))
        parameter.register_hook(lambda _: counts.append(torch_internals.count_running_calls()))
        counts.append(torch_internals.count_running_calls())
        torch.autograd.grad(parameter.exp(), parameter)
        parameter.exp().backward()

    outer = nn.Parameter(torch.ones(1))
    outer.register_hook(nested)
    outer.exp().backward()
    assert counts == [1, 2, 2]
    assert torch_internals.count_running_calls() == 0


@contract("torch._C._set_grad_enabled")
def _() -> None:
    for before in (True, False):
        with torch.set_grad_enabled(before):
            torch_internals.set_grad_enabled(False)
            assert not torch.is_grad_enabled()
            torch_internals.set_grad_enabled(before)
            assert torch.is_grad_enabled() is before


@contract("torch._C._will_engine_execute_node")
def _() -> None:
    assert in_hook(backward, torch._C._will_engine_execute_node) == [True]
    other = nn.Parameter(torch.ones(1))
    elsewhere: Any = other.expand_as(other).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert in_hook(backward, lambda _: torch._C._will_engine_execute_node(elsewhere)) == [False]


@contract("torch.autograd.Variable._execution_engine.is_checkpoint_valid")
def _() -> None:
    assert in_hook(backward, lambda _: torch_internals.is_plain_backward()) == [True]
    limited = lambda parameter: torch.autograd.backward(parameter.sum(), inputs=[parameter])  # noqa: E731
    assert in_hook(limited, lambda _: torch_internals.is_plain_backward()) == [False]


@contract("torch.autograd.Variable._execution_engine.queue_callback")
def _() -> None:
    order: list[str] = []
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    for parameter in (first, second):
        parameter.register_hook(lambda _: order.append("hook"))
    first.register_hook(lambda _: torch_internals.queue_callback(lambda: order.append("end")))
    (first * second).sum().backward()
    assert order == ["hook", "hook", "end"]


@contract("torch.autograd.profiler._is_profiler_enabled")
def _() -> None:
    assert not torch_internals.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_internals.is_profiling()


@contract("torch.autograd.profiler.profile._prepare_trace")
def _() -> None:
    begun: list[int] = []
    with torch_internals.before_profiling(lambda: begun.append(1)):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            assert begun == [1]
        with torch.autograd.profiler.profile():
            assert begun == [1, 1]


@contract("Node._saved_reduction")
def _() -> None:
    values = torch.ones(2, requires_grad=True)
    mean, total = (nn.functional.mse_loss(values, torch.zeros(2), reduction=kind) for kind in ("mean", "sum"))
    assert cast("Any", mean.grad_fn)._saved_reduction == MEAN != cast("Any", total.grad_fn)._saved_reduction


@contract("Node._saved_self_sym_sizes")
def _() -> None:
    assert tuple(cast("Any", torch.ones(3, 2, requires_grad=True).mean().grad_fn)._saved_self_sym_sizes) == (3, 2)


@contract("torch._subclasses.fake_tensor.FakeTensorMode")
def _() -> None:
    with torch_internals.without_memory():
        weight = torch.empty(2**50, requires_grad=True)
        product = weight * torch.ones(2**50)
        assert product.untyped_storage().nbytes() == 2**52
        assert (product.device.type, product.requires_grad) == ("cpu", True)
        assert torch.empty_like(torch.empty(3, device="meta"), device="cpu").shape == (3,)


# -- tensors -----------------------------------------------------------------------------------------------------------


@contract("torch._C._storage_Use_Count", "UntypedStorage._cdata")
def _() -> None:
    tensor = torch.zeros(4)
    alone = torch_internals.count_uses(tensor.untyped_storage())
    views = [tensor[:2], tensor.detach()]
    assert torch_internals.count_uses(tensor.untyped_storage()) == alone + len(views)
    views.clear()
    assert torch_internals.count_uses(tensor.untyped_storage()) == alone


@contract("torch._debug_has_internal_overlap")
def _() -> None:
    assert torch_internals.has_overlap(torch.ones(1).expand(3))
    assert not torch_internals.has_overlap(torch.ones(3))


@contract(
    "torch._foreach_add_",
    "torch._foreach_copy_",
    "torch._foreach_lerp_",
    "torch._foreach_mul_",
    "torch._foreach_norm",
    "torch._foreach_zero_",
)
def _() -> None:
    targets = [torch.zeros(2), torch.zeros(1, dtype=torch.float64)]
    others = [torch.ones(2), torch.full((1,), 3.0)]
    expected: list[tuple[Callable[[], object], list[list[float]]]] = [
        (lambda: torch_internals.copy_each(targets, others), [[1, 1], [3]]),
        (lambda: torch_internals.multiply_each(targets, 0.5), [[0.5, 0.5], [1.5]]),
        (lambda: torch_internals.zero_each(targets[:1]), [[0, 0], [1.5]]),
        (lambda: torch_internals.add_each(targets[:1], others[:1]), [[1, 1], [1.5]]),
        (lambda: torch_internals.mix_each(targets[:1], [torch.zeros(2)], 0.25), [[0.75, 0.75], [1.5]]),
    ]
    for change, values in expected:
        change()
        assert [target.tolist() for target in targets] == values
    norms = torch_internals.norm_each([torch.tensor([-3.0, 2.0]), torch.tensor([1.0, float("nan")])])
    assert norms[0].item() == 3
    assert norms[1].isnan()


@contract(
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
)
def _() -> None:
    with torch_internals.without_memory():
        x = torch.ones(2)
        for read in (lambda: x[0].item(), lambda: x.nonzero()):
            with pytest.raises(torch_internals.NEEDS_VALUES):
                read()


@contract("torch.utils._python_dispatch.TorchDispatchMode")
def _() -> None:
    seen = []

    class Names(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(operator))
            return operator(*args, **(kwargs or {}))

    with Names():
        torch.ones(2) + 1
    assert seen == ["aten.ones.default", "aten.add.Tensor"]


@contract("torch.utils._pytree.tree_leaves", "torch.utils._pytree.tree_map")
def _() -> None:
    assert torch_internals.tree_leaves(((1, [2]), {"a": 3})) == [1, 2, 3]
    one, two = {"a": [1], "b": 2}, {"b": 3, "a": [4]}
    is_list = lambda value: isinstance(value, list)  # noqa: E731
    joined = torch_internals.tree_map(lambda one, two: one + two, one, two, is_leaf=is_list)
    assert joined == {"a": [1, 4], "b": 5}


@contract("Module._replicate_for_data_parallel")
def _() -> None:
    layer = nn.LSTM(2, 3)
    replica = torch_distributed.bare_replica(layer)
    assert not replica._parameters
    assert replica._buffers is not layer._buffers
    stand_in = layer.weight_ih_l0.clone()
    torch_distributed.set_tensor(replica, "weight_ih_l0", stand_in)
    torch_distributed.set_tensor(replica, "none", None)
    assert replica.weight_ih_l0 is cast(Any, replica)._flat_weights[0] is stand_in
    assert layer._flat_weights[0] is layer.weight_ih_l0


@contract("Module._non_persistent_buffers_set")
def _() -> None:
    module = nn.Module()
    module.register_buffer("cache", None, persistent=False)
    module.register_buffer("saved", None)
    assert module._non_persistent_buffers_set == {"cache"}


@contract("Tensor._nnz")
def _() -> None:
    assert cast("Any", torch.eye(3).to_sparse())._nnz() == 3


# -- DTensor -----------------------------------------------------------------------------------------------------------


@contract("DTensor._local_tensor", "DTensor._spec")
def _() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    local = torch.arange(2.0)
    sharded = DTensor.from_local(local, init_device_mesh("cpu", (1,)), [Shard(0)])
    assert torch_distributed.is_sharded(sharded)
    assert torch_distributed.local_of(sharded).data_ptr() == local.data_ptr()
    again = DTensor(local, sharded._spec, requires_grad=False)
    assert again.placements == sharded.placements


# -- torch.compile -----------------------------------------------------------------------------------------------------


def copy_of(function: Any) -> Any:
    """Return a copy with a new code object, because marks and compiled graphs are stored per code object."""
    return FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)


def is_compiled(mark: Callable[[Any], Any]) -> bool:
    """Whether torch.compile takes a function marked by `mark` into the graph of its caller."""
    seen: list[bool] = []

    def inner(values: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return values + 1

    marked = mark(copy_of(inner))
    outer: Any = torch.compile(copy_of(lambda values: marked(values * 2) * 3), backend="eager")
    assert outer(torch.ones(1)).item() == 9
    return seen[-1]


@contract(
    "torch._C._dynamo.eval_frame._FrameAction",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "function._torchdynamo_disable",
    "function._torchdynamo_disable_msg",
)
def _() -> None:
    assert is_compiled(lambda function: function)
    assert not is_compiled(torch_internals.never_compiled)
    assert not is_compiled(torch_internals.compiled_below)


@contract("torch._compile._disable_dynamo")
def _() -> None:
    assert not is_compiled(torch_internals.leaves_graph)


@contract("torch._dynamo.eval_frame.OptimizedModule", "OptimizedModule._orig_mod")
def _() -> None:
    module = nn.Linear(1, 1)
    compiled = torch.compile(module, backend="eager")
    assert torch_internals.original_of(cast("nn.Module", compiled)) is module
    assert torch_internals.original_of(module) is None
    assert list(cast("nn.Module", compiled).state_dict()) == ["_orig_mod.weight", "_orig_mod.bias"]


@contract("torch._dynamo.compiled_autograd.in_compiled_autograd_region")
def _() -> None:
    assert importlib.import_module("torch._dynamo.compiled_autograd").in_compiled_autograd_region is False


@contract("torch.nn.parallel.DistributedDataParallel._get_active_ddp_module")
def _() -> None:
    active: list[object] = []

    class Looks(nn.Module):
        def forward(self) -> None:
            active.append(nn.parallel.DistributedDataParallel._get_active_ddp_module())

    wrapper: Any = object()
    torch_internals.call_module(wrapper, Looks(), (), {})
    torch_internals.call_module(None, Looks(), (), {})
    assert active == [wrapper, None]
    convert_frame = importlib.import_module("torch._dynamo.convert_frame")
    assert "DistributedDataParallel._get_active_ddp_module()" in inspect.getsource(convert_frame)


# -- process groups and stores -----------------------------------------------------------------------------------------


@contract("torch.distributed.distributed_c10d._get_default_group")
def _() -> None:
    assert torch_distributed.get_default_group() is dist.group.WORLD


@contract("torch.distributed.distributed_c10d._get_default_store")
def _() -> None:
    torch_distributed.get_default_store().set("contract", "kept")
    assert torch_distributed.get_default_store().get("contract") == b"kept"


@contract("torch.distributed.distributed_c10d._exception_logger")
def _() -> None:
    imported_earlier: Any = dist.barrier
    cell = torch_distributed.cell_of("barrier")
    assert cell is not None
    original, cell.cell_contents = cell.cell_contents, lambda: "replaced"
    try:
        assert imported_earlier() == "replaced"
    finally:
        cell.cell_contents = original
    assert torch_distributed.cell_of("monitored_barrier") is None


@contract(
    "torch.distributed.distributed_c10d._new_process_group_helper",
    "torch.distributed.distributed_c10d._world.pg_map",
    "torch.distributed.distributed_c10d._world.pg_names",
    "torch.distributed.distributed_c10d._world.pg_backend_config",
    "torch.distributed.distributed_c10d._world.tags_to_pg",
    "torch.distributed.distributed_c10d._world.pg_to_tag",
    "torch._C._distributed_c10d._unregister_process_group",
)
def _() -> None:
    group = torch_distributed.get_default_group()
    backend, store = torch_distributed.get_known_groups()[group]
    assert backend == "gloo"
    world: Any = dist.distributed_c10d._world
    for _attempt in range(2):  # the second time, the name is free again
        before = list(map(len, tables(world)))
        opened = torch_distributed.open_group(group, [0], "gloo", store, "contract/own", TIMEOUT)
        assert opened in torch_distributed.get_known_groups()
        torch_distributed.forget_group(opened, "contract/own")
        assert list(map(len, tables(world))) == before
        assert all(opened not in table for table in tables(world))
        tensor = torch.ones(2)
        opened.allreduce([tensor]).wait()  # the group still works
        with pytest.raises(RuntimeError, match="contract/own"):
            torch._C._distributed_c10d._resolve_process_group("contract/own")  # type: ignore[arg-type]


def tables(world: Any) -> list[Any]:
    tagged = [group for groups in world.tags_to_pg.values() for group in groups]
    return [world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag, tagged]


@contract("torch._C._distributed_c10d._broadcast_coalesced")
def _() -> None:
    several = [torch.ones(2), torch.ones(1, dtype=torch.int64)]
    torch_distributed.broadcast_coalesced(torch_distributed.get_default_group(), several, 2**20, 0)
    assert [tensor.tolist() for tensor in several] == [[1, 1], [1]]


def abort_everything(_: World) -> int:
    group, store = torch_distributed.get_default_group(), torch_distributed.get_default_store()
    own = torch_distributed.open_group(group, [0], "gloo", store, "contract/abort", TIMEOUT)
    torch_distributed.forget_group(own, "contract/abort")
    dist.all_reduce(torch.ones(1), async_op=True)
    own.abort()
    torch_distributed.abort_known_groups()
    return len(torch_distributed.get_known_groups()) + dist.is_initialized()


@contract("torch.distributed.distributed_c10d._abort_process_group")
def _() -> None:
    assert run_ranks(1, abort_everything, backend="gloo") == [0]


@contract("ProcessGroup._set_group_name", "ProcessGroup._set_group_desc")
def _() -> None:
    group: Any = dist.ProcessGroup(dist.HashStore(), 0, 1)
    assert torch_distributed.nccl_of(group) is None
    assert group.bound_device_id is None
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, TIMEOUT)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_group_name("contract/bare")
    assert group.group_name == "contract/bare"
    assert torch_distributed.nccl_of(group) is None
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()


@contract(
    "ProcessGroupNCCL._group_start",
    "ProcessGroupNCCL._group_end",
    "ProcessGroupNCCL._is_initialized",
    "ProcessGroupNCCL._set_sequence_number_for_group",
    "Options._timeout",
)
def _() -> None:
    """Only names can be checked, because this backend needs a GPU."""
    if not dist.is_nccl_available():
        return
    backend: Any = dist.ProcessGroupNCCL
    for name in ("_group_start", "_group_end", "_is_initialized", "_set_sequence_number_for_group"):
        assert callable(getattr(backend, name))
    for name in ("eager_connect_single_device", "supports_splitting", "shutdown", "abort"):
        assert hasattr(backend, name)
    options: Any = backend.Options()
    for name in ("_timeout", "split_from", "split_color", "global_ranks_in_group", "group_name"):
        assert hasattr(options, name)


@contract("torch._C._distributed_c10d.AllgatherOptions")
def _() -> None:
    assert hasattr(torch_distributed.AllgatherOptions(), "asyncOp")


@contract("Store._underlying_non_prefix_store")
def _() -> None:
    inner = dist.HashStore()
    outer = cast("Any", dist.PrefixStore("a/", dist.PrefixStore("b/", inner)))
    outer.set("key", "value")
    assert inner.num_keys() == 1
    base: Any = outer._underlying_non_prefix_store
    assert isinstance(base, dist.HashStore)
    base.set("found", "value")
    assert inner.check(["found"])


@contract(
    "ProcessGroup._register_backend",
    "ProcessGroup._set_default_backend",
    "ProcessGroup._get_backend",
    "ProcessGroupGloo.options._timeout",
)
def _() -> None:
    class Own(dist.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(0, 1)  # type: ignore[call-arg]
            gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, TIMEOUT)
            self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    backend: Any = Own()._get_backend(torch.device("cpu"))
    assert isinstance(backend, dist.ProcessGroupGloo)
    assert backend.options._timeout == TIMEOUT


@contract("ProcessGroup._allgather_base", "ProcessGroup._reduce_scatter_base")
def _() -> None:
    group: Any = torch_distributed.get_default_group()
    gathered, scattered = torch.zeros(2, 2)
    group._allgather_base(gathered, torch.ones(2), torch_distributed.AllgatherOptions()).wait()
    group._reduce_scatter_base(scattered, torch.ones(2), dist.ReduceScatterOptions()).wait()
    assert gathered.tolist() == scattered.tolist() == [1, 1]


# -- DistributedDataParallel -------------------------------------------------------------------------------------------


@contract("torch._C.Future")
def _() -> None:
    assert isinstance(torch.futures.Future(), torch_distributed.Future)


@contract("torch.distributed.GradBucket")
def _() -> None:
    missing = {name for name in vars(dist.GradBucket) if not name.startswith("_")} - set(vars(GradBucket))
    assert missing == set()  # torch's methods would fail on our buckets


@contract("torch.distributed.BuiltinCommHookType")
def _() -> None:
    assert set(dist.BuiltinCommHookType.__members__) == {"ALLREDUCE", "FP16_COMPRESS"}


@contract("torch.distributed.algorithms.join._JoinConfig", "Joinable._join_config")
def _() -> None:
    wrapper: Any = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    assert torch_distributed.make_disabled_join() == wrapper._join_config
    with wrapper.join():
        assert wrapper._join_config.enable
    assert not torch_distributed.make_disabled_join().enable


@contract("Join._join_hooks", "Join._enable")
def _() -> None:
    joining: Any = Join([nn.parallel.DistributedDataParallel(nn.Linear(1, 1))], enable=False)
    assert (len(joining._join_hooks), joining._enable) == (1, False)


@contract("torch.nn.parallel.distributed._MixedPrecision")
def _() -> None:
    policy = torch_distributed.MixedPrecision(param_dtype=torch.bfloat16)
    assert (policy.param_dtype, policy.reduce_dtype, policy.buffer_dtype) == (torch.bfloat16, None, None)


@contract("torch.distributed.utils._cast_forward_inputs")
def _() -> None:
    inputs = [torch.ones(1), [torch.ones(1, dtype=torch.int64)]]
    (number, (inner,)), keywords = torch_distributed.cast_inputs(torch.bfloat16, inputs, {"a": torch.ones(1)})
    assert (number.dtype, inner.dtype, keywords["a"].dtype) == (torch.bfloat16, torch.int64, torch.bfloat16)


@contract("torch.distributed.utils._to_kwargs")
def _() -> None:
    cpu = torch.device("cpu")
    inputs, keywords = torch_distributed.move_inputs((torch.ones(1), "text"), {"a": [torch.ones(2)]}, cpu)
    assert (inputs[0].item(), inputs[1], keywords["a"][0].tolist()) == (1, "text", [1, 1])


@contract("torch.nn.utils.stateless._reparametrize_module")
def _() -> None:
    first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    second.weight = first.weight
    module, before = nn.Sequential(first, second), first.weight
    with torch_distributed.replace_parameters(module, {"0.weight": torch.full((1, 1), 3.0)}):
        assert module(torch.ones(1)).item() == 9  # including the tied weight
    assert first.weight is before is second.weight


@contract("torch.nn.modules.batchnorm._BatchNorm")
def _() -> None:
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        assert issubclass(kind, torch_distributed.AnyBatchNorm)
    assert nn.BatchNorm1d.forward is torch_distributed.AnyBatchNorm.forward


@contract("Parameter._in_backward_optimizers")
def _() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it loads TorchScript, which is deprecated
        from torch.distributed.optim import apply_optimizer_in_backward as module
    parameter: Any = nn.Parameter(torch.ones(1))
    module._apply_optimizer_in_backward(SGD, [parameter], {"lr": 1.0})
    (optimizer,) = parameter._in_backward_optimizers
    assert isinstance(optimizer, SGD)


@contract("Module._ddp_params_and_buffers_to_ignore")
def _() -> None:
    module: Any = nn.Linear(1, 1)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    assert list(module._ddp_params_and_buffers_to_ignore) == ["bias"]


# -- optimizers, modules, data -----------------------------------------------------------------------------------------


@contract("torch.utils.data.dataloader._BaseDataLoaderIter")
def _() -> None:
    iterator = iter(DataLoader([1, 2]))
    assert isinstance(iterator, torch_internals.BatchIterator)
    assert type(iterator).__next__ is torch_internals.BatchIterator.__next__


@contract("_BaseDataLoaderIter._dataset", "_BaseDataLoaderIter._index_sampler", "_BaseDataLoaderIter._num_workers")
def _() -> None:
    loader = DataLoader([1, 2], batch_size=2)
    assert torch_internals.parts_of(iter(loader)) == (loader.dataset, loader.batch_sampler, 0)


@contract("GradScaler._per_optimizer_states")
def _() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(parameter.sum()).backward()
    assert not torch_internals.have_unscaled()
    scaler.unscale_(optimizer)
    assert torch_internals.have_unscaled()
    scaler.step(optimizer)
    scaler.update()
    assert not torch_internals.have_unscaled()


@contract("LRScheduler._last_lr", "Optimizer.step._wrapped_by_lr_sched")
def _() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    assert not hasattr(optimizer.step, "_wrapped_by_lr_sched")
    scheduler: Any = LambdaLR(optimizer, lambda _: 0.5)
    assert scheduler._last_lr == scheduler.get_last_lr() == [0.25]
    assert hasattr(optimizer.step, "_wrapped_by_lr_sched")


@contract("SequentialLR._schedulers")
def _() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    parts = [ConstantLR(optimizer), ConstantLR(optimizer)]
    assert list(cast("Any", SequentialLR(optimizer, list(parts), [1]))._schedulers) == parts
    assert list(cast("Any", ChainedScheduler(list(parts)))._schedulers) == parts


@contract("Module._load_from_state_dict", "Module._load_state_dict_pre_hooks")
def modules_may_load_their_state_in_their_own_way() -> None:
    assert nn.Linear._load_from_state_dict is nn.Module._load_from_state_dict
    module = nn.Linear(1, 1)
    assert not module._load_state_dict_pre_hooks
    module.register_load_state_dict_pre_hook(lambda *_: None)
    assert len(module._load_state_dict_pre_hooks) == 1


@contract("state_dict._metadata")
def _() -> None:
    state: Any = nn.BatchNorm1d(1).state_dict()
    assert state._metadata == {"": {"version": 2}}
    old: Any = {name: value for name, value in state.items() if name != "num_batches_tracked"}
    old = type(state)(old)
    old._metadata = {"": {"version": 1}}
    nn.BatchNorm1d(1).load_state_dict(old)  # only possible because of the metadata


@contract("torch.utils.data._utils.worker._worker_info")
def _() -> None:
    worker: Any = torch.utils.data._utils.worker
    worker._worker_info = "a worker"
    try:
        with torch_internals.hide_worker_info():
            assert get_worker_info() is None
        assert cast("object", get_worker_info()) == "a worker"
    finally:
        worker._worker_info = None


@contract(
    "DataLoader.__iter__._workers",
    "DataLoader.__iter__._index_queues",
    "DataLoader.__iter__._worker_result_queue",
    "DataLoader.__iter__._workers_done_event",
    "DataLoader.__iter__._shutdown_workers",
)
def _() -> None:
    iterator: Any = iter(DataLoader(cast("Any", range(2)), num_workers=1))
    (worker,) = iterator._workers
    assert torch_internals.pipes_of(iterator)[0] is iterator._workers
    assert next(iterator).item() == 0
    assert worker.is_alive()
    iterator._shutdown_workers()
    assert not worker.is_alive()
    alone: Any = iter(DataLoader(cast("Any", range(2))))
    assert not hasattr(alone, "_workers")


# -- torchelastic ------------------------------------------------------------------------------------------------------


@contract("DefaultLogsSpecs._root_log_dir", "DefaultLogsSpecs._tee", "DefaultLogsSpecs._local_ranks_filter")
def _() -> None:
    specs: Any = DefaultLogsSpecs("/", Std.NONE, Std.ERR, {1})
    assert (str(specs._root_log_dir), specs._tee, specs._local_ranks_filter) == ("/", Std.ERR, {1})


@contract(
    "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler._popen",
    "SubprocessHandler._stdout",
    "SubprocessHandler._stderr",
)
def _() -> None:
    started: list[Any] = []

    def start(command: Any, environment: Any, out: Any, err: Any) -> str:
        started.append((command, environment["RANK"], out.name, err))
        out.close()
        return "a process"

    with torch_elastic.starting_ranks_with(start):
        handler: Any = SubprocessHandler("python", ("-u",), {"RANK": "7"}, os.devnull, "", 0, None)
    assert started == [(("python", "-u"), "7", os.devnull, None)]
    assert handler.proc == "a process"


@contract("torch.distributed.elastic.multiprocessing.api._terminate_process_handler")
def _() -> None:
    assert "signal.signal(sig, _terminate_process_handler)" in inspect.getsource(torch_elastic.api.PContext.start)
    with pytest.raises(torch_elastic.api.SignalException):
        torch_elastic.api._terminate_process_handler(signal.SIGTERM, None)


@contract("torch.distributed.elastic.utils.store.barrier")
def _() -> None:
    assert "store_util.barrier(" in inspect.getsource(SimpleElasticAgent._exit_barrier)

    class Late(dist.PrefixStore):
        """A store whose client is slow to see the end of the barrier."""

        may_see = threading.Event()

        def wait(self, keys: Any, *_: Any) -> None:
            self.may_see.wait(30)
            super().wait(keys)

    store, together = dist.HashStore(), torch_elastic.store_util
    with mock.patch.object(together, "barrier", together.barrier):
        torch_elastic.leave_together(30)
        host, late = (
            threading.Thread(target=together.barrier, args=(each, 2, "end"))
            for each in (dist.PrefixStore("", store), Late("", store))
        )
        late.start()
        host.start()
        host.join(0.5)
        assert host.is_alive(), "the host of the store has left before the other has passed the barrier"
        Late.may_see.set()
        host.join(30)
        late.join(30)
    assert not host.is_alive()
    assert not late.is_alive()


@contract("Optimizer._opt_called")
def _() -> None:
    optimizer: Any = SGD(nn.Linear(1, 1).parameters())
    ConstantLR(optimizer)
    assert not getattr(optimizer, "_opt_called", False)
    optimizer.step()
    assert optimizer._opt_called


@pytest.mark.parametrize("name", CONTRACTS)
def test_torch_keeps(name: str, world: None) -> None:
    check = CONTRACTS[name]
    assert re.search(r"\bassert |pytest\.raises\(", inspect.getsource(check)), "the contract asserts nothing"
    check()


# -- the sources -------------------------------------------------------------------------------------------------------

NOT_OF_TORCH = {
    "namedtuple": "_asdict _fields _replace",
    "os and sys": "_exit _getframe _current_frames",
    "threading": "_native_id",
    "argparse": "_action_groups _group_actions _option_string_actions _optionals _positionals",
    "rich": "_index",
    "pytest": "_capture _capture_fixture _global_capturing _fixtureinfo _setupstate _fixture_defs _tmp_path_factory "
    "_excinfo _remove_plugin _request",
    "coverage": "_warn_no_data _warn_preimported_source _warn_unimported_source",
    "IPython": "_get_exc_info",
    "multiprocessing": "_config _dir_candidates",
    "part of a torch name that is checked as a whole": "_C _utils _world _execution_engine",
}
"""Private members of foreign objects (not of our classes), by owner."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


class Names(ast.NodeVisitor):
    """Collects the full private names of torch in one file, and private members of any object."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self.torch: set[str] = set()
        self.members: set[str] = set()
        self.defined: set[str] = set()

    def _note(self, name: str) -> None:
        if any(map(is_private, name.split("."))):
            self.torch.add(name)

    def _whole(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        base = self._whole(node.value) if isinstance(node, ast.Attribute) else None
        return f"{base}.{cast('ast.Attribute', node).attr}" if base else None

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == "torch":
                self.known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                self._note(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                self.known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                self._note(f"{node.module}.{alias.name}")

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                self.defined.add(target.id)
                if node.value is not None and (whole := self._whole(node.value)):
                    self.known[target.id] = whole
        self.generic_visit(node)

    visit_AnnAssign = visit_Assign

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if whole := self._whole(node):
            self._note(whole)
            return
        if is_private(node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id == "self" and isinstance(node.ctx, ast.Store)
            (self.defined if own else self.members).add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr", "delattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and is_private(name.value):
                self.members.add(name.value)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and re.fullmatch(r"torch(\.\w+)+", node.value):
            self._note(node.value)

    def visit_ClassDef(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self.defined.add(node.name)
        self.generic_visit(node)

    visit_FunctionDef = visit_ClassDef


def names_in(source: str) -> Names:
    names = Names()
    names.visit(ast.parse(source))
    return names


@pytest.fixture(scope="module")
def found() -> dict[str, Names]:
    paths = SOURCES.rglob("*.py")
    return {path.relative_to(SOURCES).as_posix(): names_in(path.read_text()) for path in paths}


def covers(name: str, used: str) -> bool:
    return used == name or used.startswith(f"{name}.") or name.startswith(f"{used}.")


def test_private_names_of_torch_are_only_used_in_torch_internals(found: dict[str, Names]) -> None:
    assert not {path: names.torch for path, names in found.items() if names.torch and "core/torch_" not in path}


def test_every_private_name_of_torch_has_a_contract(found: dict[str, Names]) -> None:
    used = set[str]().union(*(names.torch for names in found.values()))
    assert sorted(name for name in used if not any(covers(kept, name) for kept in CONTRACTS)) == []


def test_every_private_member_of_an_object_of_torch_has_a_contract(found: dict[str, Names]) -> None:
    own = set[str]().union(*(names.defined for names in found.values()))
    kept = {name.rpartition(".")[2] for name in CONTRACTS} | set(" ".join(NOT_OF_TORCH.values()).split())
    wrong = {path: names.members - own - kept for path, names in found.items()}
    assert not {path: names for path, names in wrong.items() if names}


def test_every_private_method_of_torch_that_a_class_overrides_has_a_contract() -> None:
    kept = {name.rpartition(".")[2] for name in CONTRACTS}
    overridden: dict[str, set[str]] = defaultdict(set)
    for module in pkgutil.walk_packages([str(SOURCES)], "paceline."):
        if module.name.endswith(("__main__", "sitecustomize")):
            continue
        try:
            kinds = vars(importlib.import_module(module.name)).values()
        except MissingExtra:
            continue
        for kind in kinds:
            if not inspect.isclass(kind) or not kind.__module__.startswith("paceline."):
                continue
            of_torch = [base for base in kind.__mro__ if base.__module__.split(".")[0] == "torch"]
            theirs = set[str]().union(*(vars(base) for base in of_torch))
            for name in filter(is_private, vars(kind)):
                if inspect.isfunction(vars(kind)[name]) and name in theirs - kept:
                    overridden[kind.__qualname__].add(name)
    overridden.pop("DistributedDataParallel", None)  # see docs/drop-in.md and the test that compares its members
    assert overridden == {}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torch._C import Future", "torch._C.Future"),
        ("import torch\ntorch._foreach_copy_([], [])", "torch._foreach_copy_"),
        ("import torch.distributed as dist\ndist.distributed_c10d._world", "torch.distributed.distributed_c10d._world"),
        ("from torch import nn\nK = nn.parallel\nK._x", "torch.nn.parallel._x"),
        ("import sys\nsys.modules.get('torch._dynamo.config')", "torch._dynamo.config"),
        ("def f():\n    import torch._dynamo", "torch._dynamo"),
    ],
)
def test_a_private_name_of_torch_is_found_in_any_notation(source: str, name: str) -> None:
    assert names_in(source).torch == {name}
