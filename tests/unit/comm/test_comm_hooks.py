"""register_comm_hook keeps torch's contract: torch's hooks run unchanged and give the same results as in torch DDP."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.futures import Future

from deep import TINY, Deep, data
from paceline import World
from paceline.comm import algorithms
from paceline.ddp import DistributedDataParallel
from paceline.errors import HookError, PacelineError, UsageError
from ranks import Ranks
from twins import Case, Parts, Pools, Tied, averaging_by, same_tensor, train_beside_twin

Gradients = list[list[torch.Tensor]]


class Net(nn.Module):
    """A net with matrices large enough for PowerSGD and a convolution."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, dtype=dtype)
        self.first = nn.Linear(16, 24, dtype=dtype)
        self.second = nn.Linear(24, 20, dtype=dtype)
        self.unused = nn.Linear(3, 3, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.conv(x.view(-1, 1, 6, 6)).mean(1).flatten(1)
        return self.second(self.first(hidden).tanh())


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(50 * step + rank)
    return torch.randn(5, 36, generator=generator)


def gradients(model: nn.Module, rank: int, steps: int = 6) -> Gradients:
    """Train, and return the gradients of all used parameters for every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        found.append([p.grad.clone() for name, p in model.named_parameters() if "unused" not in name])
        optimizer.step()
    return found


def power_state(start: int = 2) -> Any:
    # Without epsilon, torch divides by zero for the zero gradient of an unused parameter.
    options: Any = {"start_powerSGD_iter": start, "min_compression_rate": 1, "orthogonalization_epsilon": 1e-6}
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, **options)


def local_sgd_state() -> Any:
    return post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=3)


def one_after_another(state, bucket):  # type: ignore[no-untyped-def]  # which torch's check would read as strings
    """A typical user-written hook: it blocks and returns a new tensor."""
    total = bucket.buffer().clone()
    dist.all_reduce(total)
    future: Future[torch.Tensor] = Future()
    future.set_result(total / dist.get_world_size())
    return future


HOOKS: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "allreduce": (lambda: None, default_hooks.allreduce_hook),
    "fp16": (lambda: None, default_hooks.fp16_compress_hook),
    "fp16 wrapper": (lambda: None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "noop": (lambda: None, debugging_hooks.noop_hook),
    "PowerSGD": (power_state, powerSGD_hook.powerSGD_hook),
    # Fails in torch 2.13 itself with an AssertionError once it compresses.
    "batched PowerSGD": (partial(power_state, 100), powerSGD_hook.batched_powerSGD_hook),
    "fp16 wrapper of PowerSGD": (power_state, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
    "post-local SGD": (local_sgd_state, post_localSGD_hook.post_localSGD_hook),
    # These two expect NCCL's kind of all-gather future; torch DDP cannot run them on Gloo.
    "quantization per tensor": (lambda: None, quantization_hooks.quantization_pertensor_hook),
    "quantization per channel": (lambda: None, quantization_hooks.quantization_perchannel_hook),
    "blocking": (lambda: None, one_after_another),
}


def beside_torch(world: World) -> None:
    """Compare every hook with torch DDP, with one bucket for the whole model so that both see the same bytes."""
    torch.manual_seed(0)
    net = Net()
    for name, (state, hook) in HOOKS.items():
        theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(net), find_unused_parameters=True)
        theirs.register_comm_hook(state(), hook)
        ours = DistributedDataParallel(copy.deepcopy(net), unused_parameters="allow")
        # torch's order within a bucket; it does not rebuild buckets if parameters may be unused.
        ours.load_bucket_layout([[name for name, _ in net.named_parameters()]])
        ours.register_comm_hook(state(), hook)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch.ao.quantization and others
            wanted, found = gradients(theirs, world.rank), gradients(ours, world.rank)
        for step, (a, b) in enumerate(zip(found, wanted, strict=True)):
            for mine, other in zip(a, b, strict=True):
                same_tensor(mine, other, 1e-4, f"{name}, step {step}")


@pytest.mark.slow
def test_torch_hooks_give_the_same_results_as_in_torch_ddp(pools: Pools) -> None:
    pools.run(2, beside_torch)


def near_the_mean(world: World) -> None:
    """Hooks that torch refuses on CPU, registered in every possible way, with many buckets."""
    torch.manual_seed(0)
    net = Net()
    plain = DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=TINY, unused_parameters="allow")
    (wanted,) = gradients(plain, world.rank, 1)
    bf16_wrapper = default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)
    kinds, builtin = ddp_comm_hooks.DDPCommHookType, dist.BuiltinCommHookType
    ways: dict[str, tuple[Callable[[Any], Any], float]] = {
        "bf16": (lambda model: model.register_comm_hook(None, default_hooks.bf16_compress_hook), 0.05),
        "bf16 wrapper": (lambda model: model.register_comm_hook(state=None, hook=bf16_wrapper), 0.05),
        "a partial": (lambda model: model.register_comm_hook(None, partial(default_hooks.allreduce_hook)), 1e-6),
        "builtin": (lambda model: model._register_builtin_comm_hook(builtin.ALLREDUCE), 1e-6),
        "builtin fp16": (lambda model: model._register_builtin_comm_hook(builtin.FP16_COMPRESS), 0.01),
        "by type": (lambda model: ddp_comm_hooks.register_ddp_comm_hook(kinds.ALLREDUCE, model, None), 1e-6),
        "quantized": (lambda model: ddp_comm_hooks.register_ddp_comm_hook(kinds.QUANTIZE_PER_TENSOR, model), 0.05),
        "blocking": (lambda model: model.register_comm_hook(None, one_after_another), 1e-6),
    }
    for name, (register, rtol) in ways.items():
        model = DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=TINY, unused_parameters="allow")
        register(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (found,) = gradients(model, world.rank, 1)
        for mine, other in zip(found, wanted, strict=True):
            same_tensor(mine, other, rtol, name)


def test_every_way_to_register_a_hook_gives_the_mean(pools: Pools) -> None:
    pools.run(2, near_the_mean)


# -- arguments of hooks ------------------------------------------------------------------------------------------------


class Log:
    """Hook state that logs every bucket."""

    def __init__(self) -> None:
        self.buckets: list[tuple[int, bool, list[str]]] = []

    def hook(self, names: dict[int, str], bucket: dist.GradBucket) -> Future[torch.Tensor]:
        assert isinstance(bucket, dist.GradBucket)
        shapes = [tuple(parameter.shape) for parameter in bucket.parameters()]
        assert [tuple(gradient.shape) for gradient in bucket.gradients()] == shapes
        flat = torch.cat([gradient.flatten() for gradient in bucket.gradients()])
        assert torch.equal(flat, bucket.buffer())
        shown = [names[id(parameter)] for parameter in bucket.parameters()]
        self.buckets.append((bucket.index(), bucket.is_last(), shown))
        bucket.set_buffer(bucket.buffer() * 2)
        assert torch.equal(bucket.gradients()[0].flatten(), 2 * flat[: bucket.gradients()[0].numel()])
        return default_hooks.allreduce_hook(None, bucket)  # reduces the doubled buffer


def log_hook_calls(world: World) -> None:
    torch.manual_seed(0)
    net = Deep()
    plain = DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=TINY, unused_parameters="allow")
    model = DistributedDataParallel(net, bucket_cap_mb=TINY, unused_parameters="allow")
    log = Log()
    model.register_comm_hook({id(p): name for name, p in net.named_parameters()}, log.hook)
    for step in range(4):
        log.buckets.clear()
        layout = model.bucket_layout()
        for one in (plain, model):
            one.zero_grad(set_to_none=step % 2 == 0)
            with one.no_sync():
                one(data(world.rank, step)).sum().backward()
        assert log.buckets == []
        if step == 2 and world.rank == 0:  # a rank without data
            plain.sync_gradients()
            model.sync_gradients()
        else:
            for one in (plain, model):
                one(data(world.rank, step + 10)).sum().backward()
        last = len(layout) - 1
        assert log.buckets == [(at, at == last, names) for at, names in enumerate(layout)]
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            same_tensor(mine.grad, 2 * other.grad, 1e-12, f"step {step}")
            assert mine.grad is not None
            assert mine.grad.dtype == mine.dtype


@pytest.mark.parametrize("size", [1, 2])
def test_a_hook_gets_every_bucket_once_in_order_and_set_buffer_takes_effect(pools: Pools, size: int) -> None:
    pools.run(size, log_hook_calls)


def mean_hook(world: World) -> None:
    """With weights, the allreduce hook equals one process on the whole batch."""
    for case in [
        Case(build=Tied, micros=2, window="backward", set_to_none=False, batches=(12, 5)),
        Case(build=partial(Parts, checkpointing="reentrant"), pattern="a part twice", batches=(12, 7)),
        Case(build=partial(Parts, torch.bfloat16), batches=(12, 7), rtol=0.1),
        Case(batches=(12, 7), options={"reduce_dtype": torch.float32, "bucket_cap_mb": TINY}, rtol=1e-4),
        Case(build=partial(Parts, torch.float16), batches=(12, 7), rtol=0.02),
        *(
            Case(pattern=pattern, batches=(12, 1), options={"bucket_cap_mb": TINY})
            for pattern in ("unused on all in odd steps", "other parts on other ranks", "no part at all on rank 0")
        ),
    ]:
        try:
            train_beside_twin(world, case, hook=default_hooks.allreduce_hook)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


def test_with_the_allreduce_hook_and_weights_ranks_equal_one_process(pools: Pools) -> None:
    pools.run(2, mean_hook)


def averaged_by_algorithms(world: World) -> None:
    for all_reduce in (algorithms.ring_all_reduce, algorithms.tree_all_reduce, algorithms.hierarchical_all_reduce):
        hook = averaging_by(all_reduce)
        for case in (
            Case(Parts, "a part twice", (12, 7, 2), options={"bucket_cap_mb": TINY}),
            Case(partial(Parts, checkpointing="reentrant"), "other parts on other ranks", (12, 7)),
        ):
            train_beside_twin(world, case, hook, lambda model: model.process_group)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_documented_hook_averages_with_any_algorithm(pools: Pools, size: int) -> None:
    pools.run(size, averaged_by_algorithms)


def summed_in_half(world: World) -> None:
    """Summed losses have large gradients: their fp16 sum over ranks overflows, their mean does not."""
    for dtype in (torch.float16, torch.bfloat16):
        model = DistributedDataParallel(nn.Linear(8, 1, bias=False, dtype=dtype))
        twin = copy.deepcopy(model.module)
        count = 150 + 50 * world.rank
        x = torch.full((count, 8), 250.0, dtype=dtype)
        with model.weight(count):
            model(x).sum().backward()
        twin(torch.full((1, 8), 250.0, dtype=dtype)).sum().backward()
        same_tensor(model.module.weight.grad, twin.weight.grad, 0.01, str(dtype))


def test_weighted_means_are_right_even_if_the_sum_would_overflow(pools: Pools) -> None:
    pools.run(2, summed_in_half)


# -- errors ------------------------------------------------------------------------------------------------------------


def wrong_bucket(state: object, bucket: int) -> Future[torch.Tensor]: ...  # type: ignore[empty-body]


def wrong_return(state: object, bucket: dist.GradBucket) -> torch.Tensor: ...  # type: ignore[empty-body]


def no_bucket(state: object) -> Future[torch.Tensor]: ...  # type: ignore[empty-body]


def refusals(world: World) -> None:
    model = DistributedDataParallel(Deep(), unused_parameters="allow")
    annotation = "bucket annotation should be dist.GradBucket, but 'wrong_bucket' has"
    for hook, message in [
        ({}, "must be callable"),
        (wrong_bucket, annotation),
        (wrong_return, "return annotation should be torch.futures.Future"),
        (no_bucket, "'no_bucket' does not take a state and a bucket"),
    ]:
        with pytest.raises(HookError, match=message):
            model.register_comm_hook(None, hook)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(UsageError, match="can only be called once, and 'allreduce_hook' is registered already"):
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(UsageError, match=r"is not a dist\.BuiltinCommHookType"):
        DistributedDataParallel(Deep())._register_builtin_comm_hook("fp16")


def test_invalid_hooks_are_refused_at_registration(pools: Pools) -> None:
    pools.run(2, refusals)


def raises(state: object, bucket: Any) -> Any:
    raise KeyError("no such key")


def no_future(state: object, bucket: Any) -> Any:
    return bucket.buffer()


def fails_later(state: object, bucket: Any) -> Any:
    return default_hooks.allreduce_hook(None, bucket).then(lambda _: {}["absent"])


def answering(change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a hook that runs its collective correctly but returns a wrong result."""

    def hook(state: object, bucket: Any) -> Any:
        return default_hooks.allreduce_hook(None, bucket).then(lambda future: change(future.value()))

    return hook


BROKEN: list[tuple[Callable[..., Any], str]] = [
    (raises, "raised KeyError: 'no such key'"),
    (no_future, "returned a Tensor; return a torch.futures.Future"),
    (fails_later, "KeyError"),
    (answering(lambda flat: flat.half()), "torch.float16"),
    (answering(lambda flat: torch.cat([flat, flat])), "for a bucket of shape ("),
    (answering(lambda flat: flat.to("meta")), "on meta"),
    (answering(lambda flat: flat.to_sparse()), "torch.sparse_coo"),
    (answering(lambda flat: None), "returned a future of a NoneType"),
]


def fail(world: World) -> None:
    for hook, message in BROKEN:
        model = DistributedDataParallel(Deep(), bucket_cap_mb=TINY, unused_parameters="allow")
        model.register_comm_hook(None, hook)
        with pytest.raises(HookError) as caught:
            model(data(world.rank, 0)).sum().backward()
        text = str(caught.value)
        begin = f"rank {world.rank}: communication hook '{hook.__qualname__}', called for bucket 0, "
        assert text.startswith(begin), text
        assert message in text, text
        assert "\n" not in text
        for _ in range(2):  # the replicas cannot continue
            with pytest.raises(PacelineError, match="start again from the last checkpoint"):
                model(data(world.rank, 1)).sum().backward()


def test_a_hook_that_fails_is_named_with_rank_and_bucket(pools: Pools) -> None:
    pools.run(2, fail)


def zero_step(world: World) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing it loads TorchScript
        from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = DistributedDataParallel(Deep(), unused_parameters="allow")
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        for make in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved):
            hook = make(default_hooks.allreduce_hook, model, zero)
            with pytest.raises(HookError, match=f"{make.__name__} runs the optimizer inside torch"):
                model.register_comm_hook(None, hook)
    model.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))


