"""Control blocks that are read after backward, as beside gradients on GPUs: the same bits, the same errors, later.

Here CPU ranks do so; what they get is compared with ranks that read at the end of backward.
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

from insides import backward_of, engine_of
from models import Trip
from paceline.core.torch_internals import queue_callback
from paceline.core.world import World
from paceline.ddp import DistributedDataParallel
from paceline.ddp import step as steps
from paceline.ddp.channel import TEST_HOST_CHANNEL
from paceline.ddp.control_block import ControlBlock
from paceline.ddp.exchange import USUAL_STEPS, LateReading
from paceline.errors import PacelineError, UsageError
from twins import Pools

STEPS = 5


class Net(nn.Module):
    """A trunk, a part that may be left out, one that may run in a reentrant checkpoint, and an embedding."""

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
        if "late" in parts:  # the checkpoint adds to a gradient that is there already
            hidden = checkpoint(self.shared, hidden.tanh(), use_reentrant=True)
            hidden = checkpoint(self.shared, hidden.tanh(), use_reentrant=True)
        return self.head(hidden.tanh())


@contextmanager
def reading(how: str) -> Iterator[None]:
    """Make wrappers that read late: "always", or where blocks have held no surprise ("1"); "" for none."""
    if how:
        os.environ[TEST_HOST_CHANNEL] = how
    try:
        yield
    finally:
        os.environ.pop(TEST_HOST_CHANNEL, None)


def make(how: str, net: Callable[[], nn.Module] = Net, **options: Any) -> tuple[DistributedDataParallel, Any]:
    torch.manual_seed(0)
    with reading(how):
        options = {"init_sync": False, **options}  # or the second backward would compare the replicas, and read early
        model = DistributedDataParallel(net(), bucket_cap_mb=1e-4, unused_parameters="allow", **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def data(world: World, step: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + world.rank))


def phase(model: DistributedDataParallel) -> str:
    backward = backward_of(model)
    return "IDLE" if backward is None else backward.phase.name


def bits(model: nn.Module) -> list[Any]:
    """Gradients and parameters, None where there is no gradient."""
    found: list[Any] = []
    for parameter in model.parameters():
        gradient = parameter.grad
        dense = gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
        found += [None if dense is None else dense.tolist(), parameter.tolist()]
    return found


def train(world: World, scenario: str, how: str) -> tuple[list[Any], list[str], list[str]]:
    """The bits after each backward and at the end, what was raised, and the phase after each backward."""
    options = {"check_finite": True} if scenario == "not finite" else {}
    options |= {"reduce_dtype": torch.float64} if "float64" in scenario else {}
    model, optimizer = make(how, lambda: Net(sparse=scenario == "sparse"), **options)
    if scenario.startswith("hook"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    seen, said, phases = [], [], []
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
                if scenario != "sparse":  # which torch's function cannot clip
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                seen.append(bits(model))
                optimizer.step()
        except PacelineError as error:
            said.append(f"{type(error).__name__}: {error}")
        optimizer.zero_grad(set_to_none="zeros" not in scenario)
    model.sync_gradients() if "dropped" in scenario else None
    optimizer.zero_grad()
    return [*seen, bits(model)], said, phases


SCENARIOS = [
    "micro-batches", "zeros", "a collective between", "unused on one", "unused everywhere", "late on one",
    "late on both", "late on one, in float64", "late and dropped", "sparse", "without data", "weighted", "not finite",
    "another count", "hook", "hook, late on one",
]  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gradients_and_errors_are_those_of_ranks_that_read_at_the_end_of_backward(pools: Pools, scenario: str) -> None:
    for early, late in zip(pools.run(2, train, scenario, ""), pools.run(2, train, scenario, "always"), strict=True):
        assert late[0] == early[0]
        assert late[1] == early[1]
        assert bool(late[1]) == (scenario in ("not finite", "another count"))
        assert "UNREAD" not in early[2]
        if scenario != "weighted":
            assert late[2][1] == "UNREAD", "the order of arrival is known after the first backward"


def test_through_gloo_too(gloo: Pools) -> None:
    early, late = (gloo.run(2, train, "late on one", how) for how in ("", "always"))
    assert [one[:2] for one in early] == [one[:2] for one in late]


# -- who looks, and when ----------------------------------------------------------------------------------------------


def look(world: World) -> list[str]:
    """The phase after each way to look, on rank 0 alone where no other rank has a part in it."""
    found = []
    model, optimizer = make("1")
    for step, what in enumerate(["", "", *LOOKS]):
        model(data(world, step)).sum().backward()
        before = phase(model)
        if what and (world.rank == 0 or what in ("forward", "sync_gradients", "step")):
            LOOKS[what](model, optimizer, data(world, step))
        found.append(f"{before} {what} {phase(model)}")
        if world.rank == 0:
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1), 0)  # rank 1 helps rank 0 in nothing before it has looked
        optimizer.zero_grad()
    return found


LOOKS: dict[str, Callable[..., Any]] = {
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


def test_every_look_through_the_wrapper_reads_and_needs_no_other_rank(pools: Pools) -> None:
    first, second = pools.run(2, look)
    assert first[0] == second[0] == "IDLE  IDLE"  # the first backward tells the order of arrival
    for line in first[2:]:
        before, what, after = line.split(" ")
        assert (before, after) == (("UNREAD", "UNREAD") if what == "enable" else ("UNREAD", "IDLE")), line


def use_too_early(world: World, how: str) -> str:
    """Rank 1's gradient is late in one step, in which every rank uses gradients behind the wrapper's back."""
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
                scaler.update()  # also after the error: an unscaled optimizer would disturb the tests that follow
        optimizer.zero_grad()
    return ""


@pytest.mark.parametrize("how", ["clip", "replace", "update", "unscale"])
def test_gradients_that_were_used_before_they_were_whole_are_an_error_and_nothing_else(pools: Pools, how: str) -> None:
    for rank, message in enumerate(pools.run(2, use_too_early, how)):
        assert message.startswith(f"rank {rank}: the gradient of 'shared.")
        assert "was changed or used before its last part" in message
        assert "clip_grad_norm_(model.parameters()" in message


def two_wrappers(world: World, how: str) -> list[Any]:
    """Two models with a backward each, then one backward through both; steps in between."""
    (one, first), (two, second) = make(how), make(how)
    for step in range(STEPS):
        x = data(world, step)
        late = "late" if step == 3 and world.rank == 1 else ""
        if step % 2:
            one(x, late).sum().backward()
            two(x, late).sum().backward()
        else:
            (one(x, late).sum() + two(x * 2).sum()).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    return bits(one) + bits(two)


def test_two_wrappers_read_in_the_same_order_everywhere(pools: Pools) -> None:
    assert pools.run(2, two_wrappers, "") == pools.run(2, two_wrappers, "always")


def let_go(world: World, how: str) -> tuple[str, bool]:
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
def test_a_wrapper_that_goes_frees_its_buckets_without_a_collection(pools: Pools, how: str, phase: str) -> None:
    assert pools.run(2, let_go, how) == [(phase, True)] * 2


def trip(world: World, how: str) -> tuple[str, list[Any]]:
    model, optimizer = make(how)
    said = ""
    for step in range(STEPS):
        trips = step == 3 and world.rank == 1
        try:
            x = data(world, step)
            model(Trip.apply(x.requires_grad_()) if trips else x).sum().backward()
            optimizer.step()
        except (ArithmeticError, PacelineError) as error:
            said += f"{type(error).__name__}: {error}"
        optimizer.zero_grad()
    return said, bits(model)


def test_an_exception_on_one_rank_is_told_to_the_others_at_their_step(pools: Pools) -> None:
    early, late = pools.run(3, trip, ""), pools.run(3, trip, "always")
    assert early == late
    assert early[0][0].startswith("DesyncError: rank 0: backward was ended by an exception on rank 1")


def kept_by_a_thread(world: World) -> list[Any]:
    """Train where something holds on to each graph task until control blocks are being read, as GPUs' threads may."""
    model, optimizer = make("always")
    tasks: list[Any] = []  # callbacks, which live as long as a task
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
            assert tasks or step == 0, "the first is not read late, the others are"
            optimizer.step()
            optimizer.zero_grad()
    return bits(model)


def test_a_graph_task_that_is_dropped_while_blocks_are_read_is_no_exception(pools: Pools) -> None:
    """Found on a GPU, where the engine's threads let go of it after backward() has returned."""
    assert pools.run(2, kept_by_a_thread) == pools.run(2, plain_steps)


def plain_steps(world: World) -> list[Any]:
    model, optimizer = make("")
    for step in range(STEPS):
        model(data(world, step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return bits(model)


# -- the decision -----------------------------------------------------------------------------------------------------


def test_blocks_are_read_late_after_one_without_a_surprise_and_again_long_after_one_with() -> None:
    reading_late = LateReading(is_wanted=True)
    told = []
    for usual in [True, True, False, *[True] * (USUAL_STEPS + 1)]:
        told.append(reading_late.is_allowed)
        reading_late.note(is_usual=usual)
    assert told == [False, True, True, *[False] * USUAL_STEPS, True]


def test_where_blocks_travel_with_the_gradients_nothing_is_read_late() -> None:
    reading_late = LateReading(is_wanted=False, patience=0)
    reading_late.note(is_usual=True)
    assert not reading_late.is_allowed
