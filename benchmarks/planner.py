"""Predictions of the scaling planner against measurements: ``python benchmarks/planner.py [part …]``, as root.

    ranks    profiles of 1 and 2 ranks predict 4 ranks on this machine, through shared memory and over Gloo
    links    2 and 4 ranks in network namespaces with shaped links, predicted from profiles on this machine and the
             links' nominal speed, and from a profile of 2 ranks on such links
    savings  eight changes to a training on 2 ranks whose link is slow: predicted and measured saving per sample
    buckets  the predicted best bucket size against the best one of a sweep

Every prediction is written to the results before its measurement begins. Variants take turns.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from harness import RESULTS, parser_of, save
from paceline.planner.hardware import Cluster, Link
from paceline.planner.predictions import BUCKETS_MIB, Job, best_bucket_mib, effects, with_buckets
from paceline.planner.profiles import MOST_RANKS, Profiled, from_profiles, from_summary

SCRIPT = Path(__file__).with_name("planned_training.py")
CABLE = "cable"
PAYLOAD = 1448 / 1514
"""Share of a full Ethernet frame that TCP carries; the shaper counts whole frames."""
LATENCY_S = 1e-4
"""Assumed latency of a link between namespaces."""
MOST_OTHERS, TRIES = 0.3, 3
"""Cores that other programs may keep busy during a run, and how often to try."""
loads: list[float] = []
"""Cores that other programs kept busy, by run."""
Where = Sequence[str | None]
"""Network namespace of each rank; None for this machine itself."""


# -- running ranks ------------------------------------------------------------------------------------------------


@contextmanager
def shaped(ranks: int, mbit: int) -> Iterator[Where]:
    """Make a network namespace for each rank, joined by a switch; each sends at most `mbit` Mbit/s."""
    names = [f"planner{os.getpid()}x{rank}" for rank in range(ranks)]
    switch = f"planner{os.getpid()}s"

    def run(*command: str) -> None:
        subprocess.run(command, check=True, timeout=60)

    with ExitStack() as stack:
        for name in (switch, *names):
            run("ip", "netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "up")
        for rank, name in enumerate(names):
            port = f"port{rank}"
            run("ip", "link", "add", CABLE, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            run("ip", "-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", CABLE)
            for device in ("lo", CABLE):
                run("ip", "-n", name, "link", "set", device, "up")
            shape = f"rate {mbit}mbit burst {max(128, mbit // 2)}kb latency 400ms"
            run("tc", "-n", name, "qdisc", "add", "dev", CABLE, "root", "tbf", *shape.split())
        yield names


def own_seconds() -> float:
    """Return the core seconds of the ranks that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def busy_seconds() -> float:
    """Return the seconds that the cores of this machine have been busy."""
    ticks = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:4]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def run_ranks(where: Where, **settings: Any) -> None:
    """Run the training on a rank in each of `where`, again until other programs hardly used the cores meanwhile."""
    for _ in range(TRIES):
        wall, busy, own = time.monotonic(), busy_seconds(), own_seconds()
        run_once(where, **settings)
        others = (busy_seconds() - busy - (own_seconds() - own)) / (time.monotonic() - wall)
        loads.append(others)
        if others < MOST_OTHERS or len(where) == 1:  # others may use the core that a single rank leaves idle
            return
        print(f"other programs keep {others:.2f} cores busy: again", file=sys.stderr, flush=True)
        time.sleep(5)


def run_once(where: Where, **settings: Any) -> None:
    """Run the training on a rank in each of `where`."""
    inside = where[0] is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": len(where), "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    common |= {"MASTER_ADDR": "10.77.0.1" if inside else "127.0.0.1", "GLOO_SOCKET_IFNAME": CABLE if inside else "lo"}
    with ExitStack() as stack:
        jobs = []
        for rank, name in enumerate(where):
            local = (0, 1) if inside else (rank, len(where))
            own = {"RANK": rank, "LOCAL_RANK": local[0], "LOCAL_WORLD_SIZE": local[1]}
            environment = os.environ | {key: str(value) for key, value in (common | own).items()}
            command = [sys.executable, str(SCRIPT), json.dumps(settings)]
            job = subprocess.Popen(
                ["ip", "netns", "exec", name, *command] if name else command, env=environment, stdout=subprocess.DEVNULL
            )
            stack.callback(job.kill)
            jobs.append(job)
        if codes := [code for code in (job.wait(1800) for job in jobs) if code]:
            raise RuntimeError(f"ranks ended with {codes}")


