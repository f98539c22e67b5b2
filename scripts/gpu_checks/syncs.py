"""Whether a steady step makes the host wait for the GPU, found out by CUDA's own sync debug mode."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import paceline
from gpu_checks.models import SMALL, TINY
from gpu_checks.rows import Place, Row, holds, measured, not_run
from gpu_checks.stand_in import compressor
from gpu_checks.wrapping import llama, tokens, torch_views, with_buckets
from paceline import compression

STEPS = 3
Step = Callable[[], None]


@contextmanager
def sync_mode(place: Place, mode: str) -> Iterator[None]:
    """Warn of every operation that waits for the GPU, or raise; nothing on the CPU."""
    if place.on_gpu:
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        if place.on_gpu:
            torch.cuda.set_sync_debug_mode("default")


def waits(place: Place, step: Step) -> Counter[str]:
    """Where the host waited in :data:`STEPS` steps: file and line, and how often."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sync_mode(place, "warn"):
            for _ in range(STEPS):
                step()
    told = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
    return Counter(f"{Path(warning.filename).name}:{warning.lineno}" for warning in told)


@dataclass(frozen=True)
class Case:
    """A way to train."""

    name: str
    most: int | None = 0
    """Waits that a step may have; None to tell of them only."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the wrapper."""
    compressor: str = ""


CASES = (
    Case("torch DDP", None),
    Case("plain"),
    Case("clip_grad_norm_"),
    Case("weight(n)"),
    Case("no_sync, then a synchronized backward"),
    Case("reduce_dtype=float32", options={"reduce_dtype": torch.float32}),
    Case("check_finite", 1, options={"check_finite": True}),
    *(Case(kind, compressor=kind) for kind in ("Cast", "Int8", "PowerSGD", "TopK")),
)


def steady(place: Place, case: Case) -> Step:
    """Return a step as `case` says, which has run often enough to be steady."""
    shape = SMALL if place.on_gpu else TINY
    module = llama(place, shape, torch.bfloat16)
    model: Any = torch_views(module) if case.name == "torch DDP" else with_buckets(module, **case.options)
    if case.compressor:
        model.register_comm_hook(compressor(case.compressor, model), compression.hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = tokens(place, shape, 0, (2, 64) if place.on_gpu else (2, 8))

    def step() -> None:
        if case.name.startswith("no_sync"):
            with model.no_sync():
                model(ids).backward()
        if case.name == "weight(n)":
            with model.weight(ids.numel()):
                (model(ids) * ids.numel()).backward()
        else:
            model(ids).backward()
        if case.name == "clip_grad_norm_":
            paceline.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(place.steps(6, 2)):
        step()
    place.synchronize()
    return step


def said(found: Counter[str]) -> str:
    """«2 a step: backward.py:165 (2)»."""
    places = ", ".join(f"{where} ({count / STEPS:g})" for where, count in found.most_common(5))
    return f"{found.total() / STEPS:g} a step" + (f": {places}" if places else "")


def syncs(place: Place) -> Iterator[Row]:
    """Steady steps do not make the host wait; where they do, file and line are told."""
    number = torch.ones(1, device=place.device)
    what = "negative control: tensor.item()"
    found = waits(place, lambda: print(end="" if number.item() else "0"))
    yield holds(what, said(found), found.total() == STEPS) if place.on_gpu else only_tried(what)
    for case in CASES:
        step = steady(place, case)
        found = waits(place, step)
        per_step = found.total() / STEPS
        if not place.on_gpu:
            yield only_tried(case.name)
        elif case.most is None:
            yield measured(case.name, said(found), waits=per_step)
        else:
            yield holds(case.name, said(found), per_step <= case.most, f"at most {case.most}", waits=per_step)
        del step


def only_tried(what: str) -> Row:
    """The line of something that needs a GPU."""
    return not_run(what, "a CPU has nothing to wait for")
