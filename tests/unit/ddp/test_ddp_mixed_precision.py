"""``mixed_precision``, and gradients that are too large or not finite."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from insides import storage_of
from paceline import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import NonFiniteGradient
from twins import Pools


class RecordsDtypes(nn.Module):
    """Tied layers and a buffer; records the precision of its computation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.ones(4))
        self.dtypes: tuple[torch.dtype, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        assert self.first.weight is self.second.weight
        self.dtypes = (x.dtype, self.first.weight.dtype, self.shift.dtype)
        return self.second(self.first(x).tanh() + self.shift)


def train_in_low_precision(world: World, policy: _MixedPrecision) -> None:
    torch.manual_seed(0)
    module = RecordsDtypes()
    twin = copy.deepcopy(module)
    twin.shift.data = twin.shift.to(policy.buffer_dtype or torch.float32)
    model = DistributedDataParallel(module, mixed_precision=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(3, 6, 4)
    for batch in data:
        parts = batch.chunk(world.size)
        out = model(parts[world.rank])
        low = policy.param_dtype or torch.float32
        assert module.dtypes == (low, low, policy.buffer_dtype or torch.float32)
        out.float().square().mean().backward()
        # The twin computes each rank's part in low precision and sums in full precision.
        expected = [torch.zeros_like(parameter) for parameter in twin.parameters()]
        for part in parts:
            cast = {name: parameter.to(low) for name, parameter in twin.named_parameters()}
            loss = torch.func.functional_call(twin, cast, (part.to(low),)).float().square().mean()
            for total, gradient in zip(expected, torch.autograd.grad(loss, list(twin.parameters())), strict=True):
                total += gradient / world.size
        for parameter, mirrored, gradient in zip(module.parameters(), twin.parameters(), expected, strict=True):
            assert parameter.dtype == parameter.grad.dtype == torch.float32
            torch.testing.assert_close(parameter.grad, gradient, rtol=0.02, atol=0.02)
            mirrored.data -= 0.1 * parameter.grad
        optimizer.step()
        optimizer.zero_grad()
    kind = policy.reduce_dtype or policy.param_dtype or torch.float32
    assert {bucket.flat.dtype for bucket in storage_of(model).buckets} == {kind}
    model.eval()
    with torch.no_grad():
        assert model(data[0]).dtype == (policy.param_dtype or torch.float32)
    assert {value.dtype for name, value in model.state_dict().items() if "shift" not in name} == {torch.float32}


@pytest.mark.parametrize(
    "policy",
    [
        _MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16),
        _MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
        _MixedPrecision(reduce_dtype=torch.bfloat16),
    ],
    ids=["bf16 summed in fp32", "bf16", "summed in bf16"],
)
def test_low_precision_inside_full_precision_outside(pools: Pools, policy: _MixedPrecision) -> None:
    pools.run(2, train_in_low_precision, policy)


# -- large and nonfinite numbers ---------------------------------------------------------------------------------------


class Twice(nn.Module):
    """Backward launches a small gradient; the larger one, multiplied by `late`, arrives afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor, late: float = 1.0) -> Tensor:
        large = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)
        return late * large + checkpoint(self.layer, 0.01 * x, use_reentrant=True)


def large_and_late(_: World) -> float:
    model = DistributedDataParallel(Twice(), reduce_dtype=torch.float16)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 1), 40000.0)).sum().backward()
    return float(model.module.layer.weight.grad)


def test_late_gradients_in_half_precision_do_not_overflow_in_the_sum(pools: Pools) -> None:
    assert pools.run(2, large_and_late) == pytest.approx([40400.0] * 2, rel=1e-3)


def large_fp16_gradient(world: World) -> float:
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False).half())
    model(torch.full((1, 1), 40000.0).half()).sum().backward()
    return float(model.module.weight.grad)


def test_the_mean_of_large_fp16_gradients_does_not_overflow(pools: Pools) -> None:
    assert pools.run(2, large_fp16_gradient) == [40000.0, 40000.0]


def late_nan(world: World) -> str:
    model = DistributedDataParallel(Twice(), check_finite=True)
    for _ in range(3):
        model(torch.ones(1, 1)).sum().backward()
        model.zero_grad()
    loss = model(torch.ones(1, 1), late=float("nan") if world.rank == 1 else 1.0).sum()
    with pytest.raises(NonFiniteGradient) as caught:
        loss.backward()
    return str(caught.value)


def test_late_nonfinite_gradient_is_detected(pools: Pools) -> None:
    for message in pools.run(2, late_nan):
        assert "rank 1" in message


class Conjugated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0 + 2.0j, 3.0 - 1.0j]))

    def forward(self, scale: float) -> Tensor:
        return scale * torch.view_as_real(self.weight.conj().resolve_conj()).sum()


def conjugated(world: World) -> list[complex]:
    model = DistributedDataParallel(Conjugated(), check_finite=True)
    model(1.0).backward()
    values: list[complex] = model.module.weight.grad.tolist()
    model.zero_grad()
    with pytest.raises(NonFiniteGradient):
        model(float("nan")).backward()
    return values


@pytest.mark.parametrize("size", [1, 2])
def test_lazily_conjugated_gradient_is_checked(pools: Pools, size: int) -> None:
    assert pools.run(size, conjugated) == [[1 - 1j, 1 - 1j]] * size
