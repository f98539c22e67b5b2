"""Finds where a step would wait for a GPU, without one: some tensors on the CPU stand for tensors on a device.

A :class:`DeviceWatch` is told which tensors these are. Whatever is computed from them is on the device, too. It records
each place of ``paceline`` where the host asks for a value of such a tensor, and each copy between it and a tensor that
is surely the host's.

    with DeviceWatch() as watch:
        watch.on_device(parameters)
        ...
    watch.stops     # such as "item at ddp/step.py:180 launch"

A number that was sent to the host earlier may be waited for, unless nothing was queued since: the device has work left
meanwhile.

Two modes work together. The dispatch mode sees every operation, also those of C++ and of autograd, and follows values
from tensor to tensor. The function mode sees what reads memory without an operation on the CPU, such as ``tolist``.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from insides import TorchDispatchMode, tree_leaves

READS = {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim"}
"""Operations whose result the host needs: a value, or the size of the result."""
COPIES = {"copy_", "_foreach_copy_"}
READING_METHODS = {"tolist", "cpu", "numpy"}
"""Methods of tensors that are no operation where the tensor is on the CPU already."""
FROM_HOST = (torch.tensor, torch.as_tensor, torch.frombuffer, torch.from_numpy)
"""Functions whose results are the host's, unless a device is named."""


class DeviceWatch:
    """Records where the host waits for tensors that stand for those on a device."""

    stops: list[str]
    """One line for each time, with the operation and the innermost place in ``paceline``."""

    queued = 0
    """Operations on the device so far, in all watches."""

    def __init__(self) -> None:
        self.stops = []
        # Storages by address. Weak, or buckets would be taken for kept by a user; but no address comes again.
        self._device: dict[int, StorageWeakRef] = {}
        self._host: dict[int, StorageWeakRef] = {}
        self._modes = contextlib.ExitStack()

    def on_device(self, tensors: Iterable[Tensor | None]) -> None:
        """Let `tensors`, and what is computed from them, stand for tensors on a device."""
        for tensor in tensors:
            if tensor is not None and tensor.layout is torch.strided:
                storage = StorageWeakRef(tensor.untyped_storage())
                self._device.setdefault(_address(tensor), storage)
                self._host.pop(_address(tensor), None)

    def on_host(self, tensors: Iterable[Any]) -> None:
        """Note that `tensors` are the host's."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not self.is_on_device(tensor):
                self._host.setdefault(_address(tensor), StorageWeakRef(tensor.untyped_storage()))

    def is_on_device(self, tensor: Tensor) -> bool:
        """Whether `tensor` stands for one on a device."""
        return tensor.layout is torch.strided and _address(tensor) in self._device

    def _is_on_host(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and _address(tensor) in self._host

    def operation(self, name: str, inputs: list[Tensor], call: Any) -> Any:
        """Run an operation, and follow what it makes of its inputs."""
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
        """Record that the host waits here."""
        for frame in reversed(traceback.extract_stack()):
            _, ours, path = frame.filename.rpartition("/src/paceline/")
            if ours:
                self.stops.append(f"{name} at {path}:{frame.lineno} {frame.name}")
                return
        # Not ours: the model's, the optimizer's, or the test's own.

    def __enter__(self) -> DeviceWatch:
        _open.append(self)
        self._modes.enter_context(functions := _Functions(self))
        self._modes.enter_context(_stays_on_in_backward(functions))
        self._modes.enter_context(_Operations(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._modes.close()
        _open.remove(self)


_open: list[DeviceWatch] = []
"""The watches that are on."""


def _read_later(number: Tensor) -> Callable[[], float]:
    """Stand for the function of this name in :mod:`paceline.core.device_streams`."""
    copy = torch.empty((), dtype=torch.float64)
    copy.copy_(number.detach().reshape(()))
    queued_then = DeviceWatch.queued

    def read() -> float:
        if DeviceWatch.queued == queued_then:
            for watch in _open:
                watch.stop("a wait for what was queued last")
        return ctypes.c_double.from_address(copy.data_ptr()).value  # seen by no mode

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
            # A device that is a variable is the tensor's own, as a rule.
            to_cpu = name == "to" and "cpu" in [target for target in (*args[1:], kwargs.get("device")) if target]
            if name in READING_METHODS or to_cpu:
                self._watch.stop(name)
        result = func(*args, **kwargs)
        if func in FROM_HOST and kwargs.get("device") is None:
            self._watch.on_host([result])
        return result


@contextlib.contextmanager
def _stays_on_in_backward(mode: TorchFunctionMode) -> Iterator[None]:
    """Keep a function mode on in backwards: ``Tensor.backward`` is itself a function that switches it off inside."""
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
    """Let the code of ``paceline`` take operations for queued, as on a GPU, with streams that are all the same one."""
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
