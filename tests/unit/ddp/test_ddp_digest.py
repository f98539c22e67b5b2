"""What ranks tell each other about a step: digests, control blocks, and messages inside ``join``.

An ordinary step runs only the collectives of its buckets; all ranks still learn of a surprise on one rank.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from insides import (
    UNWEIGHTED,
    USUAL_STEPS,
    WEIGHTED,
    ControlBlock,
    Event,
    Message,
    Origin,
    Status,
    StatusDigest,
    channel_of,
    compute_scale,
    encode,
    event_number,
    recorder,
    tail_width,
)
from insides import joined_steps_decode as decode
from paceline import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import DesyncError, NonFiniteGradient, UsageError
from twins import Pools

SIZE = 3


# -- the digest alone ----------------------------------------------------------------------------------------------


def read_digests(positions: list[tuple[int, ...] | None], dtype: torch.dtype, factor: float) -> list[bool]:
    """Return whether each rank reads agreement from the tails of these positions, summed and scaled."""
    size = len(positions)
    digests = [StatusDigest(rank, size) for rank in range(size)]
    tails = [torch.full((tail_width(size),), 7.0, dtype=dtype) for _ in range(size)]  # from the previous step
    for digest, tail, position in zip(digests, tails, positions, strict=True):
        digest.write(tail, position, 0.0)
    total = torch.stack(tails).sum(0) * factor
    return [digest.read(total, UNWEIGHTED) is not None for digest in digests]


@pytest.mark.parametrize("factor", [1.0, 1 / 3, 1 / 7000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_digests_agree_only_for_equal_positions(dtype: torch.dtype, factor: float) -> None:
    same = (3, 2, 0, 17, -1, 2**52 - 1)
    assert read_digests([same] * SIZE, dtype, factor) == [True] * SIZE
    for place in range(len(same)):
        other = tuple(number + (at == place) for at, number in enumerate(same))
        for odd in range(SIZE):
            positions = [other if rank == odd else same for rank in range(SIZE)]
            assert read_digests(positions, dtype, factor) == [False] * SIZE
            silent = [None if rank == odd else same for rank in range(SIZE)]
            assert read_digests(silent, dtype, factor) == [False] * SIZE
    assert read_digests([None] * SIZE, dtype, factor) == [False] * SIZE


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [[1.0, 2.0, 3.0], [0.1, 1e300, 5e-324]])
def test_weights_are_read_exactly(dtype: torch.dtype, weights: list[float]) -> None:
    digests = [StatusDigest(rank, SIZE) for rank in range(SIZE)]
    tails = [torch.full((tail_width(SIZE),), 7.0, dtype=dtype) for _ in range(SIZE)]
    for digest, tail, weight in zip(digests, tails, weights, strict=True):
        digest.write(tail, (3, 4), weight)
    for digest in digests:
        assert digest.read(torch.stack(tails).sum(0), WEIGHTED) == [(weight, WEIGHTED) for weight in weights]


@pytest.mark.parametrize("factor", [0.0, float("nan"), float("inf")])
def test_unreadable_digest_counts_as_disagreement(factor: float) -> None:
    assert read_digests([(1, 2)] * SIZE, torch.float32, factor) == [False] * SIZE


# -- steps of several ranks ----------------------------------------------------------------------------------------


class Net(nn.Module):
    """An optional part, and a part that may run in reentrant checkpoints, which delays its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.extra, self.shared, self.head = (nn.Linear(6, 6).double() for _ in range(4))

    def forward(self, x: Tensor, surprise: str) -> Tensor:
        hidden = self.trunk(x).tanh()
        if not surprise.startswith("absent"):
            hidden = hidden + self.extra(hidden)
        hidden = self.shared(hidden).tanh()
        if surprise == "late":
            for _ in range(2):
                hidden = checkpoint(self.shared, hidden, use_reentrant=True).tanh()
        return self.head(hidden)


def data(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step), dtype=torch.double)


ON_ALL_RANKS = ("weight", "absent everywhere")
"""Events that happen on all ranks, which need no exchange."""


