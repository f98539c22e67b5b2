"""Kills ranks at exact moments, and compares the results with undisturbed runs: ``make chaos``.

A disturbed run must end bit-identical to the undisturbed run: parameters, buffers, optimizer, schedule, random
generators, and the log of samples. It must not repeat a completed step unless all ranks end at once, and it must not
leave processes or unfinished checkpoints behind.

With more than two ranks on Gloo, torch DDP rebuilds its buckets after every start, which changes the order of sums.
For these runs, weights and optimizer are not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from paceline.core.failpoints import VARIABLE

TRAINING = Path(__file__).with_name("chaos_training.py")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
MOMENTS = ("forward", "bucket", "rendezvous", "prepared", "gate", "optimizer", "stepped", "boundary")
"""Points in a step where a rank is killed, in order. The first start must complete a step."""
TIMEOUT_S = 180.0
STEPS = 20

Ended = tuple[int | None, str, list[dict[str, Any] | None]]
"""Exit code of a run (None after a timeout), its stderr, and the outcome of each rank (None if missing)."""


@dataclass(frozen=True)
class Case:
    """A disturbed run: the training, the failures, and what to expect besides a bit-identical result."""

    name: str
    nproc: int
    orders: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    redone: tuple[int, int] = (0, 0)
    """Minimum and maximum number of completed steps that are repeated."""
    source: str | None = "memory"
    """Expected source of the state in the last start; "any" if it depends on timing."""
    weights: bool = True
    """Whether weights and optimizer are compared."""
    recipe: bool = False
    """Whether to run the digits recipe instead of the plain loop."""
    fails: str = ""
    """Expected text in the last line of output, if the job must fail with exit code 1."""

    @property
    def key(self) -> str:
        """Key of the undisturbed run to compare with."""
        return json.dumps([self.nproc, self.settings, self.recipe], sort_keys=True)


def sequences() -> Iterator[Case]:
    """Yield runs with a failure in every start, each at the next moment and on the next rank."""
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
    """Yield runs with a sharded optimizer, which restart from disk."""
    settings = {"sharded": True, "every": 3}
    yield Case("sharded, inside the optimizer", 2, ("optimizer rank=1 at=5",), settings, (1, 1), "disk")
    yield Case("sharded, in the gathering", 4, ("gather rank=0 at=5",), settings, (1, 1), "disk")


def cases() -> list[Case]:
    """Return all cases."""
    struck = "forward rank=1 at=5"
    saving = {"every": 3}
    background = {"every": 3, "background": True}
    again = (f"{struck} do=raise", *(f"forward rank=1 start={start} do=raise" for start in range(1, 5)))
    return [
        *sequences(),
        *sharded(),
        *(Case(f"{moment} on disk", 2, (f"{moment} rank=0 at={at}",), saving, source="any")
          for moment, at in (("write", 2), ("before-rename", 2), ("after-rename", 2))),
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
        Case("with accumulate", 2, ("forward rank=1 at=8", "gate rank=0 at=2 start=1"), {"accumulate": True}),
        *(Case(f"digits, {moment}", nproc, (f"{moment} rank={rank} at=30",), recipe=True)
          for moment, nproc, rank in (("forward", 2, 1), ("gate", 2, 0), ("prepared", 4, 3))),
    ]  # fmt: skip


def run(
    case: Case, orders: Sequence[str], folder: Path, options: Sequence[str] = (), timeout: float = TIMEOUT_S
) -> Ended:
    """Run `case` with the failures `orders` and additional `options` of ``paceline run``."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", VARIABLE: ";".join(orders)}
    if case.recipe:
        command = [*f"train digits --nproc {case.nproc} --epochs 3 --json".split(), str(folder / "report.json")]
    else:
        settings = json.dumps({"steps": STEPS, **case.settings})
        command = ["run", "--nproc", str(case.nproc), *options, str(TRAINING), str(folder), settings]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *command],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = process.communicate(timeout=timeout)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    except subprocess.TimeoutExpired:
        process.kill()  # the ranks end with the launcher
        return None, process.communicate()[1], [None] * case.nproc
    return process.returncode, errors, [_outcome(case, folder, rank) for rank in range(case.nproc)]


def _outcome(case: Case, folder: Path, rank: int) -> dict[str, Any] | None:
    try:
        if not case.recipe:
            return dict(json.loads((folder / f"rank-{rank}.json").read_text()))
        report = json.loads((folder / "report.json").read_text())
    except (OSError, ValueError):
        return None
    return {
        "states": report["replica_sha256"][rank],
        "samples": report["steps"],
        "generators": report["test_loss"],
        "restarts": report["restarts"],
        "redone": report["steps_redone"],
        "from": report["rescued_from"],
    }


