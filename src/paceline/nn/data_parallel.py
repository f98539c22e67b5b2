"""Data parallelism in one process: one thread for each replica of the module.

    scatter the batch ──► replicate the module ──► forward in threads ──► gather the outputs

It exists for comparison with :class:`paceline.DistributedDataParallel`, which is faster, because here every forward
pass creates new replicas, and the threads share one interpreter.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.messages import with_article
from paceline.core.torch_distributed import bare_replica, set_tensor
from paceline.errors import UsageError


class DataParallel(nn.DataParallel):  # type: ignore[type-arg]
    """Run a module on slices of every batch, with one thread and one replica per slice, and gather the outputs.

    Use it on the CPU, because ``torch.nn.DataParallel`` runs in parallel only on GPUs. The backward pass sums the
    gradients of all replicas into the module's parameters. The first replica is the module itself. As in torch, only
    this replica keeps changes that the forward pass makes to buffers and attributes. BatchNorm's running statistics
    therefore come from the first slice.

    Args:
        module: the module to replicate, on the CPU.
        replicas: the number of threads and replicas.

    Raises:
        UsageError: if the module is on another device. The forward pass also raises errors of replicas.
    """

    def __init__(self, module: nn.Module, *, replicas: int) -> None:
        nn.Module.__init__(self)
        if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
            raise UsageError(f"replicas must be a whole number >= 1, not {replicas!r}")
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.device.type != "cpu":
                raise UsageError(
                    f"{name!r} is on {tensor.device}, but paceline.DataParallel is for the CPU; use "
                    "torch.nn.DataParallel on GPUs"
                )
        self.module, self.replicas = module, replicas

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's outputs for the whole batch."""
        slices = scatter((inputs, kwargs), self.replicas)
        outputs = _apply_in_threads(replicate(self.module, len(slices)), slices)
        return outputs[0] if len(outputs) == 1 else gather(outputs)  # one output may be of any type


def scatter(value: Any, count: int) -> list[Any]:
    """Return `count` slices of `value`, or fewer if a tensor has fewer rows.

    Tensors inside tuples, lists and dicts are split along their first dimension. Other values, and tensors without
    dimensions, are passed to every replica. Slice sizes differ by at most one row.
    """
    rows = [len(tensor) for tensor in nested_tensors(value) if tensor.dim()]
    count = max(1, min([count, *rows]))
    return [_slice_of(value, at, count) for at in range(count)]


def replicate(module: nn.Module, count: int) -> list[nn.Module]:
    """Return `module` itself, and replicas up to `count` modules.

    A replica's parameters are copies through which gradients flow back to the module's own.
    """
    return [module, *(_replica_of(module) for _ in range(count - 1))]


def gather(outputs: Sequence[Any]) -> Any:
    """Combine outputs with the same structure into one, with tensors concatenated along their first dimension.

    Tensors without dimensions become a vector with one element per replica.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.stack([*outputs]) if first.dim() == 0 else torch.cat([*outputs])
    if isinstance(first, dict):
        if any(output.keys() != first.keys() for output in outputs):
            raise UsageError(f"replicas returned dicts with different keys: {[sorted(output) for output in outputs]}")
        return type(first)((key, gather([output[key] for output in outputs])) for key in first)
    if isinstance(first, tuple | list):
        if any(len(output) != len(first) for output in outputs):
            raise UsageError(f"replicas returned {[len(output) for output in outputs]} values; return as many in each")
        gathered = [gather(parts) for parts in zip(*outputs, strict=True)]
        return type(first)(*gathered) if hasattr(first, "_fields") else type(first)(gathered)
    if first is None:
        return None
    raise UsageError(
        f"DataParallel cannot gather {with_article(type(first).__name__)}; return tensors, or tuples, lists or "
        "dicts of them"
    )


def nested_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors inside tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from nested_tensors(part)


def _slice_of(value: Any, at: int, count: int) -> Any:
    """Return slice number `at` of `count` slices of `value`."""
    if isinstance(value, Tensor):
        return value.tensor_split(count)[at] if value.dim() else value
    if isinstance(value, tuple | list):
        parts = [_slice_of(part, at, count) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return type(value)((key, _slice_of(part, at, count)) for key, part in value.items())
    return value


def _replica_of(module: nn.Module) -> nn.Module:
    copies: dict[Tensor, Tensor] = {}

    def copy_of(tensor: Tensor) -> Tensor:
        if tensor not in copies:  # tied parameters stay tied
            copies[tensor] = tensor.clone()
        return copies[tensor]

    replicas: dict[nn.Module, nn.Module] = {part: bare_replica(part) for part in module.modules()}
    for part, replica in replicas.items():
        for name, child in part._modules.items():
            replica._modules[name] = None if child is None else replicas[child]
        for name, parameter in part._parameters.items():
            set_tensor(replica, name, None if parameter is None else copy_of(parameter))
        for name, buffer in part._buffers.items():
            replica._buffers[name] = None if buffer is None else copy_of(buffer.detach())
    return replicas[module]


def _apply_in_threads(modules: Sequence[nn.Module], slices: Sequence[Any]) -> list[Any]:
    """Return each module's output for its slice; the first runs in the calling thread."""
    if len(modules) == 1:
        inputs, kwargs = slices[0]
        return [modules[0](*inputs, **kwargs)]
    entering = _modes_of_this_thread()

    def run(module: nn.Module, inputs: Any, kwargs: Any) -> Any:
        with entering():
            return module(*inputs, **kwargs)

    with ThreadPoolExecutor(len(modules) - 1, thread_name_prefix="replica") as pool:
        others = [
            pool.submit(contextvars.copy_context().run, run, module, inputs, kwargs)
            for module, (inputs, kwargs) in zip(modules[1:], slices[1:], strict=True)
        ]
        inputs, kwargs = slices[0]
        return [modules[0](*inputs, **kwargs), *(other.result() for other in others)]


def _modes_of_this_thread() -> Callable[[], Any]:
    """Return a context manager that sets this thread's gradient mode and autocast in another thread."""
    # torch keeps these modes per thread, and context variables do not carry them over.
    with_gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def modes() -> Iterator[None]:
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(with_gradients),
            torch.autocast("cpu", dtype, casts, caches),
        ):
            yield

    return modes
