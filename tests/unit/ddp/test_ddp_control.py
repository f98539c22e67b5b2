from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from paceline.core.data_position import Origin
from paceline.ddp.control_block import ControlBlock, Status
from paceline.ddp.weights import UNWEIGHTED, WEIGHTED, compute_scale
from paceline.errors import DesyncError, NonFiniteGradient

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


def test_a_parameter_is_absent_only_if_no_rank_has_a_gradient() -> None:
    blocks = exchange(([0, 2], [], [], Status()), ([1, 2], [], [], Status()), ([2], [], [], Status()))
    assert [block.absent_everywhere() for block in blocks] == [[2]] * 3


def test_gradient_late_on_any_rank_counts_as_late() -> None:
    blocks = exchange(([], [], [1], Status()), ([], [], [1, 2], Status()))
    assert [block.second_pass() for block in blocks] == [([], [1, 2])] * 2


@pytest.mark.parametrize(
    ("absent", "sparse", "late", "expected"),
    [
        (([], []), ([1], [1]), ([], []), ([1], [])),
        (([], [1]), ([1], []), ([], []), ([1], [])),  # one rank has no gradient, which counts as zero
        (([], []), ([1], []), ([], []), ([], [1])),  # the other rank's gradient is dense
        (([], []), ([1], [1]), ([2], []), ([1], [2])),
        (([1], [1]), ([], []), ([], []), ([], [])),
    ],
)
def test_an_average_is_sparse_if_all_gradients_are(absent: Any, sparse: Any, late: Any, expected: Any) -> None:
    ranks = [ControlBlock(NAMES, rank, 2) for rank in range(2)]
    filled = [
        block.fill(absent[rank], [], late[rank], Status(), sparse[rank]).clone() for rank, block in enumerate(ranks)
    ]
    for block in ranks:
        block.vector.copy_(sum(filled))
        assert block.second_pass() == expected


def test_every_rank_reads_all_reports() -> None:
    given = [Status(3, 2, 2.5, WEIGHTED, 0, False), Status(4, 5, 0.0, 0, 0, True), Status()]
    for block in statuses(*given):
        assert block.statuses() == given


def test_large_counts_survive_the_sum() -> None:
    count = 2**52 + 1
    assert statuses(Status(forwards=count), Status())[1].statuses()[0].forwards == count


def test_filling_a_block_overwrites_its_previous_contents() -> None:
    block = ControlBlock(NAMES, 1, 2)
    block.fill([0], [1], [2], Status(forwards=9, aborted=True))
    clean = ControlBlock(NAMES, 1, 2)
    assert torch.equal(block.fill([], [], [], Status()), clean.fill([], [], [], Status()))


def test_equal_ranks_pass_the_check() -> None:
    status = Status(forwards=5, optimizer_steps=4, weighting=WEIGHTED)
    for block in statuses(status, Status(**{**vars(status), "weight": 7.0})):
        block.check(block.statuses())


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


def test_unweighted_ranks_are_named() -> None:
    weighed, not_weighed = Status(weighting=WEIGHTED), Status(weighting=UNWEIGHTED)
    for message in messages(statuses(weighed, not_weighed, Status())):
        assert re.search(r"rank 1 averaged gradients computed outside model\.weight\(\)", message)


def test_aborted_rank_is_named_only_by_the_other_ranks() -> None:
    first, second, third = statuses(Status(), Status(aborted=True), Status())
    second.check(second.statuses())
    assert messages([first, third]) == [
        f"rank {rank}: backward was ended by an exception on rank 1, so the gradients of this step are incomplete; "
        "see that rank's own error; to continue training, skip this step on every rank"
        for rank in (0, 2)
    ]


def test_no_error_if_all_ranks_aborted() -> None:
    for block in statuses(Status(aborted=True, forwards=1), Status(aborted=True, forwards=2)):
        block.check(block.statuses())


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
    given = Status(3, 2, 1, 7, 2.5, WEIGHTED, data=ORIGIN)
    for block in statuses(given, given, given):
        assert block.statuses() == [given] * 3
        block.check(block.statuses())


def test_mixed_weighting_is_reported_even_if_all_ranks_agree() -> None:
    both = Status(weighting=WEIGHTED | UNWEIGHTED)
    for message in messages(statuses(both, both)):
        assert re.search(r"ranks 0, 1 averaged gradients computed outside model\.weight\(\)", message)


def test_block_works_the_same_without_the_arrival_order() -> None:
    block = ControlBlock(NAMES, 0, 1)
    block.fill([], [], [], Status(forwards=1), (), [2, 0, 1])
    assert block.order() == [2, 0, 1]
    block.forget_order()
    assert block.fill([1], [], [], Status(forwards=2)).tolist()[:3] == [1, 0, 1]
    assert (block.absent_everywhere(), block.statuses()[0].forwards) == ([1], 2)
