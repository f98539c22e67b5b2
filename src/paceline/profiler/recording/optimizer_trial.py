"""A trial of a faster implementation of the program's optimizer, on copies of its parameters."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from paceline.core.telemetry.spans import OPTIMIZER
from paceline.profiler.records.rank_file import RankRecord
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


def note_faster(record: RankRecord, optimizers: Sequence[torch.optim.Optimizer], step: Step) -> None:
    """Note in `record` what :func:`try_faster` finds for the first of `optimizers` that has a faster implementation.

    Nothing where all of them take no notable part of `step`, or none has one.
    """
    seconds = sum(span.seconds for span in step.spans if span.label == OPTIMIZER)
    if seconds <= TRIED * step.length:
        return
    for optimizer in optimizers:
        if (found := try_faster(optimizer)) is not None:
            record.tried, record.faster = type(optimizer).__name__, found
            return


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
    times = _shortest(
        {option: partial(_step, kind, parameters, settings | ({option: True} if option else {})) for option in options},
        parameters,
    )
    if "" not in times:
        return None
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
            grad = parameter.grad
            is_sparse = grad is not None and grad.layout != torch.strided  # which not every implementation takes
            # A dense gradient may have any values: the time of a step does not depend on them.
            copy.grad = grad.clone() if grad is not None and is_sparse else torch.full_like(copy, 1e-3)
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
def _shortest(makes: dict[str, Callable[[], Callable[[], Any]]], parameters: list[torch.Tensor]) -> dict[str, float]:
    """Return the shortest time of a step that each of `makes` makes, in seconds; without those that cannot be made.

    They take turns, so that other work meets all alike, and are made for each turn, so that one state is held at a
    time.
    """
    on_cpu = bool(parameters) and parameters[0].device.type == "cpu"
    # On a CPU without the time in which this thread had no core, which would decide on a loaded host.
    clock = time.thread_time if on_cpu else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in makes}
    until = time.perf_counter() + TRIAL_S
    for number in range(MOST_ROUNDS):
        if number >= ROUNDS and time.perf_counter() > until:
            break
        for name in list(times):
            try:
                step = makes[name]()
            except (RuntimeError, ValueError, TypeError):  # this device, or these settings, cannot have it
                del times[name]
                continue
            _synchronize(parameters)
            began = clock()
            step()
            _synchronize(parameters)
            times[name].append(clock() - began)
            del step
    return {name: min(taken) for name, taken in times.items()}


def _synchronize(parameters: list[torch.Tensor]) -> None:
    if parameters[0].device.type != "cpu":
        torch.accelerator.synchronize(parameters[0].device)
