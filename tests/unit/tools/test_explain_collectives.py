"""``paceline explain collectives``: what is drawn before and after is what torch's calls take and give."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.distributed as dist

from paceline.tools.explain.pictures import panels
from paceline.tools.explain.pictures.collectives import Collective, Part, collectives, states
from paceline.tools.explain.pictures.ring_exchange import free_lanes
from paceline.tools.explain.pictures.scene import MOST_RANKS
from paceline.tools.explain.pictures.timeline import BANDWIDTH, LATENCY

RANKS = [1, 2, 3, 4, 6, MOST_RANKS]


def numbers(parts: list[Part | None]) -> torch.Tensor:
    """A rank's rows as numbers: chunk c of rank r is 2^r + 1000 c, and an empty one is 0."""
    return torch.tensor([sum(2**rank + 1000 * part.chunk for rank in part.terms) if part else 0 for part in parts])


def called(collective: Collective, rows: list[Part | None], rank: int) -> torch.Tensor:
    """What a rank holds after the call below the picture, made with the data of the picture."""
    tensor = numbers(rows)
    part = tensor[rank : rank + 1].clone()
    given = {"tensor": tensor, "part": part, "input": tensor, "output": torch.zeros_like(tensor)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer torches have other names, which older ones lack
        eval(f"dist.{collective.call}", {"dist": dist}, given)
    if collective.name == "reduce-scatter":
        return torch.zeros_like(tensor).index_put_((torch.tensor([rank]),), given["part"])
    return given["output"] if collective.name == "all-to-all" else tensor


@pytest.mark.ranks(4)
def test_the_picture_shows_what_torchs_call_does() -> None:
    rank = dist.get_rank()
    for collective in collectives(4):
        found = states(collective)
        if collective.name == "reduce" and rank != 0:  # torch promises nothing of the other ranks' tensors
            called(collective, found[0][rank], rank)
            continue
        assert torch.equal(called(collective, found[0][rank], rank), numbers(found[-1][rank])), collective.name


@pytest.mark.parametrize("size", RANKS)
def test_the_all_to_all_ends_transposed_and_each_pair_swaps_once(size: int) -> None:
    collective = collectives(size)[-1]
    found = states(collective)
    for rank in range(size):
        for row in range(size):
            start, end = found[0][rank][row], found[-1][rank][row]
            assert start is not None
            assert start[:2] == (row, (rank,))
            assert end is not None
            assert end[:2] == (rank, (row,))
    pairs = [(one.src, one.dst) for step in collective.schedule.steps for one in step]
    assert sorted(pairs) == [(rank, other) for rank in range(size) for other in range(size) if rank != other]


@pytest.mark.parametrize("size", [2, 4, 8, MOST_RANKS])
def test_bytes_and_times_are_the_laws_of_the_cost_model(size: int) -> None:
    nbytes, most = 25 * 2**20, size.bit_length() - 1
    share = (size - 1) / size
    laws = {
        "broadcast": (most, most, most, 1),
        "reduce": (most, most, 1, most),
        "all-reduce": (2 * (size - 1), 2 * share, 2 * share, 2 * share),
        "reduce-scatter": (size - 1, share, share, share),
        "all-gather": (size - 1, share, share, share),
        "all-to-all": (size - 1, share, share, share),
    }
    assert [one.name for one in collectives(size)] == list(laws)
    for collective in collectives(size):
        messages, tensors, sent, received = laws[collective.name]
        assert collective.seconds() == pytest.approx(messages * LATENCY + tensors * nbytes / BANDWIDTH)
        assert collective.moved() == pytest.approx((sent * nbytes, received * nbytes))


@pytest.mark.parametrize("size", [2, 4, 7, MOST_RANKS])
def test_arrows_in_one_lane_do_not_touch(size: int) -> None:
    for step in (step for collective in collectives(size) for step in collective.schedule.steps):
        drawn = free_lanes(step)
        assert {one for one, _ in drawn} == set(step)
        spans = [(lane, min(one.src, one.dst), max(one.src, one.dst)) for one, lane in drawn]
        for number, (lane, low, high) in enumerate(spans):
            assert not [1 for other, first, last in spans[:number] if other == lane and first < high and low < last]


@pytest.mark.parametrize("size", [2, 4, MOST_RANKS])
def test_a_load_flies_to_where_the_next_frame_frames_it(size: int) -> None:
    for collective, scene in zip(collectives(size), panels.scenes(size), strict=True):
        assert [frame.title for frame in (scene.frames[0], scene.frames[-1])] == ["before", "after"]
        for number, frame in enumerate(scene.frames[1:-1], start=1):
            flown = re.findall(
                r'--dx: (-?[\d.]+)px; --dy: (-?[\d.]+)px"><use href="#[^"]+" x="([\d.]+)" y="([\d.]+)"', frame.moving
            )
            board = panels.Panels(collective, is_small=False)
            came = {
                board.at(1, rank, row)
                for rank, parts in enumerate(states(collective)[number])
                for row, part in enumerate(parts)
                if part and part.came
            }
            assert {(round(float(x) + float(dx), 2), round(float(y) + float(dy), 2)) for dx, dy, x, y in flown} == {
                (round(x, 2), round(y, 2)) for x, y in came
            }


def test_one_rank_has_nothing_to_send() -> None:
    assert all("One rank has nothing to send." in scene.summary for scene in panels.scenes(1))
