"""Stragglers that `find_stragglers` detects in tables of compute times, their spans, and its false alarms.

python benchmarks/straggler_detection.py --workers 2
"""

from __future__ import annotations

import argparse
import itertools
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch

from harness import save
from paceline.profiler import find_stragglers
from straggler_tables import NOISES, OTHER_NOISES, OTHER_PLANS, PLANS


def planned(noise: str, plan: str, seed: int) -> dict[str, Any]:
    """Return for one kind of tables how many slow ranks were found, how many with their span, and how many falsely."""
    row: dict[str, Any] = {"noise": noise, "plan": plan, "tables": 0, "slow": 0, "found": 0, "with_span": 0, "false": 0}
    factors = (1.0,) if plan.startswith("even") else (1.2, 1.5, 2.0)
    steps, ranks = 300, 8
    for scale, factor in itertools.product((0.03, 0.1, 0.3), factors):
        draw = np.random.default_rng([seed, steps, ranks, int(100 * scale), int(10 * factor), *noise.encode()])
        made = (PLANS | OTHER_PLANS)[plan](draw, steps, ranks, factor)
        times = 0.1 * made.factors * (NOISES | OTHER_NOISES)[noise](draw, steps, ranks, scale)
        found = {straggler.rank: straggler for straggler in find_stragglers(times)}
        row["tables"] += 1
        row["slow"] += len(made.slow)
        row["false"] += len(found.keys() - made.slow.keys())
        for rank in found.keys() & made.slow.keys():
            first, last = made.slow[rank]
            late = found[rank].first_step - first
            off = max(-late, late - made.begins.get(rank, 0), abs(found[rank].last_step - last))
            row["found"] += 1
            row["with_span"] += off <= max(5, 0.05 * steps)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    kinds = list(itertools.product(NOISES | OTHER_NOISES, PLANS | OTHER_PLANS))
    with ProcessPoolExecutor(arguments.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        rows = list(pool.map(planned, *zip(*kinds, strict=True), itertools.repeat(arguments.seed)))
    for plan in PLANS | OTHER_PLANS:
        for name, noises in (("tuned", NOISES), ("other", OTHER_NOISES)):
            of_plan = [row for row in rows if row["plan"] == plan and row["noise"] in noises]
            sums = {key: sum(row[key] for row in of_plan) for key in ("tables", "slow", "found", "with_span", "false")}
            print(f"{plan:<18} {name} noise: {sums}")
    save("straggler-tables", rows, ranks=1)


if __name__ == "__main__":
    main()