def surprising_steps(
    world: World, surprise: str, cap: float, reduce_dtype: torch.dtype | None = None
) -> list[tuple[bool, bool]]:
    """Return for each step whether gradients equal one process and whether control blocks were exchanged."""
    torch.manual_seed(0)
    twin, net = Net(), Net()
    net.load_state_dict(twin.state_dict())
    model = DistributedDataParallel(net, bucket_cap_mb=cap, unused_parameters="allow", reduce_dtype=reduce_dtype)
    rtol, atol = (1e-9, 1e-15) if reduce_dtype is None else (1e-2, 1e-3)
    exchanged: list[bool] = []
    fill = ControlBlock.fill

    def counted(*arguments: Any, **options: Any) -> Tensor:
        exchanged.append(True)
        return fill(*arguments, **options)

    plan = []
    # Run the twin first: an unwrapped backward between two steps would trigger a comparison of replicas.
    for step in range(2 * USUAL_STEPS + 8):
        happens = surprise if step in (4, 5 + USUAL_STEPS) else ""
        on = [happens if rank == world.size - 1 or happens in ON_ALL_RANKS else "" for rank in range(world.size)]
        weights = [1.0 + rank if happens == "weight" else 1.0 for rank in range(world.size)]
        losses = [twin(data(rank, step), on[rank]).square() for rank in range(world.size)]
        whole = torch.stack([loss.sum() if happens == "weight" else loss.mean() for loss in losses])
        (whole.sum() / sum(weights)).backward()
        plan.append((happens, on, weights, [parameter.grad for parameter in twin.parameters()]))
        twin.zero_grad()
    results: list[tuple[bool, bool]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ControlBlock, "fill", counted)
        for step, (happens, on, weights, expected_gradients) in enumerate(plan):
            exchanged.clear()
            with model.weight(weights[world.rank]) if happens == "weight" else nullcontext():
                out = model(data(world.rank, step), on[world.rank])
                (out.square().sum() if happens == "weight" else out.square().mean()).backward()
            same = all(
                torch.allclose(ours.grad, theirs, rtol=rtol, atol=atol)
                for ours, theirs in zip(net.parameters(), expected_gradients, strict=True)
                if ours.grad is not None and theirs is not None
            )
            results.append((same, bool(exchanged)))
            model.zero_grad()
    return results


def expected(surprise: str) -> list[tuple[bool, bool]]:
    """Expect exchanges in the first step, after steps 1, 3, 7, … to compare replicas, and after each surprise."""
    surprises = [4, 5 + USUAL_STEPS] if surprise else []
    exchanges = {0, 1, 3, 7, 15, 31, *(step + more for step in surprises for more in range(USUAL_STEPS + 1))}
    return [(True, step in exchanges) for step in range(2 * USUAL_STEPS + 8)]


ROWS = [("pools", 3, 25.0, surprise) for surprise in ("", "absent", "late")]
ROWS += [("gloo", 2, 3e-4, surprise) for surprise in ("late", *ON_ALL_RANKS)]


@pytest.mark.parametrize(("backend", "size", "cap", "surprise"), ROWS)
def test_control_blocks_are_exchanged_only_if_a_rank_has_something_to_report(
    request: pytest.FixtureRequest, backend: str, size: int, cap: float, surprise: str
) -> None:
    for rank, results in enumerate(request.getfixturevalue(backend).run(size, surprising_steps, surprise, cap)):
        if surprise == "late" and cap == 25.0:
            # No gradient is late for the last bucket, which fills at the end of backward. But checkpoints ran nested
            # backwards on the last rank in steps 4 and 21, which request a comparison two steps later. All ranks
            # compare in the step after that.
            assert results == [(True, step in {0, 1, 3, 6, 7, 15, 23, 24}) for step in range(2 * USUAL_STEPS + 8)]
        else:
            assert results == expected("" if surprise in ON_ALL_RANKS else surprise), f"rank {rank}"


def test_weights_with_float16_buckets_need_no_exchange(pools: Pools) -> None:
    """Float16 buckets are scaled by the weights after the sum; the digest carries the weights as usual."""
    for rank, results in enumerate(pools.run(3, surprising_steps, "weight", 25.0, torch.float16)):
        assert results == expected(""), f"rank {rank}"


def train_with_recording(world: World, recording: list[int], cap: float) -> tuple[list[bytes], int]:
    """Return gradients of steps with the ranks `who` recording every other step."""
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net, bucket_cap_mb=cap)
    fills: list[int] = []
    gradients = []
    with pytest.MonkeyPatch.context() as patch:
        fill = ControlBlock.fill
        patch.setattr(ControlBlock, "fill", lambda *a, **o: (fills.append(1), fill(*a, **o))[1])
        for step in range(8):
            recorder.on = world.rank in recording and step % 2 == 1
            try:
                model(data(world.rank, step), "").square().mean().backward()
            finally:
                recorder.on = False
            gradients.append(b"".join(parameter.grad.numpy().tobytes() for parameter in net.parameters()))
            model.zero_grad()
    recorder.spans.clear()
    return gradients, len(fills)


