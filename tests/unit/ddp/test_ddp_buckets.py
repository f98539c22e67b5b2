from __future__ import annotations

import pytest
import torch

from paceline.ddp.buckets import Bucket, arrival_order, assign, overlap


@pytest.mark.parametrize(
    ("sizes", "kinds", "order", "capacities", "expected"),
    [
        # sizes            kinds     order            capacities  expected
        ([4, 4, 4],        "aaa",    [2, 1, 0],       [100],      [[2, 1, 0]]),
        ([4, 4, 4],        "aaa",    [2, 1, 0],       [4],        [[2], [1], [0]]),
        ([4, 4, 4],        "aaa",    [2, 1, 0],       [5],        [[2, 1], [0]]),
        ([4, 4, 4],        "aaa",    [2, 1, 0],       [8],        [[2, 1], [0]]),
        ([4, 4, 4, 4],     "aaaa",   [3, 2, 1, 0],    [4, 12],    [[3], [2, 1, 0]]),
        ([4, 4, 4, 4],     "aaaa",   [3, 2, 1, 0],    [4, 8, 1],  [[3], [2, 1], [0]]),
        ([99, 4],          "aa",     [0, 1],          [8],        [[0], [1]]),
        ([4, 99],          "aa",     [0, 1],          [8],        [[0, 1]]),
        ([0, 0],           "aa",     [1, 0],          [1],        [[1, 0]]),
        ([4, 4, 4, 4],     "abab",   [3, 2, 1, 0],    [100],      [[3, 1], [2, 0]]),
        ([4, 4, 4, 4],     "abba",   [3, 2, 1, 0],    [100],      [[2, 1], [3, 0]]),
        ([4, 4, 4, 4],     "abab",   [3, 2, 1, 0],    [8],        [[3, 1], [2, 0]]),
        ([4, 4, 4, 4],     "aabb",   [0, 2, 1, 3],    [4],        [[0], [2], [1], [3]]),
        ([],               "",       [],              [8],        []),
    ],
)  # fmt: skip
def test_assign(
    sizes: list[int], kinds: str, order: list[int], capacities: list[int], expected: list[list[int]]
) -> None:
    assert assign(sizes, kinds, order, capacities) == expected


@pytest.mark.parametrize(
    ("observed", "count", "expected"),
    [
        ([2, 1, 0],       3, [2, 1, 0]),
        ([0, 2, 1],       3, [0, 2, 1]),
        ([1],             4, [1, 3, 2, 0]),
        ([],              3, [2, 1, 0]),
        ([1, 0, 1],       2, [0, 1]),      # arrived twice: the last arrival counts
        ([2, 2, 0, 2, 1], 3, [0, 2, 1]),
    ],
)  # fmt: skip
def test_arrival_order(observed: list[int], count: int, expected: list[int]) -> None:
    assert arrival_order(observed, count) == expected


def test_views_fill_the_bucket_in_order_without_gaps() -> None:
    parameters = [torch.zeros(2, 3), torch.zeros(()), torch.zeros(4)]
    bucket = Bucket.allocate([2, 0, 1], parameters)
    bucket.flat.copy_(torch.arange(11.0))
    assert bucket.flat.numel() == 11
    assert [view.reshape(-1).tolist() for view in bucket.views] == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9], [10]]
    assert [view.shape for view in bucket.views] == [parameters[i].shape for i in (2, 0, 1)]


@pytest.mark.parametrize(
    ("parameter", "keeps_strides"),
    [
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(3, 2).t(), True),
        (torch.zeros(2, 3, 4).permute(2, 0, 1), True),
        (torch.zeros(1, 3, 1, 1).to(memory_format=torch.channels_last), True),
        (torch.zeros(4, 6)[:, ::2], False),
        (torch.zeros(3).expand(2, 3), False),
        (torch.zeros(2, 0), False),
    ],
)
def test_view_keeps_the_strides_of_a_dense_parameter(parameter: torch.Tensor, keeps_strides: bool) -> None:
    (view,) = Bucket.allocate([0], [parameter]).views
    assert view.shape == parameter.shape
    assert (view.stride() == parameter.stride()) or not keeps_strides
    view.copy_(torch.arange(float(view.numel())).view(view.shape))
    assert torch.equal(view, torch.arange(float(view.numel())).view(view.shape))


def test_buckets_do_not_share_memory() -> None:
    parameters = [torch.zeros(3), torch.zeros(3)]
    first, second = Bucket.allocate([0], parameters), Bucket.allocate([1], parameters)
    first.views[0].fill_(1)
    assert second.flat.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("backward", "reduce", "when_full", "begin", "end", "exposed"),
    [
        # backward    reduce      when full  begin        end           exposed
        ([2, 3, 4],   [1, 1, 1],  True,      (2, 5, 9),   (3, 6, 10),   1),
        ([2, 3, 4],   [1, 1, 1],  False,     (9, 10, 11), (10, 11, 12), 3),
        ([1, 1, 1],   [5, 5, 5],  True,      (1, 6, 11),  (6, 11, 16),  13),
        ([1, 1, 1],   [5, 5, 5],  False,     (3, 8, 13),  (8, 13, 18),  15),
        ([4, 1, 1],   [3, 1, 1],  True,      (4, 7, 8),   (7, 8, 9),    3),
        ([2, 2],      [0, 0],     True,      (2, 4),      (2, 4),       0),
        ([7],         [2],        True,      (7,),        (9,),         2),
    ],
)  # fmt: skip
def test_each_bucket_waits_for_the_previous_one(
    backward: list[float], reduce: list[float], when_full: bool, begin: tuple[float, ...], end: tuple[float, ...],
    exposed: float,
) -> None:  # fmt: skip
    timeline = overlap(backward, reduce, when_full)
    assert (timeline.begin, timeline.end, timeline.exposed) == (begin, end, exposed)