def profiled(where: Where, variant: dict[str, Any] | None = None, **settings: Any) -> Profiled:
    """Profile a training."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(where, profile=folder, variant=variant or {}, **settings)
        return from_summary(Path(folder)).plan


def measured(where: Where, variants: dict[str, dict[str, Any]], rounds: int, **settings: Any) -> dict[str, list[float]]:
    """Return the median seconds of a step in each round, by variant."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        run_ranks(where, variants=variants, rounds=rounds, out=str(out), **settings)
        times: dict[str, list[float]] = json.loads(out.read_text())
    return times


def here(ranks: int) -> Where:
    """Return places on this machine."""
    return [None] * ranks


# -- the results --------------------------------------------------------------------------------------------------


class Record:
    """Rows of predictions and measurements of one part, stored with the other parts in the dated file."""

    def __init__(self, part: str) -> None:
        self.part, self.rows = part, list[dict[str, Any]]()

    def predict(self, case: str, predicted: float, **details: Any) -> None:
        """Keep a prediction."""
        row = {"case": case, "predicted": predicted, **details, "predicted_at": time.time(), "other_load": loads[-1]}
        self.rows.append(row)
        self._save()

    def measure(self, case: str, found: float, rounds: Sequence[float] = ()) -> None:
        """Add the measurement to all predictions of `case`."""
        for row in self.rows:
            if row["case"] == case and "measured" not in row:
                row |= {"measured": found, "rounds": list(rounds), "measured_at": time.time()}
                row["other_load_measured"] = loads[-1]
                row["error"] = row["predicted"] / found - 1
                print(f"{self.part}: {case}: {row['predicted']:.4f} predicted, {found:.4f} measured", flush=True)
        self._save()

    def _save(self) -> None:
        file = RESULTS / f"{date.today().isoformat()}-planner.json"
        kept = json.loads(file.read_text())["results"] if file.exists() else {}
        save("planner", kept | {self.part: self.rows}, ranks=4)

    def show(self) -> None:
        """Print the rows."""
        table = Table("case", "from", "predicted", "measured", "error", title=self.part)
        for row in self.rows:
            numbers = f"{row['predicted']:.4f}", f"{row['measured']:.4f}", f"{row['error']:+.1%}"
            table.add_row(row["case"], row.get("source", ""), *numbers)
        Console(width=120).print(table)
        print("median error:", f"{median(abs(row['error']) for row in self.rows):.1%}")


# -- the parts ----------------------------------------------------------------------------------------------------


def ranks_part(rounds: int) -> Record:
    """Predict 4 ranks from 1 and 2."""
    record = Record("ranks")
    for workload, rows, backend in (
        ("mlp-10M", 1, "paceline"),
        ("gpt-17M", 1, "paceline"),
        ("cnn-3M", 1, "paceline"),
        ("mlp-10M", 1, "gloo"),
        ("gpt-17M", 1, "gloo"),
    ):
        settings: dict[str, Any] = {"workload": workload, "rows": rows, "backend": backend, "steps": 25}
        for _ in range(rounds):  # in turns, because the load of the machine varies
            profiles = [profiled(here(ranks), **settings) for ranks in (1, 2)]
            case = f"{workload}, {backend}, 4 ranks"
            record.predict(case, from_profiles(profiles).step(4).length_s, source="profiles of 1 and 2 ranks")
            times = measured(here(4), {"": {}}, 2, **settings)[""]
            record.measure(case, median(times), times)
    return record


def on_links(job: Job, link: Link) -> Job:
    """Return `job` on the cores of this machine, with `link` between its ranks, whose speed is the shaper's."""
    inside = replace(link, kind="measured")
    return replace(job, cluster=replace(job.cluster, devices_per_host=MOST_RANKS, inside=inside))