@pytest.mark.parametrize("cap", [25.0, 3e-4])
def test_recording_on_some_ranks_does_not_change_the_bits(pools: Pools, cap: float) -> None:
    results = [pools.run(3, train_with_recording, recording, cap) for recording in ([], [1, 2], [0, 1, 2])]
    (gradients, fills), *_ = results[0]
    assert fills == 4  # in the first step, and to compare replicas after steps 1, 3 and 7
    for result in results:
        assert result == [(gradients, 4)] * 3


def train_with_an_extra_step(world: World, cap: float) -> list[str]:
    """Return the error of each backward when the last rank takes an extra optimizer step after the third."""
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net, bucket_cap_mb=cap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    errors = []
    for step in range(5):
        try:
            model(data(world.rank, step), "").square().mean().backward()
            errors.append("")
        except DesyncError as error:
            errors.append(str(error))
        optimizer.step()
        if step == 2 and world.rank == world.size - 1:
            optimizer.step()
        optimizer.zero_grad()
    return errors


@pytest.mark.parametrize(("size", "cap"), [(2, 25.0), (4, 3e-4)])
def test_rank_ahead_of_the_others_is_named_in_the_same_step(pools: Pools, size: int, cap: float) -> None:
    for errors in pools.run(size, train_with_an_extra_step, cap):
        assert errors[:3] == [""] * 3
        assert errors[3].startswith("ranks differ: rank")
        assert f"rank {size - 1} has 4 optimizer steps" in errors[3]


