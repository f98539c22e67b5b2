"""``paceline bench collectives``: computed figures, refusals, and measurements with real ranks."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from insides import OPS, OURS, Row, measure, parse_ops, parse_sizes, take_turns
from paceline.errors import UsageError
from processes import paceline


def test_bus_bandwidth_matches_nccl_tests() -> None:
    # defined in nccl-tests' doc/PERFORMANCE.md
    factors = {("all_reduce", 4): 1.5, ("all_reduce", 1): 0.0, ("broadcast", 8): 1.0}
    for (op, ranks), factor in {**factors, ("reduce", 3): 1.0}.items():
        row = Row(op, "gloo", ranks, 4_000_000, (0.002,), 0)
        assert (row.algbw, row.busbw) == (pytest.approx(2.0), pytest.approx(2.0 * factor)), op


def test_sizes_accept_units_and_names_accept_either_dash() -> None:
    sizes = {"1M,4K": [4096, 2**20], "4k, 4KiB,4096,4KB": [4096], "25M,1G": [25 * 2**20, 2**30]}
    assert {text: parse_sizes(text) for text in sizes} == sizes
    assert parse_ops("broadcast,all-reduce,broadcast") == ["all_reduce", "broadcast"]


@pytest.mark.parametrize("text", ["", "0", "6", "4K,", "-4", "4.5M", "four"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--sizes: '"):
        parse_sizes(text)


def test_reported_time_is_the_median_with_quartiles() -> None:
    row = Row("all_reduce", "gloo", 2, 8, (5.0, 1.0, 2.0, 3.0, 40.0), 0)
    assert (row.seconds, row.quartiles, row.spread) == (3, (2, 5), 0.5)
    once = Row("all_reduce", "gloo", 2, 8, (5.0,), 0)
    assert (once.seconds, once.quartiles, once.spread) == (5, (5, 5), 0)


def test_variants_alternate_and_the_first_round_may_warm_up() -> None:
    calls: list[str] = []
    turns = {name: partial(lambda name: (calls.append(name), len(calls))[1], name) for name in "ab"}
    assert take_turns(turns, 2) == {"a": [3, 5], "b": [4, 6]}
    assert calls == list("ababab")
    calls.clear()
    assert take_turns(turns, 2, warm_up=False) == {"a": [1, 3], "b": [2, 4]}
    calls.clear()
    assert take_turns(turns, 2, warm_up=2, rotated=True) == {"a": [5, 8], "b": [6, 7]}
    assert calls == list("abbaabba")


REFUSED: dict[str, tuple[list[str], str]] = {
    "size": (["--sizes", "4K,oops"], "--sizes: 'oops' is not a size"),
    "too big": (["--sizes", "4000G"], "give smaller sizes"),
    "op": (["--ops", "all_to_all"], "--ops: 'all_to_all' is unknown; choose among all_reduce"),
    "plot": (["--plot", "plot.html"], "--plot plot.html: the name must end in .svg, .png or .pdf"),
    "folder": (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: the folder /nowhere does not exist"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_one_line_and_start_no_rank(arguments: list[str], message: str, refusal: Any) -> None:
    assert message in refusal("bench", "collectives", *arguments)


def few_calls() -> None:
    measure.CALLS, measure.ROUNDS = 2, 3


def measured(folder: Path, ranks: int, *options: str) -> tuple[str, list[dict[str, object]]]:
    arguments = ("bench", "collectives", "--nproc", str(ranks), "--json", "found.json", *options)
    done = paceline(folder, *arguments, fork="all", first=few_calls, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr, "a collective that torch renamed"
    return done.stdout, json.loads((folder / "found.json").read_text())["rows"]


@pytest.mark.slow
def test_real_ranks_measure_every_variant_with_correct_results(tmp_path: Path) -> None:
    options = ("--sizes", "20,64K", "--ops", ",".join(OPS), "--plot", "found.svg")
    out, rows = measured(tmp_path, 2, *options)
    for op in OPS:
        ours = {name.removesuffix(f"_{op}").replace("_", "-") for name in OURS[op]}
        others = {"gloo", "paceline"} | ({"paceline zero-copy"} if op == "all_reduce" else set())
        assert {row["variant"] for row in rows if row["op"] == op} == ours | others
        # 20 bytes are 5 elements, which do not divide evenly by 2 ranks
        assert {row["nbytes"] for row in rows if row["op"] == op} == {20, 65536}
    assert {row["wrong"] for row in rows} == {0}
    assert all(row["seconds"] > 0 for row in rows)  # type: ignore[operator]
    assert len(out.splitlines()) > len(rows)
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert ElementTree.parse(tmp_path / "found.svg").getroot().tag.endswith("svg")


def test_single_rank_is_allowed(tmp_path: Path) -> None:
    _, rows = measured(tmp_path, 1, "--sizes", "4K")
    assert [row["variant"] for row in rows][-2:] == ["paceline", "paceline zero-copy"]
    assert {row["busbw"] for row in rows} == {0.0}
