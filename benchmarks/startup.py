"""What a process group costs before it does anything: seconds to start and memory per rank, beyond Gloo's.

Fresh ranks make a group of each kind in turn, on one store, after everything is imported: time from the call until a
first small all-reduce is back on every rank, and what that adds to the rank's memory (private pages, and pages that
ranks share). Then the same after one all-reduce of 25 MB, which takes the buffers into use.

    python benchmarks/startup.py [--ranks 2] [--rounds 5]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import paceline  # noqa: F401 (registers the backend)
from measure import save
from paceline.launch.store import LOOPBACK, loopback_store

BACKENDS = ("gloo", "paceline")
LARGE = 25 * 2**20 // 4


def memory() -> tuple[float, float]:
    """MB of this process's private pages, and of those shared with others in memory files."""
    private = shared = 0
    with open("/proc/self/smaps_rollup") as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if name in ("Private_Clean", "Private_Dirty"):
                private += int(rest.split()[0])
            elif name == "Pss_Shmem":
                shared = int(rest.split()[0])
    return private / 1024, shared / 1024


def rank_main(rank: int, size: int, port: int, backend: str, pipe: Connection) -> None:
    """One fresh rank: start, measure, report."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    large = torch.ones(LARGE)
    pipe.send("ready")
    pipe.recv()
    before = memory()
    start = time.perf_counter()
    dist.init_process_group(backend)
    dist.all_reduce(torch.ones(1))
    seconds = time.perf_counter() - start
    started = memory()
    dist.all_reduce(large)
    used = memory()
    pipe.send(
        {
            "start_ms": seconds * 1000,
            "started_mb": sum(started) - sum(before),
            "used_mb": sum(used) - sum(before),
            "used_shared_mb": used[1] - before[1],
        }
    )
    pipe.recv()
    os._exit(0)


def measure(context: Any, size: int, backend: str) -> dict[str, float]:
    """The slowest rank's time and the mean memory of one fresh world."""
    store = loopback_store()
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=rank_main, args=(rank, size, store.port, backend, theirs))
        process.start()
        pipes.append(ours)
        processes.append(process)
    for message in ("go", "end"):
        said = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(message)
    for process in processes:
        process.join()
    means = {name: statistics.mean(one[name] for one in said) for name in said[0]}
    return {**means, "start_ms": max(one["start_ms"] for one in said)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "paceline", "measure"])
    seen: dict[str, list[dict[str, float]]] = {backend: [] for backend in BACKENDS}
    for round_ in range(options.rounds + 1):
        for backend in BACKENDS:
            found = measure(context, options.ranks, backend)
            if round_:  # the first round warms up
                seen[backend].append(found)
    results: dict[str, Any] = {"ranks": options.ranks}
    for backend, rounds in seen.items():
        results[backend] = {name: round(statistics.median(one[name] for one in rounds), 2) for name in rounds[0]}
        print(f"{backend:10}" + "".join(f"{name} {value:8.2f}   " for name, value in results[backend].items()))
    pairs = list(zip(seen["paceline"], seen["gloo"], strict=True))
    results["start_ratio"] = round(statistics.median(a["start_ms"] / b["start_ms"] for a, b in pairs), 3)
    for name in ("started_mb", "used_mb"):
        results[f"{name}_beyond"] = round(statistics.median(a[name] - b[name] for a, b in pairs), 2)
    print({name: value for name, value in results.items() if name not in BACKENDS})
    print(f"kept in {save(f'startup-{options.ranks}-ranks', results, options.ranks)}")


if __name__ == "__main__":
    main()
