"""``paceline explain collectives``: the drawn states match the inputs and outputs of torch's calls."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline.tools.explain.buckets import BANDWIDTH, LATENCY
from paceline.tools.explain.collectives import BEFORE_2_13, Collective, collectives, outcome, states
from paceline.tools.explain.drawing import Cell
from paceline.tools.explain.explain_command import MOST_RANKS


def numbers(cells: list[Cell], row_of: list[int]) -> torch.Tensor:
    """Return a rank's rows as numbers: 2^r + 1000 c for chunk c of rank r, 0 if empty."""
    return torch.tensor(
        [sum(2**rank + 1000 * row for rank in cell.terms) for cell, row in zip(cells, row_of, strict=True)]
    )


def letters(collective: Collective, cells: list[Cell]) -> list[int]:
    """Return the chunk in each row: the row index, or the letter in an all-to-all."""
    is_exchange = collective.schedule.result == "all-to-all"
    return [ord(cell.label[0]) - 65 if is_exchange else row for row, cell in enumerate(cells)]


def called(collective: Collective, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return this rank's result of the call shown below the picture, on the picture's data."""
    part = tensor[rank : rank + 1].clone()
    given = {"tensor": tensor, "part": part, "input": tensor, "output": torch.zeros_like(tensor)}
    name, _, arguments = collective.call.partition("(")
    name = name if hasattr(dist, name) else BEFORE_2_13[name]
    eval(f"dist.{name}({arguments}", {"dist": dist}, given)
    if collective.schedule.result == "reduce-scatter":
        return torch.zeros_like(tensor).index_put_((torch.tensor([rank]),), given["part"])
    return given["output"] if collective.schedule.result == "all-to-all" else tensor


@pytest.mark.ranks(4)
def test_picture_matches_the_torch_call() -> None:
    rank = dist.get_rank()
    for collective in collectives(4):
        start, *_, end = (state[rank] for state in states(collective.schedule))
        given = numbers(start, letters(collective, start))
        result = called(collective, given, rank)
        if collective.schedule.result != "reduce" or rank == 0:  # torch leaves the others' tensors undefined
            assert torch.equal(result, numbers(end, letters(collective, end))), collective.schedule.name


@pytest.mark.parametrize("size", [1, MOST_RANKS])
def test_all_to_all_ends_transposed_and_swaps_each_pair_once(size: int) -> None:
    schedule = collectives(size)[-1].schedule
    start, *_, end = states(schedule) * 2
    for rank in range(size):
        for row in range(size):
            assert start[rank][row].terms == (rank,)
            assert end[rank][row].terms == (row,)
            assert start[rank][row].label == end[row][rank].label
    pairs = [(message.src, message.dst) for step in schedule.steps for message in step]
    assert sorted(pairs) == [(rank, other) for rank in range(size) for other in range(size) if rank != other]


@pytest.mark.parametrize("size", [2, MOST_RANKS])
def test_bytes_and_times_match_the_cost_model(size: int) -> None:
    mib, most, share = 25.0, size.bit_length() - 1, (size - 1) / size
    laws = {
        "broadcast": (most, most, most, 1),
        "reduce": (most, most, 1, most),
        "all-reduce": (2 * (size - 1), 2 * share, 2 * share, 2 * share),
        "reduce-scatter": (size - 1, share, share, share),
        "all-gather": (size - 1, share, share, share),
        "all-to-all": (size - 1, share, share, share),
    }
    assert [collective.schedule.result for collective in collectives(size)] == list(laws)
    for collective in collectives(size):
        messages, tensors, sent, received = laws[collective.schedule.result]
        seconds = messages * LATENCY + tensors * mib * 2**20 / BANDWIDTH
        said = outcome(collective)
        assert f": {1000 * seconds:.1f} ms in {messages} step" in said
        assert f" up to {mib * sent:.4g} " in said
        assert f" up to {mib * received:.4g} MiB" in said
