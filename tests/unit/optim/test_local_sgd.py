"""LocalSGD and DiLoCo: hand-computed tables, comparison with DDP, islands, messages, and invalid arguments."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, AdamW

from paceline import Checkpointer, World
from paceline.ddp import DistributedDataParallel
from paceline.errors import CheckpointMismatch, UsageError
from paceline.optim import DiLoCo, LocalSGD, ShardedOptimizer
from twins import Pools

# Two layers with one weight each, initially 1; every gradient is 2 on every rank; inner lr 1, outer lr 2,
# sync_every 6, two fragments. Each row lists a layer's weight after inner steps 1, 2, 3, …, 12. For example, delay 1
# and alpha 0.5 at step 9: the message of step 8 is -7 - (-16) = 9, the outer weight is -7 - 2 * 9 = -25, the local
# weight is -18, and their mean is -21.5.
TABLES = {
    (0, 0.0): (
        [-1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41],
        [-1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47],
    ),
    (0, 0.5): (
        [-1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5],
        [-1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32],
    ),
    (0, 1.0): ([-1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23],) * 2,
    (1, 0.0): (
        [-1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33],
        [-1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39],
    ),
    (1, 0.5): (
        [-1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5],
        [-1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29],
    ),
    (1, 1.0): ([-1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23],) * 2,
}
OUTER = {
    (0, 0.0): (-35, -47),
    (0, 0.5): (-29, -35),
    (0, 1.0): (-23, -23),
    (1, 0.0): (-27, -39),
    (1, 0.5): (-25, -31),
    (1, 1.0): (-23, -23),
}
"""The outer weights after step 12."""


def two_weights() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    nn.init.ones_(net[0].weight)
    nn.init.ones_(net[1].weight)
    return net


def streaming(net: nn.Module, delay: int, alpha: float) -> DiLoCo:
    inner, outer = SGD(net.parameters(), lr=1.0), SGD(net.parameters(), lr=2.0)
    return DiLoCo(net, inner, outer, sync_every=6, fragments=2, delay=delay, alpha=alpha)


def take(net: nn.Module, optimizer: Any) -> list[float]:
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    optimizer.step()
    return [parameter.item() for parameter in net.parameters()]


def table(_: World, delay: int, alpha: float) -> tuple[list[list[float]], list[float]]:
    net = two_weights()
    optimizer = streaming(net, delay, alpha)
    rows = [take(net, optimizer) for _ in range(12)]
    optimizer.use_outer_weights()
    return rows, [parameter.item() for parameter in net.parameters()]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("delay", "alpha"), TABLES)
def test_weights_match_the_hand_computed_table(pools: Pools, ranks: int, delay: int, alpha: float) -> None:
    for rows, outer in pools.run(ranks, table, delay, alpha):
        assert [list(layer) for layer in zip(*rows, strict=True)] == list(map(list, TABLES[delay, alpha]))
        assert outer == list(OUTER[delay, alpha])


def saved_at_6(_: World, folder: Path) -> None:
    net = two_weights()
    checkpointer, optimizer = Checkpointer(folder), streaming(net, 0, 0.0)
    checkpointer.register("model", net)
    checkpointer.register("optimizer", optimizer)
    for _step in range(6):
        take(net, optimizer)
    checkpointer.save(6)
    checkpointer.close()


def resumed_from_6(world: World, folder: Path) -> tuple[list[list[float]], list[str]]:
    net = two_weights()
    checkpointer, optimizer = Checkpointer(folder), streaming(net, 0, 0.0)
    checkpointer.register("model", net)
    checkpointer.register("optimizer", optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpointer.restore()
    rows = [[parameter.item() for parameter in net.parameters()]]
    rows += [take(net, optimizer) for _ in range(3)]
    checkpointer.close()
    return rows, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("saved", "resumed", "outer"), [(1, 2, -29), (2, 3, -31), (2, 1, -35)])
def test_replaced_island_continues_from_the_outer_weights(
    pools: Pools, tmp_path: Path, saved: int, resumed: int, outer: float
) -> None:
    pools.run(saved, saved_at_6, tmp_path)
    (first, warned), *others = pools.run(resumed, resumed_from_6, tmp_path)
    assert first == [[-17, -23], [-19, -25], [-21, -27], [outer, -29]]
    # The last island has the outer weights. Its change of layer 0 is 6 and that of the others 12, so with two islands
    # the outer weight becomes -11 - 2 * 9, and with three -11 - 2 * 10.
    for rows, _ in others[saved - 1 :]:
        assert rows == [[-11, -23], [-13, -25], [-15, -27], [outer, -29]]
    note = "has no state of rank" if resumed > saved else "saved with world size 2"
    assert any(note in message for message in warned)


# -- islands ----------------------------------------------------------------------------------------------------------


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 700), nn.Linear(700, 2))


def wrapped(world: World, net: nn.Module, islands: int) -> nn.Module:
    """Return `net` as a replica of one of the `islands`; with one rank each, the plain module."""
    if islands == world.size:
        return net
    mesh = init_device_mesh("cpu", (islands, world.size // islands), mesh_dim_names=("between", "inside"))
    return DistributedDataParallel(net, device_mesh=mesh["inside"])


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * rank + step))


def backward(model: nn.Module, rank: int, step: int) -> None:
    model(batch(rank, step)).square().mean().backward()


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()


def weights(net: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(net.parameters()).detach().clone()


def momentum(net: nn.Module) -> SGD:
    return SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def beside_ddp(world: World, islands: int) -> tuple[Tensor, Tensor]:
    net, twin = network(world.rank), network(0)
    model = wrapped(world, net, islands)
    inner, outer = SGD(net.parameters(), lr=0.1), SGD(net.parameters(), lr=1.0)
    optimizer, replica = DiLoCo(model, inner, outer, sync_every=1), DistributedDataParallel(twin)
    train(model, optimizer, world.rank, range(5))
    train(replica, SGD(twin.parameters(), lr=0.1), world.rank, range(5))
    return weights(net), weights(twin)


@pytest.mark.parametrize(("ranks", "islands"), [(2, 2), (3, 3), (4, 2)])
def test_averaging_every_step_equals_data_parallel_training(pools: Pools, ranks: int, islands: int) -> None:
    for own, twin in pools.run(ranks, beside_ddp, islands):
        torch.testing.assert_close(own, twin, rtol=1e-4, atol=1e-6)


def averaged(world: World, islands: int, every: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights after each step of LocalSGD, and of the same training without averages."""
    net, twin = network(), network()
    model = wrapped(world, net, islands)
    optimizer, rows, own = LocalSGD(model, SGD(net.parameters(), lr=0.1), sync_every=every), [], []
    alone, inner = wrapped(world, twin, islands), SGD(twin.parameters(), lr=0.1)
    for step in range(every):
        train(model, optimizer, world.rank, range(step, step + 1))
        train(alone, inner, world.rank, range(step, step + 1))
        rows.append(weights(net))
        own.append(weights(twin))
    return rows, own


