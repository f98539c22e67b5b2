"""Control blocks read after backward, as with gradients on GPUs: the same bits and errors, only later.

The tests compare CPU ranks that read late with ranks that read at the end of backward.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

from insides import TEST_HOST_CHANNEL, USUAL_STEPS, ControlBlock, QuietSteps, backward_of, engine_of, queue_callback
from insides import reducer as steps
from models import Trip
from paceline import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import PacelineError, UsageError
from twins import Pools

STEPS = 5


class Net(nn.Module):
    """A trunk, an optional part, a part that may run in a reentrant checkpoint, and an embedding."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.trunk, self.extra = nn.Linear(4, 6), nn.Linear(6, 6)
        self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
        self.table = nn.Embedding(10, 6, sparse=sparse)

    def forward(self, x: Tensor, parts: str = "") -> Tensor:
        hidden = self.trunk(x).tanh() + self.table(torch.arange(len(x)))
        if "without" not in parts:
            hidden = hidden + self.extra(hidden)
        hidden = self.shared(hidden)
        if "late" in parts:  # the checkpoint adds to an existing gradient
            hidden = checkpoint(self.shared, hidden.tanh(), use_reentrant=True)
            hidden = checkpoint(self.shared, hidden.tanh(), use_reentrant=True)
        return self.head(hidden.tanh())


@contextmanager
def reading(how: str) -> Iterator[None]:
    """Make new wrappers read late: "always", "1" for after blocks without a surprise, or "" for never."""
    if how:
        os.environ[TEST_HOST_CHANNEL] = how
    try:
        yield
    finally:
        os.environ.pop(TEST_HOST_CHANNEL, None)


def make(how: str, net: Callable[[], nn.Module] = Net, **options: Any) -> tuple[DistributedDataParallel, Any]:
    torch.manual_seed(0)
    with reading(how):
        options = {"init_sync": False, **options}  # otherwise the second backward compares replicas and reads early
        model = DistributedDataParallel(net(), bucket_cap_mb=1e-4, unused_parameters="allow", **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def data(world: World, step: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + world.rank))


def phase(model: DistributedDataParallel) -> str:
    backward = backward_of(model)
    return "IDLE" if backward is None else backward.phase.name


def bits(model: nn.Module) -> list[Any]:
    """Return gradients (None if missing) and parameters."""
    values: list[Any] = []
    for parameter in model.parameters():
        gradient = parameter.grad
        dense = gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
        values += [None if dense is None else dense.tolist(), parameter.tolist()]
    return values


