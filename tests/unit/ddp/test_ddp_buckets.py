from __future__ import annotations

import pytest
import torch
from torch import nn

from insides import Bucket, arrival_order, assign, copy_into, grads_are_none, overlap, torch_internals
from insides import arrivals as many


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


# -- copying gradients into a bucket -----------------------------------------------------------------------------------


def parameters(*gradients: torch.Tensor | None) -> list[nn.Parameter]:
    created = [nn.Parameter(torch.zeros(2)) for _ in gradients]
    for parameter, gradient in zip(created, gradients, strict=True):
        parameter.grad = gradient
    return created


ONE, SPARSE = torch.ones(2), torch.ones(2).to_sparse()


@pytest.mark.parametrize("large", [1, 2**20])
@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize(
    ("gradients", "are_copied"),
    [
        ([ONE], True),
        ([ONE, torch.zeros(2)], True),
        ([ONE, None], False),
        ([None], False),
        ([ONE, SPARSE], False),
        ([ONE, torch.ones(2).to_mkldnn()], False),
        ([ONE, torch.ones(3)], False),
    ],
)
def test_gradients_are_copied_together_only_if_all_are_present_dense_and_fitting(
    monkeypatch: pytest.MonkeyPatch,
    gradients: list[torch.Tensor | None],
    are_copied: bool,
    factor: float,
    large: int,
) -> None:
    for module in (torch_internals, many):
        monkeypatch.setattr(module, "LARGE", large)
    fit = [gradient is not None and gradient.shape == (2,) and not gradient.is_mkldnn for gradient in gradients]
    created = parameters(*(gradient if fits else None for gradient, fits in zip(gradients, fit, strict=True)))
    bucket = Bucket.allocate(list(range(len(created))), created)
    bucket.prescale = factor
    assert copy_into(bucket, gradients, created) is are_copied
    if are_copied:
        assert bucket.flat.tolist() == [factor * value for gradient in gradients for value in gradient.tolist()]
    assert grads_are_none(created) is (are_copied or gradients == [None])