@pytest.mark.parametrize(("ranks", "islands"), [(2, 2), (4, 2)])
def test_local_sgd_averages_parameters_every_h_steps(pools: Pools, ranks: int, islands: int) -> None:
    results = pools.run(ranks, averaged, islands, 3)
    for rows, own in results:
        assert all(torch.equal(row, alone) for row, alone in zip(rows[:2], own[:2], strict=True))
        assert not torch.equal(rows[2], own[2])
    means = sum(own[2].double() for _, own in results) / ranks
    for rows, _ in results:
        assert torch.equal(rows[2], results[0][0][2])
        torch.testing.assert_close(rows[2], means.float())


def streams(
    world: World, islands: int, compress: Any, steps: int = 12, resumed_at: int | None = None
) -> tuple[Tensor, Tensor, int]:
    """Train, and return local weights, final weights and the number of bytes sent."""

    def make() -> tuple[nn.Module, nn.Module, DiLoCo]:
        net = network()
        model = wrapped(world, net, islands)
        parts = AdamW(net.parameters(), lr=0.01), momentum(net)
        return net, model, DiLoCo(model, *parts, sync_every=6, fragments=2, delay=1, alpha=0.25, compress=compress)

    net, model, optimizer = make()
    train(model, optimizer, world.rank, range(resumed_at or steps))
    if resumed_at is not None:
        state = optimizer.state_dict()
        net, model, optimizer = make()
        optimizer.load_state_dict(state)
        train(model, optimizer, world.rank, range(resumed_at, steps))
    local = weights(net)
    optimizer.sync()
    return local, torch.cat([weights(net), net[1].running_mean, net[1].running_var]), optimizer.islands.bytes_on_wire


