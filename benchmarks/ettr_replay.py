"""The faults of a real cluster, replayed in minutes: the share of time in which training made progress (ETTR).

    python benchmarks/ettr_replay.py faults.csv --seconds 240 --nodes 12 --ranks 4 --repeats 3

The file has a line for each event: day, node, event (``fault_start`` or another), and more. A job on `--nodes` nodes of
`--cluster`, drawn by chance, has its share of the faults; `--days` become `--seconds`. The nodes belong to ranks in
turns, and a fault kills the node's rank (SIGKILL); one that comes while that rank is dead strikes nothing. The same
faults strike ``paceline run`` with a Checkpointer, and torchrun with torch DDP and a script that saves as often as
Young and Daly advise; torchrun with a new store for each restart, without which it often does not come back.

Time counts from the first step. Progress is the time of steps that no start had completed before, without saving.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dated_results import save

TRAINING = Path(__file__).with_name("ettr_training.py")
KINDS = ("paceline", "torch")
START_S = 120.0


@dataclass(frozen=True)
class Fault:
    """A strike, in seconds after the first step."""

    at: float
    rank: int


@dataclass
class Outcome:
    """How a job fared."""

    kind: str
    ettr: float
    steps: int
    """Completed steps that count in the end."""
    redone: int
    """Completed steps that were computed again."""
    strikes: int
    """Number of faults that struck a running rank."""
    recovery_s: list[float]
    """From each strike to the next step that no start had completed before."""
    saving_s: float


def faults_of(path: Path, options: argparse.Namespace, seed: int) -> list[Fault]:
    """Return the faults of the job's nodes, which `seed` draws."""
    nodes = random.Random(seed).sample(range(options.cluster), options.nodes)
    rank_of = {node: number % options.ranks for number, node in enumerate(nodes)}
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["event"] == "fault_start"]
    scale = options.seconds / options.days
    found = [(float(row["day"]) * scale, int(row["node"])) for row in rows if int(row["node"]) in rank_of]
    return [Fault(at, rank_of[node]) for at, node in sorted(found) if at < options.seconds]


def command(kind: str, folder: Path, ranks: int, between_faults: float) -> list[str]:
    """Return how the job is started."""
    script = [str(TRAINING), str(folder), kind, str(between_faults)]
    if kind == "paceline":
        return [sys.executable, "-m", "paceline", "run", "--nproc", str(ranks), "--max-restarts", "1000", *script]
    options = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1000"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *script]


def replay(kind: str, faults: list[Fault], options: argparse.Namespace) -> Outcome:
    """Run a job for the given time, and strike it."""
    with tempfile.TemporaryDirectory(prefix="paceline-ettr-") as place:
        folder = Path(place)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        line = command(kind, folder, options.ranks, options.seconds / max(1, len(faults)))
        with open(folder / "messages", "w") as messages:
            job = subprocess.Popen(line, env=environment, stdout=messages, stderr=messages)
            try:
                began = first_step(folder, job)
                strikes = strike_all(folder, job, began, faults, options.seconds)
            finally:
                end(folder, job)
        return outcome_of(kind, (folder / "steps").read_text(), strikes, began, options.seconds)


def first_step(folder: Path, job: subprocess.Popen[bytes]) -> float:
    """Wait for the first step; return when it was there."""
    deadline = time.monotonic() + START_S
    while not (folder / "steps").exists() or not (folder / "steps").stat().st_size:
        if job.poll() is not None or time.monotonic() > deadline:
            raise SystemExit((folder / "messages").read_text()[-3000:] or "the job did not come to its first step")
        time.sleep(0.01)
    return time.time()


def strike_all(
    folder: Path, job: subprocess.Popen[bytes], began: float, faults: list[Fault], seconds: float
) -> list[float]:
    """Kill ranks when it is time; return when ranks were killed."""
    strikes = []
    for fault in [*faults, None]:
        end_at = began + (seconds if fault is None else fault.at)
        while (left := end_at - time.time()) > 0 and job.poll() is None:
            time.sleep(min(left, 0.2))
        if job.poll() is not None:
            print("the job has ended by itself:", (folder / "messages").read_text()[-2000:], file=sys.stderr)
            break
        if fault is not None and is_alive(pid := pid_of(folder, fault.rank)):
            strikes.append(time.time())
            os.kill(pid, signal.SIGKILL)
    return strikes