def train_partly_frozen(world: World) -> list[int]:
    """Return the number of sums launched in each step, with the module frozen in every other step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=3e-4, init_sync=False)
    launched, sums = [], []
    model(data(world.rank, 0), "").square().mean().backward()
    channel = channel_of(model)
    with pytest.MonkeyPatch.context() as patch:
        launcher = channel.launcher
        patch.setattr(channel, "launcher", lambda *a, **o: lambda: (sums.append(1), launcher(*a, **o)())[1])
        for step in range(1, 7):
            model.requires_grad_(step % 2 == 0)
            x = data(world.rank, step).requires_grad_()
            sums.clear()
            model(x, "").square().mean().backward()
            assert x.grad is not None
            launched.append(len(sums))
            model.zero_grad()
    return launched


def test_backward_through_a_frozen_module_launches_no_collectives(pools: Pools) -> None:
    # Like a discriminator in the generator's step.
    for launched in pools.run(2, train_partly_frozen):
        assert launched == [0, 4] * 3


# -- control blocks ----------------------------------------------------------------------------------------------------


NAMES = ["a", "b.weight", "b.bias"]
NOTHING: tuple[list[int], list[int], list[int]] = ([], [], [])


def exchange(*ranks: tuple[list[int], list[int], list[int], Status]) -> list[ControlBlock]:
    """Return blocks after the sum over ranks; each rank passes absent, non-finite, late and status."""
    blocks = [ControlBlock(NAMES, rank, len(ranks)) for rank in range(len(ranks))]
    total = torch.stack([block.fill(*mine).clone() for block, mine in zip(blocks, ranks, strict=True)]).sum(0)
    for block in blocks:
        block.vector.copy_(total)
    return blocks


def statuses(*status: Status) -> list[ControlBlock]:
    return exchange(*[(*NOTHING, rank_status) for rank_status in status])


def messages(blocks: list[ControlBlock], kind: type[Exception] = DesyncError) -> list[str]:
    result = []
    for block in blocks:
        with pytest.raises(kind) as caught:
            block.check(block.statuses())
        result.append(str(caught.value))
    return result


@pytest.mark.parametrize(
    ("field", "values", "expected"),
    [
        ("forwards",        [2, 1, 1], "rank 0 has 2, ranks 1, 2 have 1 steps with a forward pass in training mode"),
        ("optimizer_steps", [3, 3, 4], "ranks 0, 1 have 3, rank 2 has 4 optimizer steps"),
    ],
)  # fmt: skip
def test_a_difference_names_ranks_and_values_on_every_rank(field: str, values: list[int], expected: str) -> None:
    for message in messages(statuses(*[Status(**{field: value}) for value in values])):
        assert message.startswith(f"ranks differ: {expected}; ")


@pytest.mark.parametrize(
    ("weightings", "named"), [([WEIGHTED, UNWEIGHTED, 0], "rank 1"), ([WEIGHTED | UNWEIGHTED] * 2, "ranks 0, 1")]
)
def test_unweighted_ranks_are_named(weightings: list[int], named: str) -> None:
    for message in messages(statuses(*[Status(weighting=weighting) for weighting in weightings])):
        assert f"{named} averaged gradients computed outside model.weight()" in message


def test_non_finite_names_ranks_and_parameters() -> None:
    blocks = exchange(([], [1], [], Status()), ([], [], [], Status()), ([], [1, 2], [], Status()))
    for message in messages(blocks, NonFiniteGradient):
        assert "on ranks 0, 2, in 'b.weight', 'b.bias' (2 of 3 parameters)" in message


@pytest.mark.parametrize(
    ("weights", "weighting", "expected"),
    [
        ([0, 0],       [UNWEIGHTED, UNWEIGHTED], 1 / 2),
        ([0, 0, 0],    [0, 0, 0],                1 / 3),
        ([3, 5],       [WEIGHTED, WEIGHTED],     1 / 8),
        ([3, 0],       [WEIGHTED, 0],            1 / 3),
        ([0, 0],       [WEIGHTED, WEIGHTED],     0.0),
        ([0.5, 0.25],  [WEIGHTED, WEIGHTED],     1 / 0.75),
    ],
)  # fmt: skip
def test_scale(weights: list[float], weighting: list[int], expected: float) -> None:
    pairs = list(zip(weights, weighting, strict=True))
    assert compute_scale(pairs) == pytest.approx(expected, rel=1e-15)


ORIGIN = Origin(*(2**52 + number for number in range(len(Origin._fields))))


def test_every_status_field_is_transmitted() -> None:
    """A new field must survive the conversion to float64; its default determines its type."""
    for name, default in vars(Status()).items():
        value: Any = (not default) if isinstance(default, bool) else default + 3 if name != "data" else ORIGIN
        if name in ("non_finite", "idle"):
            continue  # counted by the block itself
        (block, _) = statuses(Status(**{name: value}), Status())
        assert getattr(block.statuses()[0], name) == value
        assert type(getattr(block.statuses()[0], name)) is type(default)


@pytest.mark.parametrize("section", range(4), ids=["absent", "non-finite", "late", "sparse"])
def test_a_step_is_usual_only_if_no_rank_reports_a_parameter(section: int) -> None:
    """Shortcuts for usual steps are disabled once any rank has something to report, and used again afterwards."""
    blocks = [ControlBlock(NAMES, rank, 2) for rank in range(2)]

    def is_usual(*marked: int) -> bool:
        """Return whether a step counts as usual if rank 1 reports the parameters `marked`."""
        mine: list[list[int]] = [[], [], [], []]
        mine[section] = list(marked)
        absent, unclean, late, sparse = mine
        parts = blocks[0].fill([], [], [], Status()), blocks[1].fill(absent, unclean, late, Status(), sparse)
        total = parts[0] + parts[1]
        for block in blocks:
            block.vector.copy_(total)
        assert blocks[0].is_usual() == blocks[1].is_usual()
        return blocks[0].is_usual()

    assert [is_usual(), is_usual(2), is_usual()] == [True, False, True]


def test_equal_reports_of_a_usual_step_are_read_unchanged() -> None:
    given = Status(3, 2, weight=2.5, weighting=WEIGHTED, data=ORIGIN)
    for block in statuses(given, given, given):
        assert block.statuses() == [given] * 3
        block.check(block.statuses())


# -- messages inside join ----------------------------------------------------------------------------------------------


BACKWARD, LAYER = Message(Event.BACKWARD), Message(Event.LAYER, 3, 17)
WRAPPER = event_number("12")


def maximum(*messages: Message | None, wrappers: list[int] | None = None) -> Tensor:
    """Simulate the collective on the messages of all ranks."""
    size = len(messages)
    wrappers = wrappers or [WRAPPER] * size
    rows = [encode(message, wrappers[rank], rank, size) for rank, message in enumerate(messages)]
    return torch.tensor(rows).amax(0)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ((BACKWARD, Message(Event.LOCAL)), "BACKWARD and LOCAL"),
        ((LAYER, None, Message(Event.LAYER, 2, 17)), "LAYER of layer 2 and LAYER of layer 3"),
        ((Message(Event.LAYER, 1, 5), Message(Event.LAYER, 1, 6)), "LAYER of layer 1 and LAYER of layer 1"),
    ],
)
def test_conflicting_messages_raise_desync_error(messages: tuple[Message | None, ...], words: str) -> None:
    with pytest.raises(DesyncError, match=words):
        decode(maximum(*messages))


def test_overlapping_steps_of_two_wrappers_are_refused() -> None:
    with pytest.raises(UsageError, match="one wrapper's step began before another's had ended"):
        decode(maximum(BACKWARD, None, wrappers=[WRAPPER, event_number("13")]))