def links_part(rounds: int) -> Record:
    """Predict ranks with shaped links between them."""
    record = Record("links")
    for workload, rows, mbit, steps in (
        ("mlp-10M", 1, 1000, 20),
        ("mlp-10M", 1, 100, 4),
        ("gpt-17M", 4, 1000, 10),
        ("gpt-17M", 4, 100, 4),
    ):
        settings: dict[str, Any] = {"workload": workload, "rows": rows, "backend": "gloo"}
        nominal = Link(f"{mbit} Mbit/s", mbit * 1e6 / 8 * PAYLOAD, LATENCY_S, "measured")
        alone = [profiled(here(ranks), **settings | {"backend": "paceline"}, steps=25) for ranks in (1, 2)]
        anywhere = Cluster(MOST_RANKS, nominal, nominal, cores=alone[0].cores)
        job = from_profiles(alone, anywhere)
        cases = {ranks: f"{workload}, {rows}× batch, {mbit} Mbit/s, {ranks} ranks" for ranks in (2, 4)}
        for ranks, case in cases.items():
            predicted = on_links(job, nominal).step(ranks).length_s
            record.predict(case, predicted, source="profiles here and nominal speed")
        with shaped(4, mbit) as hosts:
            pair = profiled(hosts[:2], **settings, steps=max(10, steps))
            link = pair.link()
            assert link is not None
            job = from_profiles([alone[0], pair])
            record.predict(cases[4], on_links(job, link).step(4).length_s, source="profile of 2 ranks on such links")
            for ranks, case in cases.items():
                times = measured(hosts[:ranks], {"": {}}, rounds, **settings, steps=steps)[""]
                record.measure(case, median(times), times)
    return record


SAVINGS_ON: dict[str, Any] = {"workload": "gpt-17M", "rows": 4, "backend": "gloo"}
MBIT = 300
BASE = 400.0
"""Bucket size in MiB to which smaller buckets are compared; almost no communication overlaps."""

CHANGES: dict[str, dict[str, Any]] = {
    "accumulate 2 batches": {"accumulate": 2},
    "accumulate 4 batches": {"accumulate": 4},
    "bf16 gradients (Cast)": {"hook": "Cast"},
    "8-bit gradients (Int8)": {"hook": "Int8"},
    "sharded optimizer": {"sharded": True},
}


def job_of_two(hosts: Where) -> Job:
    """Profile 1 and 2 ranks of the training whose savings are measured."""
    one = profiled(here(1), **SAVINGS_ON, steps=15)
    two = profiled(hosts, **SAVINGS_ON, steps=15)
    link = two.link()
    assert link is not None
    return on_links(from_profiles([one, two]), link)


def savings_part(rounds: int) -> Record:
    """Predict and measure savings of time per sample."""
    record = Record("savings")
    with shaped(2, MBIT) as hosts:
        job = job_of_two(hosts)
        found = effects(job, 2)
        base = with_buckets(job, BASE).step(2).length_s
        changes: dict[str, tuple[str, dict[str, Any], float]] = {
            f"bucket_cap_mb={size:g} instead of {BASE:g}": (
                "base",
                {"bucket_cap_mb": size},
                1 - with_buckets(job, size).step(2).length_s / base,
            )
            for size in (1.0, 5.0, 25.0)
        }
        changes |= {change: ("default", variant, found[change]) for change, variant in CHANGES.items()}
        for change, (_, _, saving) in changes.items():
            record.predict(change, saving, source="profiles of 1 and 2 ranks")
        variants: dict[str, dict[str, Any]] = {"default": {}, "base": {"bucket_cap_mb": BASE}}
        variants |= {change: variant for change, (_, variant, _) in changes.items()}
        times = measured(hosts, variants, rounds, **SAVINGS_ON, steps=4)
        for change, (before, variant, _) in changes.items():
            factor = variant.get("accumulate", 1)
            ratios = [1 - after / factor / now for now, after in zip(times[before], times[change], strict=True)]
            record.measure(change, median(ratios), ratios)
    return record


def buckets_part(rounds: int) -> Record:
    """Predict the best bucket size, and try all candidates."""
    record = Record("buckets")
    with shaped(2, MBIT) as hosts:
        job = job_of_two(hosts)
        seconds, size = best_bucket_mib(job, 2)
        for candidate in BUCKETS_MIB:
            case = f"bucket_cap_mb={candidate:g}"
            record.predict(case, with_buckets(job, candidate).step(2).length_s, is_best=candidate == size)
        variants = {f"{candidate:g}": {"bucket_cap_mb": candidate} for candidate in BUCKETS_MIB}
        times = measured(hosts, variants, rounds, **SAVINGS_ON, steps=4)
        for name, found in times.items():
            record.measure(f"bucket_cap_mb={name}", median(found), found)
        best = min(map(median, times.values()))
        print(f"predicted {size:g} MiB: {median(times[f'{size:g}']) / best - 1:.1%} longer than the best", seconds)
    return record


PARTS = {"ranks": ranks_part, "links": links_part, "savings": savings_part, "buckets": buckets_part}


def main() -> None:
    parser = parser_of(__doc__ or "", rounds=5)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=list(PARTS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as in the ranks
    for part in arguments.parts or PARTS:
        PARTS[part](arguments.rounds).show()


if __name__ == "__main__":
    main()
