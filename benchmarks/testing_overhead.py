"""The cost of a test on two ranks beside its body: our marker, our pool, ``mp.spawn``, torch's MultiProcessTestCase.

    python benchmarks/testing_overhead.py [--tests 15] [--keep]

Each way runs the same body, one small all-reduce over Gloo, as so many tests of one file, in a pytest of its own. The
first test is counted from the start of that pytest, which imports torch; for the others, the median of pytest's call
phase is shown. Rounds take turns, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dated_results import save

CONFTEST = """
import json, os, time
def pytest_runtest_logreport(report):
    if report.when == "call":
        assert report.passed, report.longreprtext
        with open(os.environ["TIMES"], "a") as file:
            file.write(json.dumps([time.time() - float(os.environ["BEGIN"]), report.duration]) + "\\n")
"""
BODY = """
def body():
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 4
"""
HEAD = f"""
import os
import pytest, torch
import torch.distributed as dist
COUNT = int(os.environ["COUNT"])
{BODY}
def in_group(rank, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    body()
    dist.destroy_process_group()

def free_port():
    import socket
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
"""
WAYS = {
    "pytest.mark.ranks(2)": """
@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("n", range(COUNT))
def test_it(n):
    body()
""",
    "pytest.mark.ranks(2), our backend": """
@pytest.mark.ranks(2)
@pytest.mark.parametrize("n", range(COUNT))
def test_it(n):
    body()
""",
    "paceline.testing.run_ranks": """
from paceline.testing import run_ranks
def of_rank(world):
    body()
@pytest.mark.parametrize("n", range(COUNT))
def test_it(n):
    run_ranks(2, of_rank, backend="gloo")
""",
    "paceline.testing.Pools, kept": """
from paceline.testing import Pools
def of_rank(world):
    body()
@pytest.fixture(scope="module")
def pools():
    with Pools("gloo") as pools:
        yield pools
@pytest.mark.parametrize("n", range(COUNT))
def test_it(n, pools):
    pools.run(2, of_rank)
""",
    "mp.spawn": """
import torch.multiprocessing as mp
@pytest.mark.parametrize("n", range(COUNT))
def test_it(n):
    mp.spawn(in_group, (free_port(),), nprocs=2)
""",
    "MultiProcessTestCase": """
from torch.testing._internal.common_distributed import MultiProcessTestCase
class TestIt(MultiProcessTestCase):
    world_size = 2
    def setUp(self):
        super().setUp()
        self._spawn_processes()
    def run_body(self):
        dist.init_process_group("gloo", store=dist.FileStore(self.file_name, 2), rank=self.rank, world_size=2)
        body()
        dist.destroy_process_group()
for number in range(COUNT):
    setattr(TestIt, f"test_{number}", lambda self: self.run_body())
""",
}
SLOW = ("mp.spawn", "MultiProcessTestCase")
"""Ways that start interpreters, and are so slow that a few tests show their cost."""


def measure(way: str, tests: int) -> tuple[float, list[float]]:
    """Return the seconds to the end of the first test, and those of each further one."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "conftest.py").write_text(CONFTEST)
        (place / "test_it.py").write_text(HEAD + WAYS[way])
        environment = {**os.environ, "COUNT": str(tests), "TIMES": str(place / "times")}
        environment |= {"BEGIN": str(time.time()), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "pytest_paceline", "-p", "no:cacheprovider", "test_it.py"],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{way}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        times = [json.loads(line) for line in (place / "times").read_text().splitlines()]
    return times[0][0], [duration for _, duration in times[1:]]


def main() -> None:
    """Measure all ways in turns, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="write the result into benchmarks/results, with the date")
    options = parser.parse_args()
    load = os.getloadavg()[0]  # of others
    firsts: dict[str, list[float]] = {way: [] for way in WAYS}
    others: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            first, rest = measure(way, 3 if way in SLOW else options.tests)
            firsts[way].append(first)
            others[way] += rest
    medians = {way: (statistics.median(firsts[way]), statistics.median(others[way])) for way in WAYS}
    base = medians["pytest.mark.ranks(2)"][1]
    print(f"torch's threads: 1; cores: {os.cpu_count()}; load before: {load:.1f}")
    print(f"{'':36}{'first test':>12}{'each further':>14}{'ratio':>8}")
    for way, (first, further) in medians.items():
        print(f"{way:36}{first:10.2f} s{further * 1e3:11.0f} ms{further / base:8.1f}")
    if options.keep:
        table = {
            way: {"first_s": round(first, 2), "further_ms": round(further * 1e3, 1), "firsts_s": firsts[way]}
            for way, (first, further) in medians.items()
        }
        settings = {"tests": options.tests, "rounds": options.rounds, "load_before": round(load, 2)}
        print(save("testing-overhead", {**settings, "ways": table}, ranks=2))


if __name__ == "__main__":
    main()
