"""Peak memory of a training job: the bare module, torch DDP and Paceline, each in separate processes, in one run.

The memory of a rank is its proportional set size, sampled while steps run. Shared memory is divided among the ranks
that map it, so the sum over ranks is the job's memory. Paceline may take one bucket more than torch DDP with
``gradient_as_bucket_view=True``. Run by: python benchmarks/memory.py --help
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import paceline
from harness import parser_of, save
from paceline.ddp.options.buckets import CAPACITY, MIB
from step_time import torch_ddp
from workloads import WORKLOADS

WRAPS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "bare": (lambda module: module, "gloo"),
    "torch": (torch_ddp, "gloo"),
    "paceline": (paceline.DistributedDataParallel, "paceline"),
}


def proportional_bytes() -> int:
    """Return the proportional set size of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/self/smaps_rollup has no Pss")


class Peak:
    """Samples the process's memory in a thread while it is open."""

    def __enter__(self) -> Peak:
        self.bytes, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._over.wait(0.003):
            self.bytes = max(self.bytes, proportional_bytes())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def train(name: str, variant: str, steps: int, result: Path) -> None:
    """Train on this rank. Rank 0 writes the largest peak of all ranks to the file `result`."""
    wrap, backend = WRAPS[variant]
    world = paceline.init(backend)
    torch.manual_seed(0)
    model = wrap(WORKLOADS[name].build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x, y = WORKLOADS[name].batch()
    for step in range(steps):
        if step == 2:  # by now, buckets have been rebuilt and the optimizer has its state
            peak = Peak().__enter__()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    peak.__exit__()
    most = torch.tensor(float(peak.bytes))
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    if world.is_main:
        result.write_text(str(int(most)))
    world.close()


def main() -> None:
    parser = parser_of(__doc__, None)
    parser.add_argument("--workloads", nargs="+", default=["mlp-10M", "gpt-17M", "mlp-100M"], choices=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--train", nargs=3, metavar=("WORKLOAD", "VARIANT", "RESULT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        workload, variant, result = options.train
        train(workload, variant, options.steps, Path(result))
        return
    table = Table(
        "workload", "bare MiB", "torch DDP", "Paceline", "Paceline − torch DDP", title="peak memory of a rank"
    )
    results = {}
    for name in options.workloads:
        peaks: dict[str, float] = {}
        for variant in WRAPS:
            with tempfile.TemporaryDirectory() as folder:
                result = Path(folder) / "peak"
                command = [sys.executable, "-m", "paceline", "run", "--nproc", str(options.nproc), __file__]
                command += ["--steps", str(options.steps), "--train", name, variant, str(result)]
                subprocess.run(command, check=True, timeout=600)
                peaks[variant] = int(result.read_text()) / MIB
        results[name] = {key: round(value, 1) for key, value in peaks.items()}
        more = peaks["paceline"] - peaks["torch"]
        table.add_row(name, *(f"{peaks[variant]:.0f}" for variant in WRAPS), f"{more:+.0f}")
        print(json.dumps({name: results[name]}), flush=True)
    Console().print(table)
    print(f"one bucket is {CAPACITY / MIB:.0f} MiB; kept in", save("memory", results, options.nproc))


if __name__ == "__main__":
    main()
