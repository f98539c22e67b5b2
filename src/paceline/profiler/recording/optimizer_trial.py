"""A trial of a faster implementation of the program's optimizer, on copies of its parameters."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

MOST_BYTES = 64 << 20
"""Bytes of parameters that are copied."""
ROUNDS = 4
FASTER = ("fused", "foreach")
"""Options of torch's optimizers that update many parameters in one call."""


def try_faster(optimizer: torch.optim.Optimizer) -> tuple[str, float] | None:
    """Return the option that makes a step of `optimizer` faster, and the step's time with it by that without.

    None if it has one already, takes none, or is not torch's. The program's parameters stay as they are.
    """
    kind = type(optimizer)
    takes = [name for name in FASTER if name in inspect.signature(kind.__init__).parameters]
    if not kind.__module__.startswith("torch.optim") or any(optimizer.defaults.get(name) for name in takes):
        return None
    parameters = _copies(optimizer)
    settings = {
        name: value
        for name, value in optimizer.defaults.items()
        if name in inspect.signature(kind.__init__).parameters and name not in FASTER
    }
    found = []
    for option in takes if parameters else ():
        with suppress(RuntimeError, ValueError, TypeError):  # this device, or these settings, cannot have it
            now = _seconds(kind, parameters, settings)
            found.append((option, _seconds(kind, parameters, settings | {option: True}) / now))
    return min(found, key=lambda tried: tried[1], default=None)


def _copies(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    copies: list[torch.Tensor] = []
    nbytes = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            nbytes += parameter.nbytes
            if nbytes > MOST_BYTES or type(parameter.data) is not torch.Tensor:
                return copies
            copy = parameter.detach().clone()
            copy.grad = torch.full_like(copy, 1e-3)
            copies.append(copy)
    return copies


def _seconds(kind: Any, parameters: list[torch.Tensor], settings: dict[str, Any]) -> float:
    optimizer = kind(parameters, **settings)
    # Without the hooks of all optimizers, by which a step is seen to end.
    step: Callable[[Any], Any] = kind.step.__wrapped__ if hasattr(kind.step, "hooked") else kind.step
    times = []
    for _ in range(ROUNDS):
        _synchronize(parameters)
        began = time.perf_counter()
        with torch.no_grad():
            step(optimizer)
        _synchronize(parameters)
        times.append(time.perf_counter() - began)
    # The shortest: the first makes the state, and other work on the host only adds.
    return min(times)


def _synchronize(parameters: list[torch.Tensor]) -> None:
    if parameters[0].device.type != "cpu":
        torch.accelerator.synchronize(parameters[0].device)
