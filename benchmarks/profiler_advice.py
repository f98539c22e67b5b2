"""Predicted and measured savings of the profiler's advice: ``python benchmarks/profiler_advice.py``.

Each fault of ``faulty_training.py`` is profiled in alternation with its remedy, because other load on the machine
varies. The last case has no fault: two ranks do equal work, with and without other programs on their cores. There,
advice must not promise more than the noise.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from harness import save

SCRIPT = Path(__file__).with_name("faulty_training.py")
ADVICE = {
    "lengths": ("balance",),
    "hand-save": ("own-code",),
    "slow-loader": ("data-loading",),
    "busy-loader": ("data-loading",),
    "tiny-batch": ("larger-batch",),
    "checkpoints": ("checkpoints",),
    "slow-rank": ("straggler", "own-code"),
    "slow-rank-torch": ("straggler", "own-code"),
    "slow-half": ("straggler", "own-code"),
    "evaluation": ("own-code",),
    "garbage": ("garbage-collection",),
    "threads": ("threads",),
}
"""The expected advice for each fault. If two kinds of advice address the same cause, either is accepted."""
RANK = {"hand-save": 0, "slow-rank": 1, "slow-rank-torch": 1, "slow-half": 1, "evaluation": 0}
"""The rank with the fault."""
BUSY = "while True: pass"


def profile(folder: Path, *arguments: Any) -> dict[str, Any]:
    """Profile the script, and return the summary."""
    command = [sys.executable, "-m", "paceline", "profile", "--nproc", "2", "--out", str(folder), str(SCRIPT)]
    subprocess.run([*command, *map(str, arguments)], check=True, capture_output=True, timeout=600)
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def seconds(summary: dict[str, Any]) -> float:
    """Return the seconds per sample of the whole job."""
    ranks = summary["parts_ms_per_step"].values()
    step = sum(sum(parts.values()) for parts in ranks) / len(ranks) / 1e3
    return float(step / summary["samples_per_step"])


@contextmanager
def others(busy: int) -> Iterator[None]:
    """Keep `busy` programs running at full load."""
    with ExitStack() as stack:
        for _ in range(busy):
            rival = subprocess.Popen([sys.executable, "-c", BUSY])
            stack.callback(rival.wait)
            stack.callback(rival.kill)
        yield


def is_right(summary: dict[str, Any], fault: str) -> bool:
    """Return whether the first advice is expected for `fault` and names the right rank."""
    kinds = [one["kind"] for one in summary["advice"]]
    named = RANK.get(fault)
    return bool(kinds) and kinds[0] in ADVICE[fault] and (named is None or f"Rank {named} " in summary["headline"])


def advised_workers(summary: dict[str, Any]) -> list[Any]:
    """Return the option that sets the number of loader workers to the recommended value."""
    found = [re.search(r"num_workers=(\d+)", one["text"]) for one in summary["advice"]]
    return [option for match in found if match for option in ("--workers", match[1])]


def trials(folder: Path, fault: str, steps: int, rounds: int) -> dict[str, Any]:
    """Return the predicted and the measured saving for `fault`, as medians over `rounds`."""
    predicted, measured, kinds, right = [], [], [], []
    for _ in range(rounds):
        before = profile(folder / fault, fault, steps)
        after = profile(folder / "remedied", fault, steps, "--remedied", *advised_workers(before))
        kinds.append([one["kind"] for one in before["advice"]])
        right.append(is_right(before, fault))
        predicted += [one["gain"] for one in before["advice"] if one["kind"] in ADVICE[fault]]
        measured.append(1 - seconds(after) / seconds(before))
        print(f"{fault}: {before['headline']} {kinds[-1]}", flush=True)
    found = {
        "right": right,
        "advice": kinds,
        "predicted": round(median(predicted), 4) if predicted else None,
        "measured": round(median(measured), 4),
    }
    print(f"{fault}: {ADVICE[fault][0]} predicted {found['predicted']}, measured {found['measured']}", flush=True)
    return found


def loaded_runs(folder: Path, fault: str, steps: int, runs: int) -> dict[str, Any]:
    """Profile `fault` while two other programs run. Right advice names the fault, or the load that hides it."""
    kinds, right = [], []
    with others(2):
        for _ in range(runs):
            summary = profile(folder / "loaded", fault, steps)
            kinds.append([one["kind"] for one in summary["advice"]])
            right.append(is_right(summary, fault) or kinds[-1] == ["host-load"])
            print(f"{fault}, loaded: {summary['headline']} {kinds[-1]}", flush=True)
    return {"right": right, "advice": kinds}


def even_runs(folder: Path, steps: int, runs: int, busy: int) -> list[list[str]]:
    """Return the advice on each of `runs` profiles of an even job while `busy` programs run at full load."""
    found = []
    with others(busy):
        for number in range(runs):
            summary = profile(folder / "even", "nothing", steps)
            found.append([one["kind"] for one in summary["advice"]])
            print(f"even job {number} beside {busy} others: {summary['headline']} {found[-1]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", nargs="*", default=list(ADVICE), choices=ADVICE)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3, help="how often to profile each fault and its remedy")
    parser.add_argument("--loaded", type=int, default=3, help="profiles of each fault while two other programs run")
    parser.add_argument("--even", type=int, default=10, help="profiles of an even job, with and without other programs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rounds = arguments.rounds
        faults = {fault: trials(folder, fault, arguments.steps, rounds) for fault in arguments.faults if rounds}
        loaded = {fault: loaded_runs(folder, fault, arguments.steps, arguments.loaded) for fault in arguments.faults}
        even = {busy: even_runs(folder, arguments.steps, arguments.even, busy) for busy in (0, 2)}
    alarms = sum(kinds not in ([], ["host-load"]) for runs in even.values() for kinds in runs)
    for name, table in (("alone", faults), ("beside two programs", loaded)):
        verdicts = [one for row in table.values() for one in row["right"]]
        print(f"faults {name}: {sum(verdicts)} of {len(verdicts)} verdicts are right")
    print(f"even jobs: {alarms} of {2 * arguments.even} got other advice than to mind the load")
    print("kept in", save("profiler-advice", {"faults": faults, "loaded": loaded, "even": even}, ranks=2))


if __name__ == "__main__":
    main()
