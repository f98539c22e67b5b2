"""Made-up reports of profiled runs, for tests of what shows them: any number of ranks and steps, one rank slower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.core.telemetry.spans import Span
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import (
    Advice,
    BucketTimes,
    Operator,
    RankInfo,
    Report,
    SlowRank,
    Timeline,
)

MEANS = {
    "data": 0.003,
    "forward": 0.021,
    "backward": 0.038,
    "communication": 0.009,
    "optimizer": 0.006,
    "checkpoint": 0.0,
    "other": 0.002,
}


def made_up(
    ranks: int = 2,
    steps: int = 40,
    slow: int | None = 1,
    late: float = 0.03,
    buckets: int = 4,
    hosts: int = 1,
    **changes: Any,
) -> Report:
    """Return the report of a run in which rank `slow` computes `late` seconds longer than the others."""
    draw = np.random.default_rng(ranks * 1000 + steps)
    parts = {part: MEANS.get(part, 0.0) * draw.normal(1, 0.03, (steps, ranks)) for part in step_parts.ALL}
    if slow is not None:
        parts["forward"][:, slow] += late
    parts["other"][steps // 2 :: 97] += 0.04  # a few outliers, for all ranks
    busy = sum(parts[part] for part in step_parts.ALL if part != "bubble")
    parts["bubble"] = busy.max(axis=1, keepdims=True) - busy
    step_seconds = sum(parts[part] for part in step_parts.ALL)
    waited = np.zeros((ranks, ranks))
    last = busy.argmax(axis=1)
    for step in range(steps):
        waited[:, last[step]] += parts["bubble"][step] / steps
    np.fill_diagonal(waited, 0)
    shares = {part: float(parts[part].sum() / step_seconds.sum()) for part in step_parts.ALL}
    shares["allreduce"] = 0.27
    verdict = "The step is bound by computing; nothing stands out."
    if slow is not None:
        length = 1e3 * step_seconds.mean()
        verdict = f"Rank {slow} keeps the others waiting: they idle 30 ms in each step of {length:.0f} ms."
    values: dict[str, Any] = {
        "title": "train.py --epochs 3",
        "backend": "paceline",
        "ranks": [
            RankInfo(rank, f"node{rank * hosts // ranks}", "cpu", 8, 8, int(2**30 * (1.1 + 0.01 * rank)))
            for rank in range(ranks)
        ],
        "steps": list(range(5, 5 + steps)),
        "step_seconds": step_seconds.tolist(),
        "parts": {part: rows.tolist() for part, rows in parts.items()},
        "waited_for": waited.tolist(),
        "headline": verdict,
        "advice": ADVICE,
        "stragglers": [] if slow is None else [SlowRank(slow, 5, 4 + steps, 1.5, "persistent", "forward", late)],
        "shares": shares,
        "overlap_by_rank": {"0": 0.62},
        "timeline": timeline(ranks, slow, late, buckets),
        "operators": OPERATORS,
        "memory": {"parameters": 400 << 20, "gradients": 400 << 20, "optimizer": 800 << 20, "peak": 2300 << 20},
        "missing": ["SM efficiency and occupancy: there is no GPU."],
        "samples_per_step": 32.0 * ranks,
    }
    return Report(**{**values, **changes})


def timeline(ranks: int, slow: int | None, late: float = 0.03, buckets: int = 4) -> Timeline:
    """Return a step in which buckets are launched during backward, and finish when the slow rank has launched them."""
    delays = [late if rank == slow else 0.0005 * (rank % 5) for rank in range(ranks)]
    every, rows = [0.038 / buckets * (bucket + 1) for bucket in range(buckets)], []
    launched = [[0.024 + delay + at for delay in delays] for at in every]
    finished = [max(row) + 0.004 for row in launched]
    for rank, delay in enumerate(delays):
        back = 0.024 + delay
        end = max(finished[-1], back + 0.038)
        row = [Span("data wait", 0, 0.003), Span("forward", 0.003, back), Span("backward", back, back + 0.038)]
        row += [Span("launch", launched[one][rank], launched[one][rank] + 0.0004, one) for one in range(buckets)]
        row += [Span("wait", back + 0.038, end), Span("bucket wait", back + 0.0381, end, buckets - 1)]
        row += [Span("optimizer", end, end + 0.006)]
        rows.append(row)
    times = [BucketTimes(one, 25 << 20, launched[one], [finished[one]] * ranks) for one in range(buckets)]
    return Timeline(17, rows, times)


def holes(rows: Sequence[Sequence[float]], rank: int, steps: slice = slice(None)) -> list[list[float | None]]:
    """Return the figures without those of `rank` in `steps`."""
    gone = set(range(len(rows))[steps])
    return [
        [None if index in gone and other == rank else one for other, one in enumerate(row)]
        for index, row in enumerate(rows)
    ]


ADVICE = [
    Advice(
        "straggler",
        "Find out what slows rank 1 down in forward: another program on its cores, or a slower clock.",
        "Rank 1 computes 30.2 ms longer than the median of the others, in every step; they wait for it.",
        0.27,
    ),
    Advice(
        "accumulation",
        "Accumulate gradients over 2 micro-batches or more.",
        "All-reduce takes 27.0 % of the time in which it or computing runs.",
        0.085,
        predictions={"1": 0.27, "2": 0.156, "4": 0.085, "8": 0.044},
    ),
    Advice(
        "threads",
        "Give each rank fewer threads: OMP_NUM_THREADS=4.",
        "2 ranks share 8 cores with 8 threads each.",
        0.03,
    ),
]

OPERATORS = [
    Operator("aten::addmm", 24, 0.0212, 0.41),
    Operator("aten::mm", 48, 0.0171, 0.33),
    Operator("paceline::all_reduce", 4, 0.0081, 0.157),
    Operator("aten::_fused_adamw_", 1, 0.0031, 0.06),
    Operator("aten::gelu_backward", 12, 0.0012, 0.023),
]
