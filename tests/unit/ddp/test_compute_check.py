"""The compute check: a slice is computed twice, and a difference is attributed to a device, the model, or the loop."""

from __future__ import annotations

import gc
import random
import socket
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from insides import Fault, judge
from paceline import World
from paceline.errors import UsageError, WrongComputation
from ranks import Pools, run_ranks
from sliced import Steps

# -- no false alarms, no changed bits -------------------------------------------------------------------------------


def train(world: World, kind: str, options: dict[str, Any], steps: int) -> tuple[bytes, int, int]:
    training = Steps(kind, options)
    return training.run(steps), training.repeats, training.samples


@pytest.mark.parametrize(
    ("size", "kind", "options"),
    [
        (1, "spectral", {}),
        (2, "mlp", {"dtype": torch.bfloat16, "workers": 1}),
        (4, "cnn", {"count": 8, "weighted": False}),
    ],
    ids=lambda value: "-".join(value) or "plain" if isinstance(value, dict) else str(value),
)
def test_check_raises_no_false_alarm_and_changes_no_bits(
    pools: Pools, size: int, kind: str, options: dict[str, Any]
) -> None:
    steps = 5  # one epoch and one step
    plain = pools.run(size, train, kind, options, steps)
    checked = pools.run(size, train, kind, options | {"every": 1}, steps)
    assert [weights for weights, _, _ in checked] == [weights for weights, _, _ in plain]
    # Every slice counts once in a loop that skips repeats.
    assert [samples for _, _, samples in checked] == [samples for _, _, samples in plain]
    assert all(repeats for _, repeats, _ in checked)
    assert not any(repeats for _, repeats, _ in plain)


@pytest.mark.slow
def test_check_over_gloo_changes_no_bits_and_names_a_flip() -> None:
    plain, checked = (run_ranks(4, train, "cnn", {"every": n}, 5, backend="gloo") for n in (None, 1))
    assert [weights for weights, _, _ in checked] == [weights for weights, _, _ in plain]
    for _, ranks in run_ranks(2, flip_bit, 1, "gradient", 3, 22, 5, backend="gloo"):
        assert ranks == (1,)


def wrapper_is_freed(world: World) -> bool:
    training = Steps("cnn", {"every": 1})
    training.run(2)
    reference = weakref.ref(training.model)
    gc.collect()
    gc.disable()
    del training
    gc.enable()
    return reference() is None


def test_a_check_does_not_keep_the_wrapper_alive(pools: Pools) -> None:
    assert pools.run(2, wrapper_is_freed) == [True] * 2


# -- faulty devices -------------------------------------------------------------------------------------------------


class Flip:
    """Flips a bit of a tensor on one rank, once in step `number` or in every step from then on."""

    def __init__(self, training: Steps, place: str, number: int, bit: int, draw: int) -> None:
        self.training, self.place, self.number, self.bit, self.draw = training, place, number, bit, draw
        self.done = False
        self.erratic = random.Random(draw)
        module = training.module
        assert isinstance(module, nn.Sequential)
        if place == "activation":
            module[1].register_forward_hook(lambda _module, _inputs, output: self.flipped(output))
        elif place != "weight":
            module[draw % 2 * 3].weight.register_hook(self.flipped)
        elif place == "weight":
            training.model.register_forward_pre_hook(lambda *_: self.flip_weight(module[draw % 2 * 3].weight))

    def is_due(self) -> bool:
        if self.place in ("lasting", "erratic"):
            return self.training.number >= self.number
        due = self.training.number == self.number and not self.done
        self.done |= due
        return due

    def flipped(self, tensor: Tensor) -> Tensor:
        if not self.is_due():
            return tensor
        draw = self.erratic.randrange(2**20) if self.place == "erratic" else self.draw
        changed = tensor.detach().clone()
        changed.view(-1).view(torch.int32)[draw % tensor.numel()] ^= 1 << self.bit
        # Add the difference, so that autograd continues through the original; NaN remains NaN.
        return tensor + (changed - tensor.detach()) if tensor.requires_grad else changed

    def flip_weight(self, weight: nn.Parameter) -> None:
        if self.is_due():
            weight.data.view(-1).view(torch.int32)[self.draw % weight.numel()] ^= 1 << self.bit


def flip_bit(world: World, rank: int, place: str, number: int, bit: int, draw: int) -> tuple[str, tuple[int, ...]]:
    training = Steps("all count", {"every": 1})
    if world.rank == rank:
        Flip(training, place, number, bit, draw)
    with pytest.raises(WrongComputation) as raised:
        training.run(number)
    training.optimizer.zero_grad()
    assert training.model._replica.ledger.status.optimizer_steps == training.number - 1  # the step was not taken
    assert (raised.value.blamed is None) == (world.rank in raised.value.ranks)
    # A faulty rank does not save, unless all ranks have the same weights.
    same_weights = raised.value.ranks == (0, 1) and place == "lasting"
    assert raised.value.may_save == (raised.value.blamed is not None or same_weights)
    return str(raised.value), raised.value.ranks


def draw_flips() -> list[tuple[int, int, str, int, int, int]]:
    """Draw the number of ranks, faulty rank, kind of tensor, step, bit and position in the tensor."""
    draws = random.Random(29)
    places = ["weight", "activation", "gradient", "gradient", "lasting", "erratic"]
    flips = []
    for place in places:
        lasts = place in ("weight", "lasting")
        size = 4 if lasts else draws.choice([2, 4])  # with two ranks the faulty one cannot be identified
        step = draws.randint(2, 9)
        # One of the two ranks checked in this step: a flip that turns all weights into NaN cannot be detected later.
        rank = (step - 1 + draws.randrange(2)) % size
        flips.append((size, rank, place, step, draws.randint(18, 30), draws.randrange(10_000)))
    return flips


