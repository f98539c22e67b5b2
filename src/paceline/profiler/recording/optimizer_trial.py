"""A trial of a faster implementation of the program's optimizer, on copies of its parameters."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from paceline.core.telemetry.spans import OPTIMIZER
from paceline.profiler.records.steps import Step

MOST_BYTES = 64 << 20
"""Bytes of parameters that are copied."""
ROUNDS = 4
"""Rounds in which each implementation steps once."""
MOST_ROUNDS = 60
"""Rounds as long as they take less than ``TRIAL_S``: on a loaded host few steps are without a disturbance."""
TRIAL_S = 0.3
TRIED = 0.1
"""Share of a step that an optimizer takes at least for a trial of its faster implementation."""
FASTER = ("fused", "foreach")
"""Options of torch's optimizers that update many parameters in one call."""


def faster_option(optimizers: Sequence[torch.optim.Optimizer], step: Step) -> tuple[str, float] | None:
    """Return what :func:`try_faster` finds for the first of `optimizers` that has a faster implementation.

    None where all of them take no notable part of `step`, or none has one.
    """
    seconds = sum(span.seconds for span in step.spans if span.label == OPTIMIZER)
    if seconds <= TRIED * step.length:
        return None
    return next(filter(None, map(try_faster, optimizers)), None)


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
    options = ["", *takes] if parameters else []
    steps: dict[str, Callable[[], Any]] = {}
    for option in options:
        with suppress(RuntimeError, ValueError, TypeError):  # this device, or these settings, cannot have it
            steps[option] = _step(kind, parameters, settings | ({option: True} if option else {}))
    if "" not in steps:
        return None
    times = _shortest(steps, parameters)
    found = [(option, times[option] / times[""]) for option in takes if option in times]
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


def _step(kind: Any, parameters: list[torch.Tensor], settings: dict[str, Any]) -> Callable[[], Any]:
    """Return a step of an optimizer that has made its state, in a first step."""
    optimizer = kind(parameters, **settings)
    # Without the hooks of all optimizers, by which a step is seen to end.
    step: Callable[[Any], Any] = kind.step.__wrapped__ if hasattr(kind.step, "hooked") else kind.step
    step(optimizer)
    return lambda: step(optimizer)


@torch.no_grad()
def _shortest(steps: dict[str, Callable[[], Any]], parameters: list[torch.Tensor]) -> dict[str, float]:
    """Return the shortest time of each of `steps`, in seconds; they take turns, so that other work meets all alike."""
    on_cpu = bool(parameters) and parameters[0].device.type == "cpu"
    # On a CPU without the time in which this thread had no core, which would decide on a loaded host.
    clock = time.thread_time if on_cpu else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in steps}
    until = time.perf_counter() + TRIAL_S
    for number in range(MOST_ROUNDS):
        if number >= ROUNDS and time.perf_counter() > until:
            break
        for name, step in steps.items():
            _synchronize(parameters)
            began = clock()
            step()
            _synchronize(parameters)
            times[name].append(clock() - began)
    return {name: min(taken) for name, taken in times.items()}


def _synchronize(parameters: list[torch.Tensor]) -> None:
    if parameters[0].device.type != "cpu":
        torch.accelerator.synchronize(parameters[0].device)
