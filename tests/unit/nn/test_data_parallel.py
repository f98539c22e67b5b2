"""DataParallel compared with the plain module on the whole batch."""

from __future__ import annotations

import copy
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline import DataParallel
from paceline.errors import UsageError

Pair = namedtuple("Pair", "first second")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(rows: int = 7) -> Tensor:
    return torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_outputs_gradients_and_steps_equal_the_plain_module(replicas: int) -> None:
    alone = net()
    model = DataParallel(copy.deepcopy(alone), replicas=replicas)
    optimizers = [torch.optim.Adam(module.parameters(), 0.01) for module in (alone, model)]
    for step in range(3):
        x = batch(6 + step)
        ours, expected = model(x), alone(x)
        # Rounding in matrix kernels may depend on the number of rows.
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
        for output, optimizer in zip((expected, ours), optimizers, strict=True):
            optimizer.zero_grad()
            output.square().mean().backward()
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(model.module.get_parameter(name).grad, parameter.grad, rtol=1e-9, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.rnn = nn.LSTM(5, 5, batch_first=True)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))])

    def forward(self, tokens: Tensor, *, mask: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embed(tokens) * self.scales[0] * self.scales[1])
        logits: Tensor = self.head(hidden) * mask[..., None]
        return logits


def test_tied_weights_recurrent_layers_and_parameter_lists_get_gradients() -> None:
    torch.manual_seed(0)
    alone = Tied()
    model = DataParallel(copy.deepcopy(alone), replicas=3)
    tokens, mask = torch.randint(11, (5, 4)), torch.ones(5, 4)
    for module in (alone, model):
        module(tokens, mask=mask).logsumexp(-1).sum().backward()
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(model.module.get_parameter(name).grad, parameter.grad)


def test_the_first_replica_keeps_running_statistics_as_in_torch() -> None:
    model = DataParallel(nn.BatchNorm1d(6).double(), replicas=2)
    model(batch(8))
    expected = nn.BatchNorm1d(6).double()
    expected(batch(8)[:4])
    torch.testing.assert_close(model.module.running_mean, expected.running_mean)


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: list[tuple[bool, bool, bool, torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        self.seen.append((*modes, torch.get_autocast_dtype("cpu")))
        return x * self.weight


@pytest.mark.parametrize(
    "mode",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16), torch.enable_grad],
)
def test_threads_inherit_the_callers_modes(mode: Any) -> None:
    model = DataParallel(Modes(), replicas=3)
    with mode():
        model(torch.ones(3, 1))
    assert len(model.module.seen) == 3
    assert len(set(model.module.seen)) == 1


class FailsOn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 2:
            raise ValueError(f"a row holds {x.max():g}")
        return x


def test_a_replicas_error_is_raised_and_the_next_batch_works() -> None:
    model = DataParallel(FailsOn(), replicas=2)
    with pytest.raises(ValueError, match="a row holds 5"):
        model(torch.tensor([1.0, 5.0]))
    assert model(torch.tensor([1.0, 2.0])).tolist() == [1, 2]


def test_checkpoints_and_unwrapping_match_torch_dataparallel() -> None:
    model = DataParallel(net(), replicas=2)
    assert isinstance(model, nn.DataParallel)
    assert set(model.state_dict()) == set(nn.DataParallel(net()).state_dict())
    assert paceline.unwrap(model) is model.module
    assert torch.equal(copy.deepcopy(model)(batch()), model(batch()))


@pytest.mark.parametrize("number", [0, True])
def test_bad_numbers_of_replicas_are_refused(number: int) -> None:
    with pytest.raises(UsageError, match=f"replicas must be a whole number >= 1, not {number}"):
        DataParallel(net(), replicas=number)


def test_a_module_on_another_device_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'0\.weight' is on meta, .* use torch\.nn\.DataParallel on GPUs"):
        DataParallel(net().to("meta"), replicas=2)
