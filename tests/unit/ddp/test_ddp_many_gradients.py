from __future__ import annotations

import torch
from torch import nn

from paceline.ddp.reducer.gradients import any_missing, are_dense, gradients_of, none_has_gradient, present


def parameters(*gradients: torch.Tensor | None) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(2)) for _ in gradients]
    for parameter, gradient in zip(made, gradients, strict=True):
        parameter.grad = gradient
    return made


ONE, SPARSE = torch.ones(2), torch.ones(2).to_sparse()


def test_gradients_are_dense_only_if_all_are_there_and_strided() -> None:
    table = [([], True), ([ONE], True), ([ONE, None], False), ([None], False), ([ONE, SPARSE], False)]
    assert [are_dense(gradients) for gradients, _ in table] == [expected for _, expected in table]


def test_a_tensor_of_zeros_is_not_missing() -> None:
    """Gradients are compared with None by identity: a tensor says something else of ==."""
    assert [any_missing([torch.zeros(2)]), any_missing([ONE, None]), any_missing([])] == [False, True, False]


def test_what_is_present_is_known_by_its_place() -> None:
    made = parameters(None, ONE, None)
    assert present(made) == {1: made[1].grad}
    assert gradients_of(made) == [None, made[1].grad, None]
    assert [none_has_gradient(made), none_has_gradient(parameters(None, None))] == [False, True]
    assert present(parameters(None, None)) == {}
