"""``paceline run --pin``: each rank keeps to cores of its own, of one NUMA node where that is possible."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.launch.pinning import numa_nodes, share_cores
from processes import paceline, script


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.data())
def test_ranks_share_all_cores_equally_and_none_spans_two_nodes(sizes: list[int], data: st.DataObject) -> None:
    first = [sum(sizes[:place]) for place in range(len(sizes))]
    nodes = [list(range(begin, begin + size)) for begin, size in zip(first, sizes, strict=True)]
    ranks = data.draw(st.integers(1, sum(sizes)))
    shares = share_cores(nodes, ranks)
    assert len(shares) == ranks
    assert all(shares)
    given_out = [core for cores in shares for core in cores]
    assert len(given_out) == len(set(given_out))
    assert all(any(set(cores) <= set(node) for node in nodes) for cores in shares)
    for node in nodes:
        inside = [len(cores) for cores in shares if cores[0] in node]
        assert not inside or (sum(inside) == len(node) and max(inside) - min(inside) <= 1)


def test_more_ranks_than_cores_are_refused() -> None:
    with pytest.raises(UsageError, match="there are 3 for 4 ranks; start at most 3"):
        share_cores([[0, 1], [2]], 4)


def test_threads_of_one_physical_core_are_neighbours_and_forbidden_cores_are_left_out(tmp_path: Path) -> None:
    nodes, cpus = tmp_path / "node", tmp_path / "cpu"
    for number, cores in enumerate(("0-1,4-5", "2-3,6-7")):
        (nodes / f"node{number}").mkdir(parents=True)
        (nodes / f"node{number}" / "cpulist").write_text(cores + "\n")
    for core in range(8):
        folder = cpus / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    assert numa_nodes(set(range(8)), nodes, cpus) == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert numa_nodes({1, 5, 6}, nodes, cpus) == [[1, 5], [6]]
    assert numa_nodes({9, 8}, tmp_path / "none", cpus) == [[8, 9]], "where the system tells nothing, all are one node"


@pytest.mark.slow
def test_ranks_run_on_the_cores_that_they_were_given(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        "import json, os\n"
        "json.dump([sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS']], open(os.environ['RANK'], 'w'))\n",
    )
    cores = sorted(os.sched_getaffinity(0))
    ranks = min(2, len(cores))
    done = paceline(tmp_path, "run", "--nproc", str(ranks), "--pin", name)
    assert (done.returncode, done.stderr) == (0, "")
    seen = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(ranks)]
    assert sorted(core for own, _ in seen for core in own) == cores
    assert {threads for _, threads in seen} == {str(min(len(own) for own, _ in seen))}
    refused = paceline(tmp_path, "run", "--nproc", str(len(cores) + 1), "--pin", name)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: --pin gives every rank cores of its own")
    assert refused.stderr.count("\n") == 1
    many = paceline(tmp_path, "run", "--nnodes", "2", "--nproc", "1", "--pin", name)
    assert (many.returncode, many.stderr.startswith("error: --pin is for jobs on one host")) == (2, True)