def are_equal(case: Case, ranks: list[Any], undisturbed: list[Any]) -> bool:
    """Return whether every rank finished with results bit-identical to the undisturbed run."""
    keys = ("states", "generators", "samples") if case.weights else ("generators", "samples")
    return all(
        mine and theirs and all(mine[key] == theirs[key] for key in keys)
        for mine, theirs in zip(ranks, undisturbed, strict=True)
    )


def problems_of(case: Case, ended: Ended, undisturbed: list[Any]) -> Iterator[str]:
    """Yield a description of each difference from the expected outcome."""
    code, errors, ranks = ended
    if case.fails:
        if code != 1 or case.fails not in (errors.splitlines() or [""])[-1]:
            yield f"exit code {code}"
        return
    first: dict[str, Any] = next((rank for rank in ranks if rank), {})
    if code != 0:
        yield f"hung for {TIMEOUT_S:.0f} s" if code is None else f"exit code {code}"
    if not are_equal(case, ranks, undisturbed):
        yield "not bit-identical"
    if not case.redone[0] <= first.get("redone", -1) <= case.redone[1]:
        yield f"{first.get('redone')} steps redone"
    if case.name != "the last step" and first.get("restarts", 0) == 0:
        yield "no restart"
    if first and first["from"] != case.source and case.source != "any":
        yield f"restarted from {first['from']}"


def leftovers(folder: Path) -> list[str]:
    """Return the processes and unfinished checkpoints that a run has left behind."""
    left = [str(path) for path in folder.rglob(".writing-*")]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "cmdline").read_bytes():
                left.append(f"process {process.name}")
        except OSError:
            continue
    return left


def tried(case: Case, undisturbed: dict[str, list[Any]]) -> dict[str, Any]:
    """Run a case, and return its results for the record. First do its undisturbed run, if `undisturbed` lacks it."""
    with tempfile.TemporaryDirectory(prefix="paceline-chaos-") as temporary:
        folder = Path(temporary)
        if case.key not in undisturbed and not case.fails:
            (folder / "undisturbed").mkdir()
            undisturbed[case.key] = run(case, (), folder / "undisturbed")[2]
        (folder / "struck").mkdir()
        began = time.monotonic()
        ended = run(case, case.orders, folder / "struck")
        seconds = round(time.monotonic() - began, 1)
        reference = undisturbed.get(case.key, [])
        problems = list(problems_of(case, ended, reference))
        if problems:
            problems.append(ended[1][-2000:])
        problems += leftovers(folder)
    first: dict[str, Any] = next((rank for rank in ended[2] if rank), {})
    return {
        "name": case.name,
        "nproc": case.nproc,
        "strikes": len(case.orders),
        "restarts": ended[1].count("; restarting all ranks") if case.fails else first.get("restarts", 0),
        "redone": first.get("redone", 0),
        "source": first.get("from"),
        "equal": not case.fails and are_equal(case, ended[2], reference),
        "seconds": seconds,
        "problems": problems,
    }


def main() -> int:
    """Try the cases, and keep the results with the date; returns 1 if there is a problem."""
    parser = argparse.ArgumentParser(description="kill ranks at exact moments, and compare the resulting bits")
    parser.add_argument("-k", metavar="WORDS", default="", help="only cases whose name contains these words")
    parser.add_argument("--keep", action="store_true", help="write the results to benchmarks/results")
    options = parser.parse_args()
    chosen = [case for case in cases() if options.k in case.name]
    began, undisturbed, outcomes = time.monotonic(), dict[str, list[Any]](), list[dict[str, Any]]()
    for number, case in enumerate(chosen, 1):
        outcome = tried(case, undisturbed)
        outcomes.append(outcome)
        counts = "{restarts} restarts, {redone} steps redone, from {source}, {seconds} s".format(**outcome)
        print(f"[{number}/{len(chosen)}] {case.nproc} ranks, {case.name}: {counts}", flush=True)
        for problem in outcome["problems"]:
            print(f"    PROBLEM: {problem}", flush=True)
    failed = sum(bool(outcome["problems"]) for outcome in outcomes)
    strikes = sum(outcome["strikes"] for outcome in outcomes)
    print(f"{strikes} strikes in {len(outcomes)} runs, {failed} with problems; {time.monotonic() - began:.0f} s")
    if options.keep:
        today = str(date.today())
        record = {"date": today, "torch": torch.__version__, "cores": os.cpu_count(), "cases": outcomes}
        (RESULTS / f"{today}-chaos.json").write_text(json.dumps(record, indent=1) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; no results are kept", file=sys.stderr)
        sys.exit(130)
