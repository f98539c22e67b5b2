"""Startup cost of a process group, compared with Gloo: seconds to start, and memory per rank.

New ranks import everything, then create a group of each kind in turn. Measures the time until a first small all-reduce
has returned on every rank, and the memory that this adds to a rank (private pages and shared pages). Then measures the
memory again after an all-reduce of 25 MB, which uses the buffers.

    python benchmarks/startup.py [--ranks 2] [--rounds 5]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import paceline  # noqa: F401 (registers the backend)
from harness import save, take_turns
from paceline.launch.job import LOOPBACK, loopback_store

BACKENDS = ("gloo", "paceline")
LARGE = 25 * 2**20 // 4


def memory() -> tuple[float, float]:
    """Return the MB of private pages and of shared memory in this process."""
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
    """Run a new rank: create a group, and send the measurements to the parent."""
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
    """Start new ranks. Return the time of the slowest rank, and the mean memory."""
    store = loopback_store()
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=rank_main, args=(rank, size, store.port, backend, theirs))
        process.start()
        pipes.append(ours)
        processes.append(process)
    for message in ("go", "end"):
        answers = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(message)
    for process in processes:
        process.join()
    means = {name: statistics.mean(answer[name] for answer in answers) for name in answers[0]}
    return {**means, "start_ms": max(answer["start_ms"] for answer in answers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "paceline", "harness"])
    turns = {backend: partial(measure, context, options.ranks, backend) for backend in BACKENDS}
    worlds = take_turns(turns, options.rounds)
    results: dict[str, Any] = {"ranks": options.ranks}
    for backend, rounds in worlds.items():
        results[backend] = {name: round(statistics.median(world[name] for world in rounds), 2) for name in rounds[0]}
        print(f"{backend:10}" + "".join(f"{name} {value:8.2f}   " for name, value in results[backend].items()))
    pairs = list(zip(worlds["paceline"], worlds["gloo"], strict=True))
    results["start_ratio"] = round(statistics.median(a["start_ms"] / b["start_ms"] for a, b in pairs), 3)
    for name in ("started_mb", "used_mb"):
        results[f"{name}_beyond"] = round(statistics.median(a[name] - b[name] for a, b in pairs), 2)
    print({name: value for name, value in results.items() if name not in BACKENDS})
    print(f"kept in {save(f'startup-{options.ranks}-ranks', results, options.ranks)}")


if __name__ == "__main__":
    main()
