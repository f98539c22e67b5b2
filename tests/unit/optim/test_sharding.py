"""A sharded optimizer accepts only classes that update each tensor separately; which rank updates which slice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drawn import draws
from insides import cut_evenly, deal_out
from paceline.errors import UsageError
from paceline.optim import ShardedOptimizer


class Marked(torch.optim.Optimizer):
    """Scales updates by a factor set on the parameter, and declares that it updates each tensor separately."""

    updates_tensors_separately = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] * getattr(parameter, "factor", 1.0))


class Undeclared(Marked):
    """A subclass without its own declaration, which may change the update."""


class Configured(torch.optim.Rprop):
    """Differs only in its defaults."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr, etas=(0.6, 1.1))


class Clipped(torch.optim.AdamW):
    """Clips by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([parameter for group in self.param_groups for parameter in group["params"]], 0.1)
        return super().step(closure)


class Collected(torch.optim.Adam):
    """Changes the inputs of the update, not the update itself."""

    def _init_group(self, *arguments: Any, **options: Any) -> Any:
        return super()._init_group(*arguments, **options)  # type: ignore[no-untyped-call]


class Scaling:
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)  # type: ignore[misc]


class Mixed(Scaling, torch.optim.SGD):  # type: ignore[misc]
    pass


def refused(net: nn.Module, kind: Any, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        ShardedOptimizer(net, kind, **options)
    return str(caught.value)


@pytest.mark.parametrize("kind", [Marked, Configured, torch.optim.Adafactor, torch.optim.Muon, torch.optim.Adam])
def test_classes_that_update_each_tensor_separately_are_accepted(kind: Any) -> None:
    net = nn.Linear(4, 4, bias=False)
    for _ in range(2):  # the first instance makes torch wrap the step() of its class, but not that of a base class
        assert ShardedOptimizer(net, kind, by="tensor").optimizer_class is kind
    if kind is not torch.optim.Adam:  # an element's update may need the whole tensor
        assert 'give by="tensor"' in refused(net, kind)


@pytest.mark.parametrize("kind", [Undeclared, Clipped, Collected, Mixed, torch.optim.LBFGS])
@pytest.mark.parametrize("by", ["element", "tensor"])
def test_other_classes_are_refused_naming_the_missing_declaration(kind: Any, by: str) -> None:
    message = f"{kind.__name__} may combine tensors in an update; use it without ShardedOptimizer"
    if kind is not torch.optim.LBFGS:
        message += ". If every parameter's update depends on that parameter alone, set "
        message += f"{kind.__name__}.updates_tensors_separately = True"
    assert refused(nn.Linear(4, 4), kind, by=by) == message


def test_a_class_that_needs_matrices_gets_parameter_shapes() -> None:
    with pytest.raises(ValueError, match=r"Muon only supports 2D parameters .*\[4\]"):
        ShardedOptimizer(nn.Linear(4, 4), torch.optim.Muon, by="tensor")


def test_parameter_attributes_reach_the_optimizer() -> None:
    net = nn.Linear(4, 4)
    net.weight.factor = 0.0  # type: ignore[assignment]
    before = net.weight.clone(), net.bias.clone()
    optimizer = ShardedOptimizer(net, Marked, by="tensor")
    net(torch.ones(4)).sum().backward()
    optimizer.step()
    assert torch.equal(net.weight, before[0])
    assert not torch.equal(net.bias, before[1])


# -- assignment of parameter slices to ranks ---------------------------------------------------------------------------


@draws(40)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=8), st.integers(1, 5), st.sampled_from([1, 2, 16]))
def test_every_element_has_one_owner_and_shards_differ_by_two_alignments(
    sizes: list[int], ranks: int, align: int
) -> None:
    pieces = cut_evenly(sizes, range(len(sizes)), ranks, align)
    for index, size in enumerate(sizes):
        ends = [0, *(each.stop for each in pieces if each.parameter == index)]
        assert ends[:-1] == [each.start for each in pieces if each.parameter == index]
        assert ends[-1] == size
    assert [each.owner for each in pieces] == sorted(each.owner for each in pieces)
    assert all(each.start % align == 0 for each in pieces)
    shares = [sum(each.numel for each in pieces if each.owner == owner) for owner in range(ranks)]
    assert max(shares) - min(shares) <= 2 * align


def test_whole_parameters_go_to_the_least_loaded_rank() -> None:
    loads = [0, 0]
    pieces = deal_out([5, 9, 3, 4], [0, 1, 2, 3], 2, loads)
    assert [(each.parameter, each.owner) for each in pieces] == [(0, 1), (1, 0), (2, 0), (3, 1)]
    assert loads == [12, 9]
