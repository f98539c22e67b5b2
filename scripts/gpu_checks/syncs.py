"""Checks with CUDA's sync debug mode whether a step makes the host wait for the GPU."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpu_checks.models import SMALL, TINY
from gpu_checks.rows import Place, Row, holds, measured, not_run
from gpu_checks.wrapping import COMPRESSORS, compress, llama, tokens, torch_views, with_buckets

STEPS = 3
Step = Callable[[], None]


def waits(place: Place, step: Step) -> Counter[str]:
    """Run :data:`STEPS` steps, and count the host's waits by file and line."""
    if not place.on_gpu:
        step()
        return Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(STEPS):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    syncs = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
    return Counter(f"{Path(warning.filename).name}:{warning.lineno}" for warning in syncs)


@dataclass(frozen=True)
class Case:
    """A training step to check."""

    name: str
    most: int | None = 0
    """Maximum number of waits per step; None for no limit."""
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
    *(Case(kind, compressor=kind) for kind in COMPRESSORS),
)


def steady(place: Place, case: Case) -> Step:
    """Return the training step of `case`, after warm-up."""
    shape = SMALL if place.on_gpu else TINY
    module = llama(place, shape, torch.bfloat16)
    model: Any = torch_views(module) if case.name == "torch DDP" else with_buckets(module, **case.options)
    if case.compressor:
        compress(model, case.compressor)
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
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(place.steps(6, 2)):
        step()
    place.synchronize()
    return step


def described(lines: Counter[str]) -> str:
    """Describe the waits, for example as "2 per step: backward.py:165 (2)"."""
    places = ", ".join(f"{where} ({count / STEPS:g})" for where, count in lines.most_common(5))
    return f"{lines.total() / STEPS:g} per step" + (f": {places}" if places else "")


def syncs(place: Place) -> Iterator[Row]:
    """After warm-up, steps do not make the host wait."""
    number = torch.ones(1, device=place.device)
    control = Case("negative control: tensor.item()")
    lines = waits(place, lambda: print(end="" if number.item() else "0"))
    yield judged(place, control, lines, lines.total() == STEPS)
    for case in CASES:
        step = steady(place, case)
        lines = waits(place, step)
        yield judged(place, case, lines, case.most is None or lines.total() <= case.most * STEPS)
        del step


def judged(place: Place, case: Case, lines: Counter[str], ok: bool) -> Row:
    if not place.on_gpu:
        return not_run(case.name, "a CPU never makes the host wait")
    per_step = lines.total() / STEPS
    if case.most is None:
        return measured(case.name, described(lines), waits=per_step)
    return holds(case.name, described(lines), ok, f"at most {case.most}", waits=per_step)
