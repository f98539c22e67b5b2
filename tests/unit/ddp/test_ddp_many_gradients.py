from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.core import torch_internals
from paceline.ddp import arrivals as many
from paceline.ddp.arrivals import copy_into, grads_are_none, present
from paceline.ddp.buckets import Bucket


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


def test_present_gradients_are_keyed_by_position() -> None:
    created = parameters(None, ONE, None)
    assert present(created) == {1: created[1].grad}
    assert [grads_are_none(created), grads_are_none(parameters(None, None))] == [False, True]
    assert present(parameters(None, None)) == {}
