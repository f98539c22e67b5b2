"""Compares training on ranks with training in one process on the whole global batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.testing.assertions import assert_replicas_equal, check_world, gather, unwrapped

Batch = tuple[Tensor, Tensor]
Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], None]
RTOL = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
COARSE = 3e-2
"""Relative tolerance for dtypes of lower precision, which are not in `RTOL`."""


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer used by default."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> None:
    """Train one step on the mean squared error."""
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


def assert_equals_one_process(
    build: Callable[[], nn.Module],
    data: Callable[[int], Batch] | Sequence[Batch],
    steps: int,
    *,
    wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel,
    step: Step = plain_step,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd,
) -> None:
    """Assert that training on all ranks gives the gradients and weights of one process with the whole global batch.

    Each rank trains ``wrap(build())`` on its slice of every global batch, and an unwrapped copy on the whole batch.
    Gradients and weights are compared after each step. All ranks must call this function; if it fails, they all raise
    the same error.

    Args:
        build: makes the module.
        data: the global batches, the same on every rank: a sequence, or a function of the step number. If a batch
            cannot be divided evenly among the ranks, `step` must weight their losses.
        steps: number of steps.
        wrap: wraps the module: torch's wrapper, Paceline's, or a similar one.
        step: runs one training step of the wrapper or the copy on inputs and targets. Its loss must be a mean.
        optimizer: makes the optimizer from the parameters.

    Raises:
        AssertionError: at the first difference. Names the step, the rank, the parameter and the likely mistake.
    """
    __tracebackhide__ = True
    check_world("assert_equals_one_process()")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = wrap(build())
    try:  # check first, otherwise the message would be about gradients
        assert_replicas_equal(model)
    except AssertionError as error:
        raise AssertionError(f"before the first step, {error}; the wrapper must make them equal") from None
    module = unwrapped(model)
    # Copy, because a second build() may draw different weights.
    twin = copy.deepcopy(module)
    optimizers = optimizer(module.parameters()), optimizer(twin.parameters())
    for number in range(steps):
        inputs, targets = data(number) if callable(data) else data[number]
        local_inputs, local_targets = inputs.tensor_split(size)[rank], targets.tensor_split(size)[rank]
        # The user's step function may weight the losses.
        if len(inputs) % size and step is plain_step:
            raise UsageError(
                f"the global batch of step {number} has {len(inputs)} samples, which {size} ranks cannot divide "
                "evenly; give another batch, or step=… with weighted losses"
            )
        step(model, optimizers[0], local_inputs, local_targets)
        step(twin, optimizers[1], inputs, targets)
        difference = gradient_difference(module, twin, size) or weight_difference(module, twin)
        _agree(f"step {number}, rank {rank}: {difference}" if difference else "")


def gradient_difference(module: nn.Module, twin: nn.Module, size: int, rtol: float | None = None) -> str:
    """Return how a gradient differs from the twin's; an empty string without a difference."""
    for (name, got), expected in zip(module.named_parameters(), twin.parameters(), strict=True):
        if (got.grad is None) != (expected.grad is None):
            has, lacks = ("in one process", "on the ranks") if got.grad is None else ("on the ranks", "in one process")
            return f"{name!r} has a gradient {has} but not {lacks}"
        if got.grad is None or expected.grad is None:
            continue
        if difference := tensor_difference(got.grad, expected.grad, rtol):
            return f"the gradient of {name!r} {difference}{_likeness(got.grad, expected.grad, size)}"
    return ""


def weight_difference(module: nn.Module, twin: nn.Module, rtol: float | None = None) -> str:
    """Return how a weight differs from the twin's; an empty string without a difference."""
    for (name, got), expected in zip(module.named_parameters(), twin.parameters(), strict=True):
        if difference := tensor_difference(got.detach(), expected.detach(), rtol):
            return f"the weight {name!r} {difference}, but its gradient does not"
    return ""


def tensor_difference(actual: Tensor, expected: Tensor, rtol: float | None = None) -> str:
    """Return the end of a sentence about how a tensor differs from the twin's; an empty string if it does not."""
    kinds = [f"{tensor.dtype} of shape {tuple(tensor.shape)}, {tensor.layout}" for tensor in (actual, expected)]
    if kinds[0] != kinds[1]:
        return f"is {kinds[0]}, but that of one process is {kinds[1]}"
    if is_close(actual, expected, rtol):
        return ""
    distance = float((_dense(actual) - _dense(expected)).abs().max())
    return f"differs from one process's by up to {distance:.3g}"


def is_close(actual: Tensor, expected: Tensor, rtol: float | None = None) -> bool:
    """Return whether the tensors are equal except for rounding, relative to the largest element."""
    if not actual.numel():
        return actual.shape == expected.shape
    actual, expected = _dense(actual), _dense(expected)
    tolerance = RTOL.get(actual.dtype, COARSE) if rtol is None else rtol
    scale = float(expected.abs().max())
    # The minimum is for tensors that are all zeros in one process.
    return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance * max(scale, 1e-6), equal_nan=True)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _likeness(actual: Tensor, expected: Tensor, size: int) -> str:
    """Return the mistake that usually causes such a gradient; an empty string if unknown."""
    if size == 1 or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return ""
    for factor, meaning in (
        (float(size), f"it is {size} times as large, like a sum over ranks instead of a mean"),
        (1 / size, f"it is 1/{size} of it, like a sum over samples after the mean over ranks"),
        (0.0, "it is zero"),
    ):
        if is_close(actual, expected * factor, 1e-3):
            return f"; {meaning}"
    return ""


def _agree(difference: str) -> None:
    """Raise the first difference that any rank found, on all ranks."""
    __tracebackhide__ = True
    if first := next(filter(None, gather(difference)), ""):
        raise AssertionError(first)
