"""Data parallelism in one process: one thread for each replica of the module.

    scatter the batch ──► replicate the module ──► forward in threads ──► gather the outputs

It exists for comparison with :class:`paceline.DistributedDataParallel`, which is faster, because here every forward
pass creates new replicas, and the threads share one interpreter.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.output.wording import with_article
from paceline.core.torch_internals.distributed.replicas import bare_replica, set_tensor
from paceline.errors import UsageError

Device = int | str | torch.device


class DataParallel(nn.DataParallel):  # type: ignore[type-arg]
    """Run a module on slices of every batch, with one thread and one replica per device, and gather the outputs.

    Arguments and behavior match ``torch.nn.DataParallel``, but that class does not parallelize on CPUs. The backward
    pass sums the gradients of all replicas into the module's parameters. The first replica is the module itself. As in
    torch, only this replica keeps changes that the forward pass makes to buffers and attributes. BatchNorm's running
    statistics therefore come from the first slice.

    Args:
        module: the module to replicate; its parameters and buffers must be on the first device.
        device_ids: the devices, as GPU indices or devices; by default all GPUs, or the CPU if there are none.
        output_device: the device of the gathered outputs; by default the first device.
        dim: the dimension along which tensors are sliced.
        replicas: on the CPU, the number of threads and replicas, instead of `device_ids`.

    Raises:
        UsageError: for missing devices, or a module on another device. The forward pass also raises errors of replicas.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        replicas: int | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.devices = _choose_devices(device_ids, replicas)
        """Device of each replica; the CPU may appear several times."""
        self.device_ids = [device.index for device in self.devices if device.type != "cpu"]
        self.output_device: Any = self.devices[0] if output_device is None else _device_of(output_device)
        self.dim = dim
        self.module = module
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.device != self.devices[0]:
                raise UsageError(
                    f"{name!r} is on {tensor.device}, but DataParallel's first device is {self.devices[0]}; move the "
                    f"module there with module.to({str(self.devices[0])!r})"
                )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's outputs for the whole batch, on the output device."""
        slices = scatter((inputs, kwargs), self.devices, self.dim)
        modules = replicate(self.module, self.devices[: len(slices)])
        outputs = _apply_in_threads(modules, slices)
        if len(outputs) == 1 and self.output_device == self.devices[0]:
            return outputs[0]  # of any type
        return gather(outputs, self.output_device, self.dim)


def scatter(value: Any, devices: Sequence[torch.device], dim: int = 0) -> list[Any]:
    """Return a slice of `value` for each device, or fewer slices if a tensor has fewer rows.

    Tensors inside tuples, lists and dicts are split along `dim`. Other values, and tensors without dimensions, are
    passed to every replica. Slice sizes differ by at most one row.
    """
    rows = [tensor.size(dim) for tensor in nested_tensors(value) if tensor.dim()]
    count = max(1, min([len(devices), *rows]))
    return [_slice_of(value, at, devices[:count], dim) for at in range(count)]


def replicate(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """Return `module` itself for the first device, and a replica for each of the others.

    A replica's parameters are copies through which gradients flow back to the module's own.
    """
    return [module, *(_replica_of(module, device) for device in devices[1:])]


def gather(outputs: Sequence[Any], device: torch.device, dim: int = 0) -> Any:
    """Combine outputs with the same structure into one, with tensors concatenated along `dim`, on `device`.

    Tensors without dimensions become a vector with one element per replica.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        tensors = [output.to(device) for output in outputs]
        return torch.stack(tensors) if first.dim() == 0 else torch.cat(tensors, dim)
    if isinstance(first, dict):
        if any(output.keys() != first.keys() for output in outputs):
            raise UsageError(f"replicas returned dicts with different keys: {[sorted(output) for output in outputs]}")
        return type(first)((key, gather([output[key] for output in outputs], device, dim)) for key in first)
    if isinstance(first, tuple | list):
        if any(len(output) != len(first) for output in outputs):
            raise UsageError(f"replicas returned {[len(output) for output in outputs]} values; return as many in each")
        gathered = [gather(parts, device, dim) for parts in zip(*outputs, strict=True)]
        return type(first)(*gathered) if hasattr(first, "_fields") else type(first)(gathered)
    if first is None:
        return None
    raise UsageError(
        f"DataParallel cannot gather {with_article(type(first).__name__)}; return tensors, or tuples, lists or "
        "dicts of them"
    )


def _choose_devices(device_ids: Sequence[Device] | None, replicas: int | None) -> list[torch.device]:
    if replicas is not None:
        if device_ids is not None:
            raise UsageError("replicas= is only for the CPU; pass either device_ids or replicas")
        if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
            raise UsageError(f"replicas must be a whole number >= 1, not {replicas!r}")
        return [torch.device("cpu")] * replicas
    if device_ids is None:
        return [torch.device("cuda", at) for at in range(torch.cuda.device_count())] or [torch.device("cpu")]
    devices = [_device_of(device) for device in device_ids]
    if not devices:
        raise UsageError("device_ids is empty; pass at least one device, or leave it out")
    if len({device.type for device in devices}) > 1:
        raise UsageError(f"device_ids have different types: {', '.join(map(str, devices))}; pass devices of one type")
    return devices


def _device_of(device: Device) -> torch.device:
    result = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if result.type == "cuda":
        result = torch.device("cuda", result.index or 0)
        if result.index >= torch.cuda.device_count():
            raise UsageError(f"{result} does not exist: this process sees {torch.cuda.device_count()} GPUs")
    return result


def nested_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors inside tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from nested_tensors(part)


def _slice_of(value: Any, at: int, devices: Sequence[torch.device], dim: int) -> Any:
    """Return slice number `at` of `value` on that slice's device."""
    if isinstance(value, Tensor):
        part = value.tensor_split(len(devices), dim)[at] if value.dim() else value
        return part.to(devices[at])
    if isinstance(value, tuple | list):
        parts = [_slice_of(part, at, devices, dim) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return type(value)((key, _slice_of(part, at, devices, dim)) for key, part in value.items())
    return value


def _replica_of(module: nn.Module, device: torch.device) -> nn.Module:
    copies: dict[Tensor, Tensor] = {}

    def copy_of(tensor: Tensor) -> Tensor:
        if tensor not in copies:  # tied parameters stay tied
            # Copied even on the same device, because a replica must not share buffers with the module.
            copies[tensor] = tensor.clone() if tensor.device == device else tensor.to(device)
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
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def modes() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(with_gradients))
            for kind, enabled, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled, caches))
            yield

    return modes
