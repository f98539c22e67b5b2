"""DDP and DiLoCo on two hosts that a slow link joins: ``python benchmarks/slow_links.py --data input.txt``, as root.

Two network namespaces are the hosts, with one rank each. The link between them has 100 Mbit/s and a round trip of
20 ms (tests/slow_link.py). All runs train the lm recipe's default model, with 20 MB of gradients, on the same samples:

    DDP       averages the gradients in every step
    DiLoCo    averages the changes of the weights every H steps, whole or in fragments, which travel during the next
              steps, as they are or compressed

DDP's loss does not depend on the link, so it comes from a run over a fast cable. DDP's time per step is measured in a
few steps on the slow link, and its total time is computed from that. All other times include every step and the last
average. The machine needs two idle cores, because a load that changes between runs distorts the speedups.

With ``--rounds``, every variant is trained once with each seed. The table has medians over the rounds.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import date
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # for the link, which is shared with the tests

import torch
from rich.console import Console
from rich.table import Table

from harness import parser_of, save
from namespaces import CABLE, Host, two_hosts
from paceline.core.host import cores
from planner import MOST_OTHERS, busy_seconds, own_seconds
from slow_link import MBIT, ROUND_TRIP_S, SLOW, SlowLink, has_netem

SCRIPT = Path(__file__).with_name("slow_link_training.py")
STEPS, QUICK_STEPS, DDP_STEPS = 1024, 128, 20
"""Steps of a training, of a training with ``--quick``, and of DDP on the slow link."""
LONGEST_DELAY = 8
"""Steps that a fragment may travel. The largest, a table of the embeddings, has 8 MB, which need 0.7 s on the link."""
ALPHA = 0.5
"""Share of the local weights in the merge with a fragment that was delayed, as in streaming DiLoCo's paper."""


Options = dict[str, Any]
"""Options of DiLoCo; empty for DDP."""
COLUMNS = {
    "time, s": ("seconds", "{:.1f}"),
    "speedup": ("speedup", "{:.1f}×"),
    "MB sent per step": ("sent_per_step", "{:.3f}"),
    "held-out loss": ("loss", "{:.4f}"),
    "vs DDP": ("loss_difference", "{:+.2%}"),
    "relay's CPU": ("relay_share", "{:.0%}"),
    "other programs' CPU": ("other_load", "{:.0%}"),
}
"""The table's columns of numbers: key in the results, and format."""