def pid_of(folder: Path, rank: int) -> int:
    try:
        return int((folder / f"pid-{rank}").read_text())
    except OSError:
        return 0


def is_alive(pid: int) -> bool:
    """Return whether the training runs as process `pid`, which is no zombie, and no other program's."""
    with suppress(OSError):
        return bool(pid) and TRAINING.name in Path(f"/proc/{pid}/cmdline").read_text()
    return False


def end(folder: Path, job: subprocess.Popen[bytes]) -> None:
    """End the launcher, and the ranks that outlive it."""
    if job.poll() is None:
        job.kill()
        job.wait()
    while left := [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if is_of(path, folder)]:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def is_of(command_line: Path, folder: Path) -> bool:
    """Return whether a process was started with `folder` as an argument."""
    with suppress(OSError):
        return str(folder) in command_line.read_text(errors="replace")
    return False


def outcome_of(kind: str, lines: str, strikes: list[float], began: float, seconds: float) -> Outcome:
    """Count steps and recoveries from the lines that rank 0 wrote; see ettr_training.py for their format."""
    rows = [line.split() for line in lines.splitlines()]
    steps = [(process, int(step), float(at), float(saving)) for process, step, at, saving in rows]
    steps = [row for row in steps if row[2] <= began + seconds]
    most, progress, news = steps[0][1], 0.0, []
    for (last_process, _, last, _), (process, step, at, saving) in itertools.pairwise(steps):
        if step > most:
            most = step
            news.append(at)
            if process == last_process:
                progress += at - last - saving
    recovery = [next((at - strike for at in news if at > strike), began + seconds - strike) for strike in strikes]
    redone = len(steps) - len({step for _, step, _, _ in steps})
    saving = sum(row[3] for row in steps)
    return Outcome(kind, progress / seconds, most, redone, len(strikes), recovery, saving)


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return medians over the repeats."""
    recoveries = [each for outcome in outcomes for each in outcome.recovery_s]
    return {
        "ettr": statistics.median(each.ettr for each in outcomes),
        "steps": statistics.median(each.steps for each in outcomes),
        "redone": statistics.median(each.redone for each in outcomes),
        "strikes": sum(each.strikes for each in outcomes),
        "recovery_s": statistics.median(recoveries) if recoveries else None,
        "saving_s": statistics.median(each.saving_s for each in outcomes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="replay a cluster's faults in minutes")
    parser.add_argument("faults", type=Path, help="CSV with the columns day, node, event")
    parser.add_argument("--seconds", type=float, default=240.0, help="of each job")
    parser.add_argument("--days", type=float, default=348.0, help="that the file has, which become --seconds")
    parser.add_argument("--cluster", type=int, default=400, help="nodes of the cluster")
    parser.add_argument("--nodes", type=int, default=12, help="nodes of the job")
    parser.add_argument("--ranks", type=int, default=4, help="of the job")
    parser.add_argument("--repeats", type=int, default=1, help="jobs of each kind, on other nodes each time")
    parser.add_argument("--keep", action="store_true", help="write the outcome to benchmarks/results")
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    for seed in range(options.repeats):
        faults = faults_of(options.faults, options, seed)
        print(f"nodes drawn by {seed}: {len(faults)} faults in {options.seconds:.0f} s", flush=True)
        for kind in KINDS if seed % 2 == 0 else reversed(KINDS):
            outcomes.append(replay(kind, faults, options))
            print(row(kind, summary(outcomes[-1:])), flush=True)
    found = {kind: summary([each for each in outcomes if each.kind == kind]) for kind in KINDS}
    for kind in KINDS:
        print(row(f"median, {kind}", found[kind]))
    if options.keep:
        settings = {key: str(value) for key, value in vars(options).items() if key not in ("faults", "keep")}
        save(
            "ettr-replay", {"settings": settings, "medians": found, "jobs": list(map(asdict, outcomes))}, options.ranks
        )


def row(name: str, found: dict[str, Any]) -> str:
    recovery = "-" if found["recovery_s"] is None else f"{found['recovery_s']:.2f} s"
    return (
        f"{name:18} progress {100 * found['ettr']:5.1f} %  steps {found['steps']:7.0f}  redone {found['redone']:5.0f}  "
        f"strikes {found['strikes']:3}  from strike to progress {recovery}  saving {found['saving_s']:.1f} s"
    )


if __name__ == "__main__":
    main()
