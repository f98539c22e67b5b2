"""The CPU in place of GPUs, for test modules that move everything to ``cuda`` without needing a GPU.

Other code keeps the real torch. The module under test gets views of ``torch`` and ``torch.nn`` with a no-op
``torch.cuda`` and the CPU as the only device, and a function mode maps devices passed to torch functions.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class View(types.ModuleType):
    """A view of a module with some attributes replaced."""

    def __init__(self, real: Any, **replaced: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(replaced, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


class _IsDevice(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.device)


class Device(metaclass=_IsDevice):
    """``torch.device`` that always returns the CPU."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return CPU


class Cuda(types.ModuleType):
    """``torch.cuda`` with the CPU as the GPUs; choosing a device, seeding and synchronizing are no-ops."""

    def __init__(self, rank: int, count: int) -> None:
        super().__init__("torch.cuda")
        for name in ("set_device", "synchronize", "manual_seed", "Stream"):
            setattr(self, name, lambda *_, **__: None)
        self.device = self.stream = lambda *_: contextlib.nullcontext()
        self.current_device, self.device_count, self.is_available = lambda: rank, lambda: count, lambda: True


def autocast(*_: Any, **__: Any) -> Any:
    """Stand-in for ``torch.cuda.amp.autocast``."""
    return torch.autocast("cpu")


def grad_scaler(*_: Any, **__: Any) -> Any:
    """Stand-in for ``torch.cuda.amp.GradScaler``."""
    return torch.amp.GradScaler("cpu")


class CudaToCpu(TorchFunctionMode):
    """Maps ``x.cuda()``, ``x.to(rank)``, ``device="cuda"`` and ``device=rank`` to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = _mapped(kwargs["device"])
        if func is torch.Tensor.to:
            args = (args[0], *map(_mapped, args[1:]))
        elif func is torch._C._nn._parse_to:  # Module.to
            args = tuple(map(_mapped, args))
        return func(*args, **kwargs)


def _mapped(value: Any) -> Any:
    """Return the CPU for any form of GPU device; return other values unchanged."""
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    if isinstance(value, str):
        return CPU if value.startswith("cuda") else value
    return CPU if isinstance(value, int) and not isinstance(value, bool) else value
