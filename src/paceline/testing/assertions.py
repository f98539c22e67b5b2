"""Assertions about replicas, data and training across ranks. All ranks must call them."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.core.digests import tensor_digest
from paceline.core.unwrapping import plain_name, unwrap
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.testing.faults import tensors_of

Batch = tuple[Tensor, Tensor]
Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], None]
RTOL = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
COARSE = 3e-2
"""Relative tolerance for dtypes of lower precision, which are not in `RTOL`."""


def assert_replicas_equal(model: nn.Module) -> None:
    """Assert that all parameters and buffers of `model` are bit-identical on all ranks.

    Raises:
        AssertionError: on every rank. Names the first tensor that differs, a rank, and the difference.
        UsageError: if parameters are sharded, because ranks then have different parts of them.
    """
    __tracebackhide__ = True
    _check_world("assert_replicas_equal()")
    module = _unwrapped(model)
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    tensors = {plain_name(name): value.detach() for name, value in named}
    digests = {name: _digest(name, value) for name, value in tensors.items()}
    gathered = gather(digests)
    reference = gathered[0]
    for rank, entry in enumerate(gathered):
        if odd := [name for name in [*reference, *entry] if (name in reference) != (name in entry)]:
            raise AssertionError(
                f"replicas differ: {odd[0]!r} is only on rank {0 if odd[0] in reference else rank}, not on rank "
                f"{rank if odd[0] in reference else 0}"
            )
    different = {name: [entry[name] != reference[name] for entry in gathered] for name in reference}
    different = {name: where for name, where in different.items() if any(where)}
    if not different:
        return
    name, where = next(iter(different.items()))
    index = where.index(True)
    count = f"; {len(different)} of {len(reference)} tensors differ" if len(reference) > 1 else ""
    kinds = [gathered[0][name][0], gathered[index][name][0]]
    if kinds[0] != kinds[1]:
        detail = f"is {kinds[1]} on rank {index} and {kinds[0]} on rank 0"
    else:
        # `gathered` is the same on all ranks, so all of them call this collective.
        values = gather(tensors[name].cpu())
        detail = f"on rank {index} differs from rank 0's{_distance(values[index], values[0])}"
    raise AssertionError(f"replicas differ: {name!r} {detail}{count}")


def _digest(name: str, tensor: Tensor) -> tuple[str, bytes]:
    if hasattr(tensor, "placements"):
        raise UsageError(f"{name!r} is sharded, so ranks have different parts of it; compare full tensors")
    return f"{tensor.dtype} {tuple(tensor.shape)}", tensor_digest(tensor)


def _distance(first: Tensor, second: Tensor) -> str:
    if not first.numel() or first.dtype == torch.bool:
        return ""
    wide = torch.complex128 if first.is_complex() else torch.float64
    return f" by up to {float((first.to(wide) - second.to(wide)).abs().max()):.3g}"


def assert_data_is_split(epoch: Callable[[int], Iterable[Any]], shuffled: bool = True) -> None:
    """Assert that no sample is repeated within epoch 0 or epoch 1, and that the two epochs have different orders.

    All ranks must call it. Samples with the same values count as the same sample.

    Args:
        epoch: returns this rank's batches of the epoch with the given number. Batches are tensors, or lists, tuples or
            dictionaries of tensors whose first dimension counts samples.
        shuffled: whether the orders of the two epochs must differ.

    Raises:
        AssertionError: on every rank. Names the epoch and the ranks.
    """
    __tracebackhide__ = True
    _check_world("assert_data_is_split()")
    epochs: list[list[list[str]]] = []
    for number in (0, 1):
        epochs.append(gather([sample for batch in epoch(number) for sample in _samples(batch)]))
        _check_split(epochs[-1], number)
    # With one or two samples, the order is often the same by chance.
    if shuffled and epochs[0] == epochs[1] and len(epochs[1][0]) > 2:
        raise AssertionError(
            "epoch 1 has the same samples in the same order as epoch 0 on every rank; call "
            "sampler.set_epoch(epoch) before each epoch"
        )


def _check_split(by_rank: list[list[str]], number: int) -> None:
    __tracebackhide__ = True
    owners: dict[str, int] = {}
    twice: Counter[tuple[int, int]] = Counter()
    for rank, samples in enumerate(by_rank):
        for sample in samples:
            if sample in owners:
                twice[owners[sample], rank] += 1
            owners.setdefault(sample, rank)
    if twice:
        [((first, second), count)] = twice.most_common(1)
        whose = f"rank {first} repeats" if first == second else f"ranks {first} and {second} share"
        raise AssertionError(
            f"in epoch {number} {whose} {count} of {len(by_rank[second])} samples; give every rank a sampler that "
            "splits the data without padding, with the same seed on all ranks"
        )


def _samples(batch: Any) -> list[str]:
    """Return a digest of each sample of a batch."""
    tensors = [tensor for tensor in tensors_of(batch) if tensor.dim()]
    count = len(tensors[0]) if tensors else 0
    return [
        hashlib.sha256(b"".join(tensor_digest(tensor[index]) for tensor in tensors)).hexdigest()
        for index in range(count)
    ]


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
    _check_world("assert_equals_one_process()")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = wrap(build())
    try:  # check first, otherwise the message would be about gradients
        assert_replicas_equal(model)
    except AssertionError as error:
        raise AssertionError(f"before the first step, {error}; the wrapper must make them equal") from None
    module = _unwrapped(model)
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
        differences = gather(f"step {number}, rank {rank}: {difference}" if difference else "")
        if first := next(filter(None, differences), ""):  # raised on all ranks
            raise AssertionError(first)


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


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers: torch's, Paceline's, and any whose only child is their ``module``."""
    model = unwrap(model)
    while isinstance(inner := getattr(model, "module", None), nn.Module) and list(model.children()) == [inner]:
        model = unwrap(inner)
    return model


def _check_world(call: str) -> None:
    """Raise unless there is a process group."""
    if not dist.is_initialized():
        raise UsageError(f"{call} needs a process group; mark the test with pytest.mark.ranks")


def gather(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