@pytest.mark.parametrize("compress", [None, "fp16", "int8"])
def test_compressed_messages_are_smaller_and_close_to_exact(pools: Pools, compress: str | None) -> None:
    exact, sent = pools.run(4, streams, 2, None), pools.run(4, streams, 2, compress)
    for (_, own, count), (_, reference, whole) in zip(sent, exact, strict=True):
        assert torch.equal(own, sent[0][1])  # every rank has the same bits after sync()
        assert (own - reference).norm() < {None: 1e-6, "fp16": 1e-3, "int8": 0.05}[compress] * reference.norm()
        factor = {None: 1, "fp16": 2, "int8": 3.7}[compress]
        assert count == whole == 0 or whole / count == pytest.approx(factor, rel=0.02)


@pytest.mark.parametrize("compress", [None, "int8"])
@pytest.mark.parametrize(("ranks", "islands"), [(2, 2), (4, 2), (1, 1)])
def test_state_at_any_inner_step_continues_with_the_same_bits(
    pools: Pools, ranks: int, islands: int, compress: str | None
) -> None:
    whole = pools.run(ranks, streams, islands, compress)
    for stopped_at in (1, 2, 3, 5):  # a message is under way at 2 and 5
        for resumed, undisturbed in zip(
            pools.run(ranks, streams, islands, compress, 12, stopped_at), whole, strict=True
        ):
            assert torch.equal(resumed[0], undisturbed[0])
            assert torch.equal(resumed[1], undisturbed[1])


def unequal_gradients(_: World, compress: Any) -> list[float]:
    """Take 40 outer steps with gradients of 100 and 0.1; the latter is far below the resolution of int8."""
    net = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(net.weight)
    optimizer = DiLoCo(net, SGD(net.parameters(), lr=1.0), SGD(net.parameters(), lr=1.0), 1, compress=compress)
    for _ in range(40):
        net.weight.grad = torch.tensor([[100.0, 0.1]])
        optimizer.step()
    return net.weight[0].tolist()


def test_error_feedback_delivers_changes_below_the_resolution(pools: Pools) -> None:
    for large, small in pools.run(2, unequal_gradients, "int8"):
        assert large == pytest.approx(-4000, rel=1e-3)
        assert small == pytest.approx(-4, abs=100 / 127)


def scaled(world: World) -> tuple[int, list[float]]:
    """Let the scaler of rank 1 skip its second step; return the number of rounds, and the weights."""
    net = two_weights()
    optimizer = streaming(net, 0, 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    scaler.scale(torch.ones(()))  # creates the scale
    for step in range(6):
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 2.0 * scaler.get_scale())
            if (world.rank, step) == (1, 1):
                parameter.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
    return optimizer.state_dict()["local"]["counts"][2], [parameter.item() for parameter in net.parameters()]


