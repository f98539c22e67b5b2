"""Strikes ranks at exact moments, and compares what they end with to runs that nothing disturbed: ``make chaos``.

Every run trains a small network with dropout, batch normalization, a schedule and shuffled data. It has to end with the
very bits of the undisturbed run: parameters, buffers, optimizer, schedule, random generators, and the log of samples;
with no completed step computed again, unless all ranks end at once; and it leaves nothing behind.

Under torch DDP on Gloo with more than two ranks, the order of a sum follows the buckets, which torch lays out again
after every start. So weights and optimizer are not compared there; everything else is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.core.telemetry.failpoints import VARIABLE

CHECKS = Path(__file__).parent / "chaos_checks"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
MOMENTS = ("forward", "bucket", "rendezvous", "prepared", "gate", "optimizer", "stepped", "boundary")
"""In the order in which a sequence strikes; the first start has to complete a step."""
TIMEOUT_S = 180.0
STEPS = 20


@dataclass(frozen=True)
class Case:
    """A run: the ranks' training, the signals that strike them, and the expected outcome besides equal bits."""

    name: str
    nproc: int
    orders: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    redone: tuple[int, int] = (0, 0)
    """Completed steps that are computed again: least, most."""
    source: str | None = "memory"
    """Where the last start goes on from; "any" where that depends on which of two copies is complete first."""
    weights: bool = True
    """Whether weights and optimizer are compared, not only random generators and samples."""
    recipe: bool = False
    """Whether it is the digits recipe, not the plain loop."""
    fails: str = ""
    """Expected text of the last line, for a job that has to end with exit code 1 and not with equal bits."""

    @property
    def key(self) -> str:
        """Names the undisturbed run that it is compared to."""
        return json.dumps([self.nproc, self.settings, self.recipe], sort_keys=True)


@dataclass
class Outcome:
    """How a case ended."""

    name: str
    nproc: int
    strikes: int
    restarts: int
    redone: int
    source: str | None
    equal: bool | None
    """Whether all bits agree with the undisturbed run; None where the job has to fail."""
    seconds: float
    problems: list[str]


def sequences() -> Iterator[Case]:
    """Yield runs that are struck again in every start, so that each moment has its turn, at ranks in turns."""
    combinations = [(nproc, wrapper, backend) for nproc in (2, 4) for wrapper in ("ours", "torch")
                    for backend in ("paceline", "gloo")]  # fmt: skip
    for turn, (nproc, wrapper, backend) in enumerate(combinations):
        orders = tuple(
            f"{moment} rank={(number + turn) % nproc} at={1 if moment == 'rendezvous' else 2} start={number}"
            for number, moment in enumerate(MOMENTS)
        )
        settings: dict[str, Any] = {"wrapper": wrapper, "backend": backend}
        is_reproducible = (nproc, wrapper, backend) != (4, "torch", "gloo")
        yield Case(f"every moment in turn: {wrapper}, {backend}", nproc, orders, settings, weights=is_reproducible)


def sharded() -> Iterator[Case]:
    """Yield runs with a sharded optimizer, which go on from disk."""
    settings = {"sharded": True, "every": 3}
    yield Case("sharded, inside the optimizer", 2, ("optimizer rank=1 at=5",), settings, (1, 1), "disk")
    yield Case("sharded, in the gathering", 4, ("gather rank=0 at=5",), settings, (1, 1), "disk")


def features() -> Iterator[Case]:
    """Yield scripts that have one thing more than the plain loop, each struck twice."""
    moments = {
        "PowerSGD": ("bucket rank=1 at=4", "gate rank=0 at=3"),
        "TopK": ("prepared rank=1 at=4", "boundary rank=0 at=3"),
        "static_graph": ("bucket rank=1 at=4", "forward rank=0 at=1"),
        "workers": ("forward rank=0 at=4", "stepped rank=1 at=3"),
        "a second Checkpointer": ("write rank=0 at=1", "forward rank=1 at=3"),
        "two models in turn": ("forward rank=1 at=8", "forward rank=0 at=6"),
        "evaluation between steps": ("evaluation rank=1 at=3", "gate rank=0 at=2"),
        "frozen, then thawed": ("gate rank=1 at=4", "bucket rank=0 at=3"),
        "accumulate": ("forward rank=1 at=8", "gate rank=0 at=2"),
        "bfloat16": ("bucket rank=1 at=4", "optimizer rank=0 at=2"),
        "GradScaler": ("forward rank=1 at=8", "prepared rank=0 at=3"),
        "SyncBatchNorm": ("bucket rank=1 at=4", "forward rank=0 at=3"),
        "an averaged model": ("gate rank=0 at=4", "stepped rank=1 at=3"),
        "a stream": ("forward rank=1 at=10", "bucket rank=0 at=1"),
    }
    for feature, (first, second) in moments.items():
        yield Case(f"with {feature}", 2, (first, f"{second} start=1"), {"feature": feature, "steps": 12})
    for end in ("kill", "raise"):
        order = f"sample rank=1 at=20 do={end}"
        yield Case(f"a DataLoader worker, {end}", 2, (order,), {"feature": "workers", "steps": 12})


