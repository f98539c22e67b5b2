"""Checks Paceline's DistributedDataParallel on the GPUs of this machine, beside torch's.

    python scripts/gpu_check.py                    # NCCL, with 1 rank, 2 ranks, … up to the number of GPUs
    python scripts/gpu_check.py --device cpu       # the same checks on CPU ranks: tries the script, not the GPUs

Run from the source tree; the package need not be installed. Weights are random and nothing is fetched. With one
rank the wrapper has nothing to average, so there its buckets are put to work all the same ("buckets" in the table).
Prints a table; the exit code is 0 if every check holds, 1 if one does not, 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.distributed as dist
from gpu_checks import CHECKS, tidy
from gpu_models import SHAPES, Place, Row
from rich.console import Console
from rich.table import Table
from torch._C._distributed_c10d import FileStore

TIMEOUT_S = 900.0


def serve(rank: int, size: int, store: str, options: argparse.Namespace, results: Any) -> None:
    """One rank: run every check, send its rows."""
    device = torch.device(options.device, rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # one host, which may have no network
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S)
    )
    place = Place(rank, size, device, options.model, options.rounds)
    rows: list[Row] = []
    for check in CHECKS:
        tidy()
        try:
            rows += check(place)
        except Exception as error:  # the other ranks cannot go on without this one
            traceback.print_exc()
            results.put((rank, [*rows, Row(size, check.__name__, f"{type(error).__name__}: {error}", False)], True))
            return
    results.put((rank, rows, False))
    dist.destroy_process_group()


def run(size: int, options: argparse.Namespace) -> list[Row]:
    """The rows of a world of `size` ranks; it ends when all have answered, or one has failed."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    answers: dict[int, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, str(Path(folder, "store")), options, results)
        ranks = [context.Process(target=serve, args=(rank, *arguments)) for rank in range(size)]
        for process in ranks:
            process.start()
        deadline, failed = time.monotonic() + TIMEOUT_S, False
        while len(answers) < size and not failed and time.monotonic() < deadline:
            try:
                rank, answers[rank], failed = results.get(timeout=1)
            except queue.Empty:
                failed = any(process.exitcode for process in ranks)
        for process in ranks:
            process.join(0 if failed else 10)
            if process.is_alive():
                process.kill()
                process.join()
    return merged(size, answers)


def merged(size: int, answers: dict[int, list[Row]]) -> list[Row]:
    """One row for each check: a check holds if it does on every rank."""
    rows = list(answers.get(0, []))
    for rank, others in sorted(answers.items()):
        for at, other in enumerate(others):
            if at >= len(rows):
                rows.append(other)
            elif other.ok is False and rows[at].ok is not False:
                rows[at] = Row(size, other.what, f"rank {rank}: {other.value}", False)
    if missing := [rank for rank in range(size) if rank not in answers]:
        rows.append(Row(size, "all ranks come to their end", f"not {missing}", False))
    return rows


def exit_code(rows: list[Row]) -> int:
    """0 if every check holds."""
    return int(not rows or any(row.ok is False for row in rows))


def main() -> int:
    """Run the checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks; by default 1, 2, … one for each GPU")
    parser.add_argument("--model", choices=list(SHAPES), help="the model that is timed; SmolLM2-360M on GPUs")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of timing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if on_gpu and not (torch.cuda.is_available() and dist.is_nccl_available()):
        print(
            "gpu_check: this PyTorch finds no CUDA GPU with NCCL; use --device cpu to try the script", file=sys.stderr
        )
        return 2
    gpus = torch.cuda.device_count() if on_gpu else 2
    options.model = options.model or ("SmolLM2-360M" if on_gpu else "tiny")
    sizes = options.ranks or list(range(1, gpus + 1))
    if (on_gpu and max(sizes) > gpus) or min(sizes) < 1 or options.rounds < 1:
        parser.error(f"--ranks {sizes} --rounds {options.rounds}: give at least 1 of each, and a GPU for each rank")
    rows = [row for size in sizes for row in run(size, options)]
    where = f"{torch.cuda.get_device_name(0)}, NCCL" if on_gpu else "CPU, a trial run"
    title = f"{where}, PyTorch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    if options.json:
        print(json.dumps({"title": title, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        table = Table("ranks", "check", "result", "", title=title)
        for row in rows:
            table.add_row(str(row.ranks), row.what, row.value, {True: "ok", False: "FAILS", None: ""}[row.ok])
        Console(width=140).print(table)
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