@pytest.mark.parametrize(("size", "rank", "place", "step", "bit", "draw"), draw_flips())
def test_a_flipped_bit_is_named_with_rank_and_step(
    pools: Pools, size: int, rank: int, place: str, step: int, bit: int, draw: int
) -> None:
    [(message, ranks)] = set(pools.run(size, flip_bit, rank, place, step, bit, draw))
    assert ranks == (rank,)
    assert f"rank {rank} (cpu, " in message
    assert f", host {socket.gethostname()})" in message
    assert "\n" not in message
    assert message.startswith(f"in step {step}, ")
    assert ("ranks hold different bits in '" if place == "weight" else "so the device erred") in message
    assert "the step was not taken; start again from the last checkpoint, " in message


def test_lasting_difference_between_two_ranks_names_both(pools: Pools) -> None:
    [(message, ranks)] = set(pools.run(2, flip_bit, 1, "lasting", 3, 22, 5))
    assert ranks == (0, 1)
    assert "no majority shows which are right" in message
    assert "the step was not taken; start again from the last checkpoint, " in message


def test_different_weights_on_two_ranks_prevent_both_from_saving(pools: Pools) -> None:
    [(message, ranks)] = set(pools.run(2, flip_bit, 1, "weight", 3, 22, 5))
    assert ranks == (0, 1)
    assert "rank 0 (" in message
    assert "ranks hold different bits in '" in message


@pytest.mark.parametrize(
    ("repeats", "earlier", "fault", "ranks"),
    [
        ([[7, 7], [7, 7]], [(0, 7), (1, 7)], None, ()),
        ([[7, 7], [7, 7]], [(0, 7), (1, 8)], Fault.DEVICE, (1,)),
        ([[7, 7]], [(0, 8), (0, 7)], Fault.DEVICE, (0,)),
        ([[7, 8]], [], Fault.MODEL, (0,)),
        ([[7, 8], [7, 7]], [], Fault.DEVICE, (0,)),
        ([[7, 8], [9, 6]], [], Fault.MODEL, (0, 1)),
        ([[7, 8], [7, 7], [8, 8], [7, 7]], [], Fault.MODEL, (0,)),
        ([[7, 8], [8, 7], [7, 8], [7, 7]], [], Fault.MODEL, (0, 1, 2)),
        ([[7, 7], [8, 8]], [], Fault.UNDECIDED, (0, 1)),
        ([[7, 7], [7, 7], [8, 8], [8, 8]], [], Fault.UNDECIDED, (0, 1, 2, 3)),
        ([[7, 7], [7, 7], [8, 8], [7, 7]], [(1, 9)], Fault.DEVICE, (2,)),
    ],
)
def test_verdicts(
    repeats: list[list[int]], earlier: list[tuple[int, int]], fault: Fault | None, ranks: tuple[int, ...]
) -> None:
    assert judge(repeats, earlier) == (None if fault is None else (fault, ranks))


# -- nondeterministic models ----------------------------------------------------------------------------------------


def error_of(world: World, kind: str, options: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as error:
        Steps(kind, options).run(9)
    return str(error.value)


@pytest.mark.parametrize(("size", "kind"), [(1, "private"), (2, "kernel")])
def test_nondeterministic_model_is_refused_in_the_first_step(pools: Pools, size: int, kind: str) -> None:
    [message] = set(pools.run(size, error_of, kind, {"every": 100, "count": 2}))
    assert message.startswith("in step 1, computing a slice again gave different gradients on the same rank")
    assert "torch.use_deterministic_algorithms(True)" in message
    assert "\n" not in message


# -- interruptions and mistakes -------------------------------------------------------------------------------------


def fail_once(world: World, kind: str, every: int | None, fails_at: int | None) -> tuple[bytes, int]:
    """Train three steps; rank 1 alone raises in forward number `fails_at` and restarts that step."""
    training = Steps(kind, {"every": every})
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1
        if forwards == fails_at and world.rank == 1:
            raise ArithmeticError("in a slice")

    training.module.register_forward_pre_hook(count)
    try:
        weights = training.run(3)
    except ArithmeticError:
        training.optimizer.zero_grad()
        weights = training.run(3)
    return weights, forwards


def test_exception_during_a_check_does_not_block_other_ranks(pools: Pools) -> None:
    expected = {weights for weights, _ in pools.run(2, fail_once, "mlp", 1, None)}
    for fails_at in (1, 3, 4, 5, 8):  # in repeats, in the rank's own slices, and in a later step
        assert {weights for weights, _ in pools.run(2, fail_once, "mlp", 1, fails_at)} == expected, fails_at


@pytest.mark.parametrize("kind", ["spectral", "cnn"])
def test_exception_in_a_step_restores_buffers(pools: Pools, kind: str) -> None:
    expected = {weights for weights, _ in pools.run(2, fail_once, kind, None, None)}
    for every, fails_at in ((None, 4), (1, 5)):  # 4 and 5: in a rank's last slice of a step
        assert {weights for weights, _ in pools.run(2, fail_once, kind, every, fails_at)} == expected, fails_at
