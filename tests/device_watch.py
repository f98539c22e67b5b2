"""Detects waits of a step for a GPU, without a GPU: some CPU tensors stand for tensors on a device.

Mark these tensors with :meth:`DeviceWatch.on_device`; results computed from them count as device tensors as well. The
watch records every place in ``paceline`` that reads a value of a device tensor on the host, and every copy between a
device tensor and a tensor known to be on the host.

    with DeviceWatch() as watch:
        watch.on_device(parameters)
        ...
    watch.stops     # such as "item at ddp/reducer.py:180 _launch"

Waiting for a number sent to the host earlier is allowed if more work was queued after it, because the device stays
busy meanwhile.

Two modes work together. The dispatch mode sees every operation, also from C++ and autograd, and follows values
from tensor to tensor. The function mode sees reads that dispatch no operation on the CPU, such as ``tolist``.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from insides import TorchDispatchMode, tree_leaves

READS = {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim"}
"""Operations that make the host wait for a value or for the size of the result."""
COPIES = {"copy_", "_foreach_copy_"}
READING_METHODS = {"tolist", "cpu", "numpy"}
"""Tensor methods that dispatch no operation for a CPU tensor."""
FROM_HOST = (torch.tensor, torch.as_tensor, torch.frombuffer, torch.from_numpy)
"""Functions that return host tensors unless called with a device."""


class DeviceWatch:
    """Records waits of the host for tensors that stand for device tensors."""

    stops: list[str]
    """One line per wait, with the operation and the innermost location in ``paceline``."""

    queued = 0
    """Number of device operations in all watches."""

    def __init__(self) -> None:
        self.stops = []
        # Storages by address. Weak references do not count as users of buckets but prevent the reuse of an address.
        self._device: dict[int, StorageWeakRef] = {}
        self._host: dict[int, StorageWeakRef] = {}
        self._modes = contextlib.ExitStack()

    def on_device(self, tensors: Iterable[Tensor | None]) -> None:
        """Let `tensors` and everything computed from them stand for tensors on a device."""
        for tensor in tensors:
            if tensor is not None and tensor.layout is torch.strided:
                storage = StorageWeakRef(tensor.untyped_storage())
                self._device.setdefault(_address(tensor), storage)
                self._host.pop(_address(tensor), None)

    def on_host(self, tensors: Iterable[Any]) -> None:
        """Mark `tensors` as host tensors."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not self.is_on_device(tensor):
                self._host.setdefault(_address(tensor), StorageWeakRef(tensor.untyped_storage()))

    def is_on_device(self, tensor: Tensor) -> bool:
        """Return whether `tensor` stands for a device tensor."""
        return tensor.layout is torch.strided and _address(tensor) in self._device

    def _is_on_host(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and _address(tensor) in self._host

    def operation(self, name: str, inputs: list[Tensor], call: Any) -> Any:
        """Run an operation and propagate the device marks of its inputs to its results."""
        touches = any(map(self.is_on_device, inputs))
        DeviceWatch.queued += touches
        if touches and name in READS:
            self.stop(name)
        if name in COPIES and touches and any(map(self._is_on_host, inputs)):
            self.stop("copy between host and device")
        result = call()
        if touches:
            self.on_device(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            if name.startswith("_foreach") and name.endswith("_"):
                self.on_device(inputs)
        return result

    def stop(self, name: str) -> None:
        """Record a wait of the host at the current location."""
        for frame in reversed(traceback.extract_stack()):
            _, package, path = frame.filename.rpartition("/src/paceline/")
            if package:
                self.stops.append(f"{name} at {path}:{frame.lineno} {frame.name}")
                return
        # Otherwise the wait is in the model, the optimizer or the test.

    def __enter__(self) -> DeviceWatch:
        _open.append(self)
        self._modes.enter_context(functions := _Functions(self))
        self._modes.enter_context(_stays_on_in_backward(functions))
        self._modes.enter_context(_Operations(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._modes.close()
        _open.remove(self)


_open: list[DeviceWatch] = []
"""The active watches."""


def _read_later(number: Tensor) -> Callable[[], float]:
    """Replace the function of this name in :mod:`paceline.core.device_streams`."""
    copy = torch.empty((), dtype=torch.float64)
    copy.copy_(number.detach().reshape(()))
    queued_then = DeviceWatch.queued

    def read() -> float:
        if DeviceWatch.queued == queued_then:
            for watch in _open:
                watch.stop("a wait for the last queued operation")
        return ctypes.c_double.from_address(copy.data_ptr()).value  # a read that neither mode sees

    return read


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


class _Operations(TorchDispatchMode):
    def __init__(self, watch: DeviceWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = getattr(func, "overloadpacket", func).__name__
        return self._watch.operation(name, inputs, lambda: func(*args, **kwargs))


class _Functions(TorchFunctionMode):
    def __init__(self, watch: DeviceWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], Tensor) and self._watch.is_on_device(args[0]):
            # Only a literal "cpu" counts; a device in a variable is usually the tensor's own.
            to_cpu = name == "to" and "cpu" in [target for target in (*args[1:], kwargs.get("device")) if target]
            if name in READING_METHODS or to_cpu:
                self._watch.stop(name)
        result = func(*args, **kwargs)
        if func in FROM_HOST and kwargs.get("device") is None:
            self._watch.on_host([result])
        return result


@contextlib.contextmanager
def _stays_on_in_backward(mode: TorchFunctionMode) -> Iterator[None]:
    """Keep a function mode active during backward; ``Tensor.backward`` is itself a function that disables it."""
    module: Any = torch.autograd
    run = module._engine_run_backward

    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    module._engine_run_backward = run_in_mode
    try:
        yield
    finally:
        module._engine_run_backward = run


@contextlib.contextmanager
def queued_operations() -> Iterator[None]:
    """Make ``paceline`` treat operations as queued, as on a GPU, with a single stream for everything."""
    streams: Any = sys.modules.get("paceline.core.device_streams")
    if streams is None:
        yield
        return
    stream = SimpleNamespace(wait_stream=lambda _: None, wait_event=lambda _: None, record_event=lambda *_: None)
    fakes = {
        "is_queued": lambda _: True,
        "new_stream": lambda *_, **__: stream,
        "current_stream": lambda *_: stream,
        "use_stream": lambda _: contextlib.nullcontext(),
        "keep_for": lambda *_: None,
        "read_later": _read_later,
    }
    real = {name: getattr(streams, name) for name in fakes if hasattr(streams, name)}
    changed = [
        (module, name)
        for path, module in list(sys.modules.items())
        if path.partition(".")[0] == "paceline"
        for name, function in real.items()
        if vars(module).get(name) is function
    ]
    for module, name in changed:
        setattr(module, name, fakes[name])
    try:
        yield
    finally:
        for module, name in changed:
            setattr(module, name, real[name])