def train(world: World, scenario: str, how: str) -> tuple[list[Any], list[str], list[str]]:
    """Return the bits after each backward and at the end, the errors, and the phase after each backward."""
    options = {"check_finite": True} if scenario == "not finite" else {}
    options |= {"reduce_dtype": torch.float64} if "float64" in scenario else {}
    model, optimizer = make(how, lambda: Net(sparse=scenario == "sparse"), **options)
    if scenario.startswith("hook"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    seen, errors, phases = [], [], []
    for step in range(STEPS):
        turn = step == 3
        parts = "late" if turn and "late" in scenario and (world.rank == 1 or "both" in scenario) else ""
        if turn and (scenario == "unused everywhere" or (scenario == "unused on one" and world.rank == 0)):
            parts = "without"
        x = data(world, step)
        if scenario == "not finite" and turn and world.rank == 1:
            x[0] = float("inf")
        engine_of(model).ledger.status.optimizer_steps = (
            7 if scenario == "another count" and turn and world.rank == 1 else step
        )
        try:
            if scenario == "micro-batches":
                with model.no_sync():
                    model(x * 2).sum().backward()
            if scenario == "without data" and turn and world.rank == 1:
                model.sync_gradients()
            elif scenario == "weighted":
                with model.weight(len(x)):
                    model(x, parts).sum().backward()
            else:
                model(x, parts).sum(1).mean().backward()
            phases.append(phase(model))
            if scenario == "a collective between":
                dist.all_reduce(torch.ones(1))
            if not ("dropped" in scenario and turn):
                if scenario != "sparse":  # torch cannot clip sparse gradients
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                seen.append(bits(model))
                optimizer.step()
        except PacelineError as error:
            errors.append(f"{type(error).__name__}: {error}")
        optimizer.zero_grad(set_to_none="zeros" not in scenario)
    model.sync_gradients() if "dropped" in scenario else None
    optimizer.zero_grad()
    return [*seen, bits(model)], errors, phases


SCENARIOS = [
    "micro-batches", "zeros", "a collective between", "unused on one", "unused everywhere", "late on one",
    "late on both", "late on one, in float64", "late and dropped", "sparse", "without data", "weighted", "not finite",
    "another count", "hook", "hook, late on one",
]  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_late_reading_gives_the_same_gradients_and_errors(pools: Pools, scenario: str) -> None:
    for early, late in zip(pools.run(2, train, scenario, ""), pools.run(2, train, scenario, "always"), strict=True):
        assert late[0] == early[0]
        assert late[1] == early[1]
        assert bool(late[1]) == (scenario in ("not finite", "another count"))
        assert "UNREAD" not in early[2]
        if scenario != "weighted":
            assert late[2][1] == "UNREAD", "the order of arrival is known after the first backward"


def test_late_reading_gives_the_same_bits_over_gloo(gloo: Pools) -> None:
    early, late = (gloo.run(2, train, "late on one", how) for how in ("", "always"))
    assert [result[:2] for result in early] == [result[:2] for result in late]


# -- access before the blocks are read --------------------------------------------------------------------------------


def access_all(world: World) -> list[str]:
    """Return the phases around each kind of access, on rank 0 alone unless it involves other ranks."""
    phases = []
    model, optimizer = make("1")
    for step, access in enumerate(["", "", *ACCESSES]):
        model(data(world, step)).sum().backward()
        before = phase(model)
        if access and (world.rank == 0 or access in ("forward", "sync_gradients", "step")):
            ACCESSES[access](model, optimizer, data(world, step))
        phases.append(f"{before} {access} {phase(model)}")
        if world.rank == 0:
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1), 0)  # until then rank 1 makes no progress for rank 0
        optimizer.zero_grad()
    return phases


ACCESSES: dict[str, Callable[..., Any]] = {
    "step": lambda model, optimizer, x: optimizer.step(),
    "parameters": lambda model, optimizer, x: list(model.parameters()),
    "named_parameters": lambda model, optimizer, x: model.named_parameters(),
    "state_dict": lambda model, optimizer, x: model.state_dict(),
    "clip": lambda model, optimizer, x: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "no_sync": lambda model, optimizer, x: model.no_sync().__enter__(),
    "enable": lambda model, optimizer, x: model.enable_grad_sync(),
    "weight": lambda model, optimizer, x: model.weight(1),
    "bucket_layout": lambda model, optimizer, x: model.bucket_layout(),
    "forward": lambda model, optimizer, x: model(x),
    "sync_gradients": lambda model, optimizer, x: model.sync_gradients(),
}


def test_access_through_the_wrapper_reads_control_blocks_without_other_ranks(pools: Pools) -> None:
    first, second = pools.run(2, access_all)
    assert first[0] == second[0] == "IDLE  IDLE"  # the first backward shares the order of arrival
    for line in first[2:]:
        before, access, after = line.split(" ")
        assert (before, after) == (("UNREAD", "UNREAD") if access == "enable" else ("UNREAD", "IDLE")), line