def test_step_skipped_by_a_grad_scaler_counts_on_its_island(pools: Pools) -> None:
    (rounds, first), (other_rounds, second) = pools.run(2, scaled)
    assert rounds == other_rounds == 2
    # Means of the changes: layer 0 after three steps (6 + 4) / 2, layer 1 after six (12 + 10) / 2.
    assert first == [1 - 2 * 5 - 3 * 2, 1 - 2 * 11]
    assert second == first


def evaluated(world: World) -> tuple[list[float], list[float], list[float]]:
    net = two_weights()
    optimizer = streaming(net, 0, 0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    before = [take(net, optimizer) for _ in range(4)][-1]
    scheduler.step()
    with optimizer.outer_weights():
        inside = [parameter.item() for parameter in net.parameters()]
    return before, inside, [parameter.item() for parameter in net.parameters()]


def test_outer_weights_are_used_only_inside_their_block(pools: Pools) -> None:
    for before, inside, after in pools.run(2, evaluated):
        assert before == after == [-10, -7]
        assert inside == [-11, 1]  # layer 1 has had no outer step yet


def saved_inside(_: World) -> tuple[list[Tensor], str]:
    """Save inside ``outer_weights``; return the difference to the local parameters, and the refusal of another kind."""
    net, other = two_weights(), two_weights()
    optimizer = streaming(net, 0, 0.5)
    for _step in range(4):
        take(net, optimizer)
    with optimizer.outer_weights(), optimizer.outer_weights():
        saved = optimizer.state_dict()["local"]["parameters"]
    parts = AdamW(other.parameters()), SGD(other.parameters(), lr=2.0)
    with pytest.raises(CheckpointMismatch) as refusal:
        DiLoCo(other, *parts, sync_every=6, fragments=2, alpha=0.5).load_state_dict(optimizer.state_dict())
    return [left - right.detach() for left, right in zip(saved, net.parameters(), strict=True)], str(refusal.value)


def test_state_saved_inside_outer_weights_has_the_local_parameters(pools: Pools) -> None:
    for differences, refusal in pools.run(2, saved_inside):
        assert all(difference.item() == 0 for difference in differences)
        assert refusal.startswith("inner of DiLoCo is 'AdamW' in this run but 'SGD' in the checkpoint")


def lost_in_sync(world: World) -> list[float]:
    """Let rank 0 average at the end while rank 1 does not; return the weights."""
    net = two_weights()
    inner, outer = SGD(net.parameters(), lr=1.0), SGD(net.parameters(), lr=2.0)
    optimizer = DiLoCo(net, inner, outer, sync_every=6, on_lost_island="continue", timeout=1)
    for _step in range(3):
        take(net, optimizer)
    if world.rank == 0:
        optimizer.sync()
    return [parameter.item() for parameter in net.parameters()]


def test_island_that_continues_alone_keeps_its_last_steps(pools: Pools) -> None:
    alone, absent = pools.run(2, lost_in_sync)
    assert alone == [1 - 2 * 6] * 2
    assert absent == [-5, -5]


def in_memory_formats(world: World, formats: list[Any], is_late: bool) -> Tensor:
    """Return the weights of a convolution after outer steps, with one memory format per rank."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 2))
    if not is_late:
        net.to(memory_format=formats[world.rank])  # type: ignore[call-overload]
    optimizer = DiLoCo(net, SGD(net.parameters(), lr=0.1), momentum(net), sync_every=2)
    if is_late:
        net.to(memory_format=formats[world.rank])  # type: ignore[call-overload]
    for step in range(6):
        generator = torch.Generator().manual_seed(1000 * world.rank + step)
        net(torch.randn(2, 3, 6, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("other", [torch.channels_last, torch.contiguous_format])
def test_memory_format_may_differ_between_ranks_and_change(pools: Pools, other: Any, is_late: bool) -> None:
    plain = pools.run(2, in_memory_formats, [torch.contiguous_format] * 2, False)
    for own, twin in zip(pools.run(2, in_memory_formats, [torch.channels_last, other], is_late), plain, strict=True):
        torch.testing.assert_close(own, twin)


# -- wrong use ----------------------------------------------------------------------------------------------------


def wrong(world: World, case: str) -> str:
    net = network()
    inner, outer = SGD(net.parameters(), lr=0.1), momentum(net)
    some = SGD(net[0].parameters(), lr=0.1)
    cases: dict[str, Any] = {
        "not divisible": lambda: DiLoCo(net, inner, outer, sync_every=6, fragments=4),
        "delay": lambda: DiLoCo(net, inner, outer, sync_every=6, fragments=2, delay=3),
        "zero": lambda: LocalSGD(net, inner, sync_every=0),
        "fragments": lambda: DiLoCo(net, inner, outer, sync_every=100, fragments=100),
        "alpha": lambda: DiLoCo(net, inner, outer, sync_every=6, alpha=2),
        "compress": lambda: DiLoCo(net, inner, outer, sync_every=6, compress="int4"),  # type: ignore[arg-type]
        "sharded": lambda: LocalSGD(net, ShardedOptimizer(net, AdamW, lr=0.1), sync_every=2),
        "nested": lambda: LocalSGD(net, LocalSGD(net, inner, sync_every=2), sync_every=2),
        "some": lambda: LocalSGD(net, some, sync_every=2),
        "other outer": lambda: DiLoCo(net, inner, SGD(net[0].parameters(), lr=0.1), sync_every=2),
        "whole": lambda: LocalSGD(DistributedDataParallel(net), inner, sync_every=2),
        "sizes": lambda: LocalSGD(wrapped_unequally(world, net), inner, sync_every=2),
        "settings": lambda: LocalSGD(net, inner, sync_every=6 + world.rank),
        "outside": lambda: (LocalSGD(net, inner, sync_every=2), backward(net, 0, 0), inner.step()),
        "timeout": lambda: LocalSGD(net, inner, sync_every=2, timeout=0),
        "lbfgs": lambda: DiLoCo(net, inner, torch.optim.LBFGS(net.parameters()), sync_every=2),
        "inside": lambda: step_inside(DiLoCo(net, inner, outer, sync_every=2)),
        "group": lambda: LocalSGD(net, inner, sync_every=2).add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    }
    try:
        cases[case]()
    except UsageError as error:
        return str(error)
    return "accepted"


def step_inside(optimizer: DiLoCo) -> None:
    with optimizer.outer_weights():
        optimizer.step()


def wrapped_unequally(world: World, net: nn.Module) -> nn.Module:
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2])]
    return DistributedDataParallel(net, process_group=groups[world.rank // 2])


@pytest.mark.parametrize(
    ("case", "message"),
    {
        "not divisible": "sync_every=6 is not divisible by fragments=4",
        "delay": "delay=3 must be less than sync_every / fragments = 3",
        "zero": "LocalSGD(sync_every=0)",
        "fragments": "fragments=100, but the model has 8 parameters",
        "alpha": "DiLoCo(alpha=2)",
        "compress": "DiLoCo(compress='int4')",
        "sharded": "cannot use ShardedOptimizer as its inner optimizer",
        "nested": "cannot use LocalSGD as its inner optimizer",
        "some": "parameter '1.weight' is not in the inner optimizer",
        "other outer": "inner and outer have different parameters",
        "whole": "the model averages over all 3 ranks in every step",
        "sizes": "the islands [[0, 1], [2]] have different sizes",
        "settings": "rank 1 has sync_every=7, but rank 0 has sync_every=6",
        "outside": "SGD.step() was called, but this optimizer belongs to a LocalSGD",
        "group": "parameters cannot be added to a LocalSGD",
    }.items(),
)
def test_wrong_use_is_refused_in_one_line_on_every_rank(pools: Pools, case: str, message: str) -> None:
    for answer in pools.run(3, wrong, case):
        assert message in answer
        assert "\n" not in answer