def cases() -> list[Case]:
    """Return everything that is tried."""
    struck = "forward rank=1 at=5"
    saving = {"every": 3}
    background = {"every": 3, "background": True}
    again = (f"{struck} do=raise", *(f"forward rank=1 start={start} do=raise" for start in range(1, 5)))
    return [
        *sequences(),
        *sharded(),
        *(Case(f"{each} on disk", 2, (f"{each} rank=0 at={at}",), saving, source="any")
          for each, at in (("write", 2), ("before-rename", 2), ("after-rename", 2))),
        Case("the rank that rescues, too", 4, (struck, "rescue rank=0"), {}),
        Case("in the middle of the rescue, too", 4, (struck, "write rank=0 at=2"), {}),
        Case("all but one, one after the other", 4, (struck, "forward rank=2 at=5", "rescue rank=3"), {}),
        Case("all ranks, saved on disk", 2, ("forward at=6",), saving, (2, 2), "disk"),
        Case("write in the background", 2, ("write rank=0 at=2",), background),
        Case("all ranks, saved in the background", 2, ("forward at=8",), background, (1, 4), "disk"),
        Case("all ranks, nothing saved", 2, ("forward at=6",), {}, (5, 5), None),
        Case("the only one that could rescue, saved on disk", 2, (struck, "rescue rank=0"), saving, (1, 1), "disk"),
        Case("in the restore", 2, (struck, "restore rank=0 at=2 start=1", "restore rank=1 at=1 start=2")),
        Case("in two rendezvous, too", 2, (struck, "rendezvous rank=0 start=1", "rendezvous rank=1 start=2")),
        Case("SIGABRT", 2, ("gate rank=0 at=5 do=abort",)),
        Case("exception behind the gate", 2, ("gate rank=1 at=5 do=raise",)),
        Case("exception in forward", 2, ("forward rank=0 at=5 do=raise",)),
        Case("an early exit with code 0", 2, ("boundary rank=1 at=5 do=exit",)),
        Case("the first step", 2, ("bucket rank=0 at=1",)),
        Case("the last step", 2, (f"boundary rank=1 at={STEPS + 1}",)),
        Case("one rank alone, saved on disk", 1, ("forward at=6",), saving, (2, 2), "disk"),
        Case("one rank alone, an exception", 1, ("forward at=6 do=raise",)),
        Case("always at the same step", 2, again, fails="Struck: "),
        *features(),
        *(Case(f"digits, {moment}", nproc, (f"{moment} rank={rank} at=30",), recipe=True)
          for moment, nproc, rank in (("forward", 2, 1), ("gate", 2, 0), ("prepared", 4, 3))),
    ]  # fmt: skip