def use_too_early(world: World, how: str) -> str:
    """Use gradients without the wrapper on every rank while rank 1's gradient is late."""
    model, optimizer = make("always")
    saved = list(model.module.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        output = model(data(world, step), "late" if step == 3 and world.rank == 1 else "")
        (scaler.scale(output.sum()) if how == "unscale" else output.sum()).backward()
        if how == "clip":
            nn.utils.clip_grad_norm_(saved, 1.0)
        elif how == "replace":
            for parameter in saved:
                parameter.grad = parameter.grad * 2 if parameter.grad is not None else None
        elif how == "update":
            with torch.no_grad():
                for parameter in saved:
                    parameter.sub_(parameter.grad, alpha=0.1)
        elif how == "unscale":
            scaler.unscale_(optimizer)
        try:
            scaler.step(optimizer) if how == "unscale" else optimizer.step()
        except UsageError as error:
            assert step == 3
            return str(error)
        finally:
            if how == "unscale":
                scaler.update()  # also after the error: an unscaled optimizer would disturb later tests
        optimizer.zero_grad()
    return ""


@pytest.mark.parametrize("how", ["clip", "replace", "update", "unscale"])
def test_using_incomplete_gradients_is_an_error(pools: Pools, how: str) -> None:
    for rank, message in enumerate(pools.run(2, use_too_early, how)):
        assert message.startswith(f"rank {rank}: the gradient of 'shared.")
        assert "was changed or used before its last part" in message
        assert "clip_grad_norm_(model.parameters()" in message


def train_two_wrappers(world: World, how: str) -> list[Any]:
    """Train two models with a joint backward in even steps and separate backwards in odd ones."""
    (left, left_optimizer), (right, right_optimizer) = make(how), make(how)
    for step in range(STEPS):
        x = data(world, step)
        late = "late" if step == 3 and world.rank == 1 else ""
        if step % 2:
            left(x, late).sum().backward()
            right(x, late).sum().backward()
        else:
            (left(x, late).sum() + right(x * 2).sum()).backward()
        for optimizer in (left_optimizer, right_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    return bits(left) + bits(right)


def test_two_wrappers_read_in_the_same_order_on_every_rank(pools: Pools) -> None:
    assert pools.run(2, train_two_wrappers, "") == pools.run(2, train_two_wrappers, "always")


def delete_wrapper(world: World, how: str) -> tuple[str, bool]:
    model, _ = make(how)
    for step in range(2):
        model(data(world, step)).sum().backward()
    reducer: Any = weakref.ref(engine_of(model))
    gc.disable()
    try:
        before = phase(model)
        del model
        return before, reducer() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("how", "phase"), [("always", "UNREAD"), ("", "IDLE")])
def test_deleted_wrapper_frees_its_buckets_without_garbage_collection(pools: Pools, how: str, phase: str) -> None:
    assert pools.run(2, delete_wrapper, how) == [(phase, True)] * 2


def trip(world: World, how: str) -> tuple[str, list[Any]]:
    model, optimizer = make(how)
    message = ""
    for step in range(STEPS):
        trips = step == 3 and world.rank == 1
        try:
            x = data(world, step)
            model(Trip.apply(x.requires_grad_()) if trips else x).sum().backward()
            optimizer.step()
        except (ArithmeticError, PacelineError) as error:
            message += f"{type(error).__name__}: {error}"
        optimizer.zero_grad()
    return message, bits(model)


def test_exception_on_one_rank_reaches_the_others_at_their_step(pools: Pools) -> None:
    early, late = pools.run(3, trip, ""), pools.run(3, trip, "always")
    assert early == late
    assert early[0][0].startswith("DesyncError: rank 0: backward was ended by an exception on rank 1")


def train_with_kept_tasks(world: World, how: str) -> list[Any]:
    """Train with each graph task kept alive until control blocks are read, as threads of a GPU may do."""
    model, optimizer = make(how)
    tasks: list[Any] = []  # callbacks, which live as long as their task
    read = ControlBlock.statuses

    def queue(callback: Any) -> None:
        tasks.append(callback)
        queue_callback(callback)

    def drop_and_read(block: ControlBlock) -> Any:
        tasks.clear()
        return read(block)

    with patch.object(steps, "queue_callback", queue), patch.object(ControlBlock, "statuses", drop_and_read):
        for step in range(STEPS):
            model(data(world, step)).sum().backward()
            assert tasks or step == 0 or not how, "only the first block is read early"
            optimizer.step()
            optimizer.zero_grad()
    return bits(model)


def test_graph_task_dropped_while_reading_is_not_mistaken_for_an_exception(pools: Pools) -> None:
    """Seen on a GPU, where autograd's threads release the task after backward() has returned."""
    assert pools.run(2, train_with_kept_tasks, "always") == pools.run(2, train_with_kept_tasks, "")


# -- the decision -----------------------------------------------------------------------------------------------------


def test_steps_are_quiet_after_a_usual_step_and_not_for_a_while_after_a_surprise() -> None:
    quiet = QuietSteps()
    allowed = []
    for usual in [True, True, False, *[True] * (USUAL_STEPS + 1)]:
        allowed.append(quiet.is_quiet)
        quiet.note(is_usual=usual)
    assert allowed == [False, True, True, *[False] * USUAL_STEPS, True]