class Job:
    """Runs a script on two hosts."""

    def __init__(self, hosts: Sequence[Host], link: SlowLink, data: str, max_steps: int) -> None:
        self.hosts, self.link = hosts, link
        self.settings: dict[str, Any] = {"data": data, "max_steps": max_steps}

    def measure(self) -> dict[str, float]:
        """Return the speed and the round trip of the link."""
        return self._run(SLOW)

    def train(self, options: Options, seed: int, device: str = SLOW) -> dict[str, float]:
        """Train on the slow link, for DDP only some of the steps, or all steps over the fast cable."""
        max_steps = self.settings["max_steps"]
        steps = min(DDP_STEPS, max_steps) if device == SLOW and not options else max_steps
        began, busy, own, relay = time.monotonic(), busy_seconds(), own_seconds(), self.link.cpu_seconds()
        found = self._run(device, steps=steps, seed=seed, diloco=options)
        wall, relayed = time.monotonic() - began, self.link.cpu_seconds() - relay
        return {
            "seconds": max_steps * found["step"],
            "sent_per_step": found["sent"] / 1e6,
            "loss": found["loss"],
            "relay_share": relayed / wall,
            "other_load": (busy_seconds() - busy - (own_seconds() - own) - relayed) / wall,
        }

    def _run(self, device: str, **settings: Any) -> dict[str, float]:
        addresses = self.link.addresses if device == SLOW else [host.address for host in self.hosts]
        path = os.pathsep.join(sys.path)
        environment = os.environ | {"GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # otherwise, c10d warns that the hosts' addresses have no names
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            out = Path(folder) / "result.json"
            text = json.dumps(self.settings | settings | {"out": str(out)})
            jobs = []
            for number, host in enumerate(self.hosts):
                where = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", addresses[0], "--nproc", "1"]
                command = [sys.executable, "-m", "paceline", "run", *where, str(SCRIPT), text]
                job = subprocess.Popen(["ip", "netns", "exec", host.name, *command], env=environment)
                stack.callback(job.kill)
                jobs.append(job)
            if codes := [code for code in (job.wait(3600) for job in jobs) if code]:
                raise RuntimeError(f"the hosts' jobs ended with {codes}")
            result: dict[str, float] = json.loads(out.read_text())
            return result


def variants(
    every: Sequence[int], fragments: Sequence[int], compress: Sequence[str], lr: float, momentum: float
) -> list[Options]:
    """Return DDP, and DiLoCo with every combination of options, and an outer SGD with `lr` and `momentum`."""
    made: list[Options] = [{}]
    for steps, parts, method in product(every, fragments, compress):
        delay = min(LONGEST_DELAY, steps // parts // 2) if parts > 1 else 0
        options: Options = {"sync_every": steps, "fragments": parts, "delay": delay, "alpha": ALPHA if delay else 0.0}
        options |= {"outer_lr": lr, "outer_momentum": momentum}
        made.append(options | {"compress": None if method == "none" else method})
    return made


def rounds_of(job: Job, made: Sequence[Options], rounds: int) -> list[list[dict[str, float]]]:
    """Train every variant with each seed; return the results by round."""
    results = []
    for seed in range(rounds):
        loss = job.train({}, seed, CABLE)["loss"]
        found: list[dict[str, float]] = []
        for options in made:
            result = job.train(options, seed)
            if not options:
                result["loss"] = loss
            found.append(result)
            result["speedup"] = found[0]["seconds"] / result["seconds"]
            result["loss_difference"] = result["loss"] / loss - 1
            print(f"seed {seed}, {options or 'DDP'}: {result}", file=sys.stderr, flush=True)
        results.append(found)
    return results


def table_of(rows: Sequence[dict[str, Any]], steps: int, rounds: int) -> Table:
    """Return the table of the medians."""
    table = Table("", "H", "fragments", "delay", "compress", *COLUMNS)
    table.title = f"{steps} steps, {MBIT} Mbit/s, round trip {1e3 * ROUND_TRIP_S:g} ms; medians of {rounds} round(s)"
    for row in rows:
        options = [row.get(name) for name in ("sync_every", "fragments", "delay", "compress")]
        numbers = [form.format(row[key]) for key, form in COLUMNS.values()]
        table.add_row(row["method"], *("" if option is None else str(option) for option in options), *numbers)
    return table


def main() -> None:
    parser = parser_of(__doc__ or "", rounds=None)
    parser.add_argument("--data", required=True, help="UTF-8 text file")
    parser.add_argument("--rounds", type=int, default=1, help="seeds; variants take turns in each round")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps, and only a few variants")
    parser.add_argument("--steps", type=int, help=f"steps of a training; default {STEPS}")
    parser.add_argument("--every", type=int, nargs="+", metavar="H", help="steps between averages; default 8 32 128")
    parser.add_argument("--fragments", type=int, nargs="+", metavar="F", help="default 1 4")
    parser.add_argument("--compress", nargs="+", metavar="METHOD", help="default none fp16 int8")
    parser.add_argument("--outer-lr", type=float, default=1.0, help="learning rate of DiLoCo's outer SGD; default 1")
    parser.add_argument("--outer-momentum", type=float, default=0.0, help="its Nesterov momentum; default 0")
    arguments = parser.parse_args()
    quick = arguments.quick
    steps = arguments.steps or (QUICK_STEPS if quick else STEPS)
    made = variants(
        arguments.every or ([32] if quick else [8, 32, 128]),
        arguments.fragments or [1, 4],
        arguments.compress or (["none", "int8"] if quick else ["none", "fp16", "int8"]),
        arguments.outer_lr,
        arguments.outer_momentum,
    )
    if os.geteuid():
        parser.error("creating network namespaces needs root; run it as root")
    today = date.today().isoformat()
    print(f"{today}: {platform.machine()}, {cores()} cores, 1 thread a rank, torch {torch.__version__}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no namespace stays behind
    with two_hosts() as hosts, SlowLink(hosts) as link:
        congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
        netem = "has netem, which is not used" if has_netem() else "has no netem"
        print(
            f"the link: tc tbf limits the rate, a relay delays the packets; this kernel {netem}; TCP uses {congestion}"
        )
        job = Job(hosts, link, arguments.data, steps)
        found = job.measure()
        print(
            f"measured with Gloo: {found['one way']:.1f} Mbit/s one way, {found['all-reduce']:.1f} Mbit/s in both "
            f"directions at once, round trip {found['round trip']:.1f} ms"
        )
        results = rounds_of(job, made, arguments.rounds)
    rows: list[dict[str, Any]] = []
    for options, runs in zip(made, zip(*results, strict=True), strict=True):
        row = {"steps": steps, "method": "DiLoCo" if options else "DDP"} | options
        rows.append(row | {key: median(run[key] for run in runs) for key, _ in COLUMNS.values()})
    Console(width=140).print(table_of(rows, steps, arguments.rounds))
    if (load := max(row["other_load"] for row in rows)) > MOST_OTHERS:
        print(f"Other programs kept up to {load:.1f} cores busy, so the times and speedups above mean little.")
    print("kept in", save("slow-links", rows, ranks=len(hosts)))


if __name__ == "__main__":
    main()