def run(case: Case, orders: tuple[str, ...], folder: Path) -> tuple[int | None, str, list[dict[str, Any] | None]]:
    """Run `case` under `orders`; returns its exit code, None for one that hung, its stderr, and each rank's outcome."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", VARIABLE: ";".join(orders)}
    command = [sys.executable, "-m", "paceline"]
    if case.recipe:
        command += [
            "train",
            "digits",
            "--nproc",
            str(case.nproc),
            "--epochs",
            "3",
            "--json",
            str(folder / "report.json"),
        ]
    else:
        script = CHECKS / ("features.py" if "feature" in case.settings else "loop.py")
        settings = json.dumps({"steps": STEPS, **case.settings})
        command += ["run", "--nproc", str(case.nproc), str(script), str(folder), settings]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    except subprocess.TimeoutExpired:
        process.kill()  # the ranks end with it
        return None, process.communicate()[1], [None] * case.nproc
    return process.returncode, errors, [_outcome(case, folder, rank) for rank in range(case.nproc)]


def _outcome(case: Case, folder: Path, rank: int) -> dict[str, Any] | None:
    try:
        if not case.recipe:
            return dict(json.loads((folder / f"rank-{rank}.json").read_text()))
        report = json.loads((folder / "report.json").read_text())
    except (OSError, ValueError):
        return None
    counted = {"restarts": report["restarts"], "redone": report["steps_redone"], "from": report["rescued_from"]}
    return {
        "states": report["replica_sha256"][rank],
        "samples": report["steps"],
        "generators": report["test_loss"],
        **counted,
    }


def compare(case: Case, undisturbed: list[Any], ended: tuple[int | None, str, list[Any]], seconds: float) -> Outcome:
    """Return how `case` ended, beside the undisturbed run."""
    code, errors, ranks = ended
    if case.fails:
        said = (errors.splitlines() or [""])[-1]
        problems = [] if code == 1 and case.fails in said else [f"exit code {code}", errors[-2000:]]
        restarts = errors.count("; starting all ranks again")
        return Outcome(case.name, case.nproc, len(case.orders), restarts, 0, None, None, round(seconds, 1), problems)
    problems = [] if code == 0 else [f"hung for {TIMEOUT_S:.0f} s" if code is None else f"exit code {code}"]
    first: dict[str, Any] = next((rank for rank in ranks if rank), {})
    equal = all(
        mine
        and theirs
        and all(mine[key] == theirs[key] for key in ("states", "generators", "samples")[not case.weights :])
        for mine, theirs in zip(ranks, undisturbed, strict=True)
    )
    if not equal:
        problems.append("other bits")
    if not case.redone[0] <= first.get("redone", -1) <= case.redone[1]:
        problems.append(f"{first.get('redone')} steps redone")
    if case.name != "the last step" and first.get("restarts", 0) == 0:
        problems.append("no restart")
    if first and first["from"] != case.source and case.source != "any":
        problems.append(f"went on from {first['from']}")
    if problems:
        problems.append(errors[-2000:])
    return Outcome(case.name, case.nproc, len(case.orders), first.get("restarts", 0), first.get("redone", 0),
                   first.get("from"), equal, round(seconds, 1), problems)  # fmt: skip


def leftovers(folder: Path) -> list[str]:
    """Return the processes and unfinished checkpoints that a run has left."""
    found = [str(path) for path in folder.rglob(".writing-*")]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "cmdline").read_bytes():
                found.append(f"process {process.name}")
        except OSError:
            continue
    return found


def try_all(chosen: list[Case], console: Console) -> list[Outcome]:
    """Run the cases, each beside its undisturbed run, which is made once."""
    undisturbed: dict[str, list[Any]] = {}
    outcomes = []
    columns = (TextColumn("{task.description:45.45}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(chosen))
        for case in chosen:
            progress.update(task, description=f"{case.nproc} ranks, {case.name}")
            with tempfile.TemporaryDirectory(prefix="paceline-chaos-") as place:
                folder = Path(place)
                if case.key not in undisturbed and not case.fails:
                    (folder / "undisturbed").mkdir()
                    undisturbed[case.key] = run(case, (), folder / "undisturbed")[2]
                (folder / "struck").mkdir()
                began = time.monotonic()
                ended = run(case, case.orders, folder / "struck")
                outcome = compare(case, undisturbed.get(case.key, []), ended, time.monotonic() - began)
                outcome.problems += leftovers(folder)
            outcomes.append(outcome)
            if outcome.problems:
                console.print(f"[red]{case.nproc} ranks, {case.name}:[/] {outcome.problems}")
            progress.advance(task)
    return outcomes


def main() -> int:
    """Try everything, show a table, and keep it with the date; the exit code tells whether all is as it should be."""
    parser = argparse.ArgumentParser(description="strike ranks at exact moments, and compare the bits they end with")
    parser.add_argument("-k", metavar="WORDS", default="", help="only cases whose name has these words")
    parser.add_argument("--keep", action="store_true", help="write the outcome to benchmarks/results")
    options = parser.parse_args()
    console = Console()
    chosen = [case for case in cases() if options.k in case.name]
    began = time.monotonic()
    outcomes = try_all(chosen, console)
    table = Table("ranks", "struck", "strikes", "restarts", "redone", "went on from", "equal bits", "seconds")
    for each in outcomes:
        cells = (each.nproc, each.name, each.strikes, each.restarts, each.redone, each.source, each.equal, each.seconds)
        table.add_row(*map(str, cells), style="red" if each.problems else None)
    console.print(table)
    bad = [each for each in outcomes if each.problems]
    strikes = sum(each.strikes for each in outcomes)
    console.print(f"{strikes} strikes in {len(outcomes)} runs, {len(bad)} not as they should be; "
                  f"{time.monotonic() - began:.0f} s")  # fmt: skip
    if options.keep:
        today = date.today()
        found = {"date": str(today), "torch": torch.__version__, "cores": os.cpu_count(),
                 "cases": [asdict(each) for each in outcomes]}  # fmt: skip
        (RESULTS / f"{today}-chaos.json").write_text(json.dumps(found, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; nothing was kept", file=sys.stderr)
        sys.exit(130)
