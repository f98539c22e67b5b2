"""``paceline train digits --virtual-ranks``: one SHA-256 of the weights on any number of ranks."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from processes import paceline, strike
from recipe_reports import FIELDS


def trained(folder: Path, nproc: int, *options: str, orders: str = "") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train by the command; the report of the recipe, and the changes of the number of ranks."""
    options += ("--virtual-ranks", "8", "--batch-size", "120", "--epochs", "1")  # the last batch is short
    options += ("--json", "out.json", "--report", "job.json")
    first = partial(strike, orders) if orders else None
    done = paceline(folder, "train", "digits", "--nproc", str(nproc), *options, fork="all", first=first)
    assert done.returncode == 0, done.stderr
    report, job = (json.loads((folder / name).read_text()) for name in ("out.json", "job.json"))
    assert f"SHA-256 of the weights {report['replica_sha256'][0]}" in " ".join(done.stdout.split())
    return report, job["changes"]


@pytest.mark.slow
def test_1_rank_and_4_that_go_on_as_2_have_one_sha256_and_the_same_metrics(tmp_path: Path) -> None:
    alone, _ = trained(tmp_path, 1)
    orders = "forward rank=3 at=4; stepped rank=3 at=2 start=1"
    several, changes = trained(tmp_path, 4, "--min-nproc", "2", orders=orders)
    assert [(change["from"], change["to"], change["steps_redone"]) for change in changes] == [(4, 2, 0)]
    assert set(several["replica_sha256"]) == set(alone["replica_sha256"])
    own = FIELDS.keys() - {"steps"}
    metrics = [{name: value for name, value in report.items() if name not in own} for report in (alone, several)]
    assert metrics[0] == metrics[1]