def test_an_optimizer_that_needs_torchs_reducer_is_refused_by_name(pools: Pools) -> None:
    pools.run(1, zero_step)


def raises_somewhere(world: World) -> str:
    """Raise in the second bucket of the second backward on rank 1 only, which keeps running."""
    group: Any = dist.new_group(timeout=timedelta(seconds=2))
    calls = []

    def hook(state: object, bucket: Any) -> Any:
        calls.append(bucket.index())
        if world.rank == 1 and calls.count(1) == 2:
            raise KeyError("here")
        return default_hooks.allreduce_hook(group, bucket)

    model = DistributedDataParallel(Deep(), bucket_cap_mb=TINY, unused_parameters="allow", process_group=group)
    model.register_comm_hook(None, hook)
    model(data(world.rank, 0)).sum().backward()
    model.zero_grad()
    start = time.monotonic()
    with pytest.raises(PacelineError) as caught:
        model(data(world.rank, 1)).sum().backward()
    assert time.monotonic() - start < (1, 20)[world.rank == 0]
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(PacelineError, match="start again from the last checkpoint"):
        model(data(world.rank, 2)).sum().backward()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_a_failing_hook_raises_immediately_on_its_rank_and_on_others_at_timeout(backend: str) -> None:
    with Ranks(2, backend=backend) as ranks:
        first, second = ranks.run(raises_somewhere)
    assert second.startswith("HookError: rank 1: communication hook 'raises_somewhere.<locals>.hook', called for buck")
    assert "rank 0" in first
    assert "see the error" in first  # the hook of rank 0 was blamed


def exception_between(world: World) -> None:
    """An exception in the model rather than the hook reaches the other ranks, and training can continue."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Deep(), bucket_cap_mb=TINY, unused_parameters="allow")
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    out = model(data(world.rank, 0))
    if world.rank == 1:
        handle = model.module.layers[1].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
        handle.remove()
    else:
        with pytest.raises(PacelineError, match="backward was ended by an exception on rank 1"):
            out.sum().backward()
    model.zero_grad()
    model(data(world.rank, 1)).sum().backward()
    twin = copy.deepcopy(model.module)
    twin.zero_grad()
    (sum(twin(data(rank, 1)).sum() for rank in range(world.size)) / world.size).backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        same_tensor(mine.grad, other.grad, 1e-9, "after the exception")


def test_hooks_stay_in_step_after_an_exception_in_backward(pools: Pools) -> None:
    pools.run(2, exception_between)
