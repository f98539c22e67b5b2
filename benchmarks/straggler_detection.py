"""The false alarms of `find_stragglers`, the stragglers that it finds, and the accuracy of the steps that it names.

    python benchmarks/straggler_detection.py --seconds 8 --workers 2

Jobs are drawn at random: every time is 0.1 s times noise, in some a rank is made slow. `--seconds` is the time for each
row of the tables; the more, the more jobs.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dated_results import save
from paceline.profiler import find_stragglers
from straggler_tables import NOISES, OTHER_NOISES, OTHER_PLANS, PLANS

Noise = Callable[[int, int], Tensor]
"""Makes noise of the logarithm of the times, shape (steps, ranks)."""


def normal(scale: float) -> Noise:
    return lambda steps, ranks: scale * torch.randn(steps, ranks, dtype=torch.float64)


def student(scale: float) -> Noise:
    return lambda steps, ranks: scale * torch.distributions.StudentT(3.0).sample((steps, ranks)).double()


def skewed(steps: int, ranks: int) -> Tensor:
    """Return noise of times that are 1 + 0.2 times an exponential variable."""
    return torch.log1p(0.2 * torch.empty(steps, ranks, dtype=torch.float64).exponential_())


def spikes(steps: int, ranks: int) -> Tensor:
    """Return noise of 2 %, with 3 % of the times about twice as long."""
    return normal(0.02)(steps, ranks) + (torch.rand(steps, ranks) < 0.03) * 0.7 * torch.rand(steps, ranks) * 2


def common(steps: int, ranks: int) -> Tensor:
    """Return noise of 5 % in steps that vary by 50 % for all ranks together, after a warm-up."""
    noise = normal(0.05)(steps, ranks) + normal(0.5)(steps, 1)
    noise[:3] += torch.tensor([4.0, 2.0, 1.0])[:, None] + normal(0.3)(3, ranks)
    return noise


def fleet(steps: int, ranks: int) -> Tensor:
    """Return noise of 2 % of ranks that differ by 1 % all the time."""
    return normal(0.02)(steps, ranks) + normal(0.01)(1, ranks)


def lasting(steps: int, ranks: int) -> Tensor:
    """Return noise of 5 %, in which each step keeps 70 % of the one before."""
    fresh = normal(0.05)(steps, ranks)
    for step in range(1, steps):
        fresh[step] = 0.7 * fresh[step - 1] + math.sqrt(1 - 0.49) * fresh[step]
    return fresh


NOISE: dict[str, Noise] = {
    "log-normal 1 %": normal(0.01),
    "log-normal 5 %": normal(0.05),
    "log-normal 20 %": normal(0.2),
    "Student t (3) 5 %": student(0.05),
    "Student t (3) 20 %": student(0.2),
    "1 + 20 % exponential": skewed,
    "2 % with 3 % of spikes": spikes,
    "5 %, common 50 %, warm-up": common,
    "2 %, ranks differ by 1 %": fleet,
    "5 %, lasting (0.7)": lasting,
}
STEPS, RANKS = (20, 200, 2000), (2, 8, 64, 512)
MOST_JOBS = 2000
KINDS = ("persistent", "emerging", "recovered", "fluctuating")


def plant(kind: str, steps: int) -> Tensor:
    """Return in which steps the rank is slow, as booleans."""
    slow = torch.zeros(steps, dtype=torch.bool)
    first = int(torch.randint(steps // 5, steps // 2, ()))
    if kind == "fluctuating":
        return torch.rand(steps) < 0.4
    slow[0 if kind == "persistent" else first : first + steps // 4 if kind == "recovered" else steps] = True
    return slow


def false_alarms(name: str, seconds: float) -> list[dict[str, Any]]:
    """Return how many jobs without a straggler had an alarm, for each size."""
    rows = []
    for steps, ranks in itertools.product(STEPS, RANKS):
        if steps * ranks > 10**6 and name != "log-normal 5 %":  # a second or more for each job
            continue
        jobs = alarms = 0
        end = time.process_time() + seconds
        while jobs < MOST_JOBS and time.process_time() < end:
            jobs += 1
            alarms += bool(find_stragglers(0.1 * NOISE[name](steps, ranks).exp()))
        rows.append({"noise": name, "steps": steps, "ranks": ranks, "jobs": jobs, "alarms": alarms})
    return rows


def detections(scale: float, seconds: float) -> list[dict[str, Any]]:
    """Return how often a planted straggler was found, alone and of its kind, and how far the first step was off."""
    rows = []
    for steps, ranks, slowdown, kind in itertools.product((100, 1000), (2, 16), (1.05, 1.1, 1.3, 2.0), KINDS):
        jobs = same_kind = 0
        off: list[int] = []
        end = time.process_time() + seconds
        while jobs < 100 and time.process_time() < end:
            jobs += 1
            times = 0.1 * normal(scale)(steps, ranks).exp()
            slow, rank = plant(kind, steps), int(torch.randint(ranks, ()))
            times[slow, rank] *= slowdown
            named = find_stragglers(times)
            if [straggler.rank for straggler in named] == [rank]:
                same_kind += named[0].kind == kind
                off.append(abs(named[0].first_step - int(slow.nonzero()[0])))
        row = {"noise": scale, "steps": steps, "ranks": ranks, "slowdown": slowdown, "kind": kind, "jobs": jobs}
        nine_of_ten = sorted(off)[int(0.9 * len(off))] if off else None
        rows.append({**row, "found": len(off), "same_kind": same_kind, "first_step_off_90": nine_of_ten})
    return rows


def planned(noise: str, plan: str, seed: int) -> dict[str, Any]:
    """Return how many slow ranks of tables of a kind were named, with their span, and how many others."""
    row: dict[str, Any] = {"noise": noise, "plan": plan, "tables": 0, "slow": 0, "found": 0, "with_span": 0, "false": 0}
    factors = (1.0,) if plan.startswith("even") else (1.2, 1.5, 2.0)
    for steps, ranks in ((300, 8), (300, 32), (1000, 16)):
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


def planned_tables(pool: ProcessPoolExecutor, seed: int) -> list[dict[str, Any]]:
    """Print and return the rows of :func:`planned` for all kinds of noise and plans."""
    kinds = list(itertools.product(NOISES | OTHER_NOISES, PLANS | OTHER_PLANS))
    rows = list(pool.map(planned, *zip(*kinds, strict=True), itertools.repeat(seed)))
    for plan in PLANS | OTHER_PLANS:
        for name, noises in (("tuned", NOISES), ("other", OTHER_NOISES)):
            of_plan = [row for row in rows if row["plan"] == plan and row["noise"] in noises]
            sums = {key: sum(row[key] for row in of_plan) for key in ("tables", "slow", "found", "with_span", "false")}
            print(f"{plan:<18} {name} noise: {sums}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each row")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, default=1, help="of the planned tables")
    parser.add_argument("--only-planned", action="store_true", help="leave out the rows that take --seconds")
    arguments = parser.parse_args()
    clean, planted = [], []
    if arguments.only_planned:
        with ProcessPoolExecutor(arguments.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            save("straggler-tables", planned_tables(pool, arguments.seed), ranks=1)
        return
    with ProcessPoolExecutor(arguments.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        seconds = itertools.repeat(arguments.seconds)
        quarter = itertools.repeat(arguments.seconds / 4)
        noisy, scales = pool.map(false_alarms, NOISE, seconds), pool.map(detections, (0.01, 0.05, 0.2), quarter)
        for name, rows in zip(NOISE, noisy, strict=True):
            clean += rows
            jobs, alarms = (sum(row[column] for row in rows) for column in ("jobs", "alarms"))
            worst = max(rows, key=lambda row: row["alarms"] / row["jobs"])
            where = f" (most with {worst['steps']} steps, {worst['ranks']} ranks)" if alarms else ""
            print(f"{name:<26} {alarms} alarms in {jobs} jobs{where}", flush=True)
        for rows in scales:
            planted += rows
            for row in rows:
                job = f"{row['noise']:<5} {row['steps']:>5} steps {row['ranks']:>3} ranks {row['slowdown']:<4}x "
                job += f"{row['kind']:<12}"
                found = f"found {row['found']}/{row['jobs']}, its kind {row['same_kind']}"
                print(f"{job} {found}, first step off by {row['first_step_off_90']}", flush=True)
    save("straggler-detection", {"false alarms": clean, "detection": planted}, ranks=1)


if __name__ == "__main__":
    main()
