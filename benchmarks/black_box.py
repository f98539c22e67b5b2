"""The time that a rank's black box adds to a training step, with it and without it in turns.

The same steps of the same model, in which only the recorder's box is taken out and put back. Three clocks: wall, CPU
time of the training thread, which is the steadiest where cores are shared, and CPU time of the process. "added" is the
median over the rounds of a turn with the box less the turn without it of the same round; a turn is the median of many
steps. Beside it, the cost of one change of phase alone, and how many there are in a step.

Run by: paceline run --nproc 2 benchmarks/black_box.py --help
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import paceline
from clocks import CLOCKS, Clocks, between, medians, now, without_collections
from dated_results import save
from paceline.core.telemetry.flight_recorder import FORWARD, BlackBox
from paceline.core.telemetry.spans import recorder
from paceline.tools.bench.turns import take_turns

CALLS = 2000


def turn(step: Callable[[], None], box: BlackBox | None, repeat: int) -> Clocks:
    """Return the median seconds of `repeat` steps with this `box`, or None."""
    recorder.box = box
    dist.barrier()
    stretches = []
    with without_collections():
        for _ in range(repeat):
            began = now()
            step()
            stretches.append(between(began, now()))
    return medians(stretches)


def change_seconds(box: BlackBox) -> float:
    """Return the seconds of one change of phase: the best of many turns, because other load only adds to it."""
    best = float("inf")
    for _ in range(50):
        began = time.perf_counter()
        for _ in range(CALLS):
            box.change(FORWARD)
        best = min(best, (time.perf_counter() - began) / CALLS)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024, help="of the layers")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--repeat", type=int, default=20, help="steps in a turn")
    parser.add_argument("--keep", action="store_true", help="keep the results in a file")
    options = parser.parse_args()
    world = paceline.init()
    layers = [nn.Linear(options.width, options.width) for _ in range(options.layers)]
    model = paceline.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    x = torch.ones(options.batch_size, options.width)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    box = recorder.box
    if not isinstance(box, BlackBox):
        raise SystemExit("this rank has no black box; start it with paceline run")
    before = box._changes
    step()
    changes = box._changes - before
    turns = {"without": partial(turn, step, None, options.repeat), "with": partial(turn, step, box, options.repeat)}
    measured = take_turns(turns, options.rounds, rotated=True)
    bare = {clock: statistics.median(one[clock] for one in measured["without"]) for clock in CLOCKS}
    pairs = list(zip(measured["with"], measured["without"], strict=True))
    added = {clock: statistics.median(a[clock] - b[clock] for a, b in pairs) for clock in CLOCKS}
    alone = change_seconds(box)
    if world.is_main:
        for clock in CLOCKS:
            share = added[clock] / bare[clock]
            print(f"{clock:8} {1e3 * bare[clock]:8.3f} ms a step, box adds {1e6 * added[clock]:7.1f} us, {share:.3%}")
        total = changes * alone
        print(
            f"{changes} changes of phase in a step, {1e6 * alone:.2f} us each alone: {1e6 * total:.1f} us, "
            f"{total / bare['wall']:.3%} of the step"
        )
        if options.keep:
            results = {"bare": bare, "added": added, "changes": changes, "seconds of a change": alone}
            print("kept in", save("black-box", results))
    world.close()


if __name__ == "__main__":
    main()
