"""Measured numbers in README.md and the docs agree with their data files, and the check finds those that do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from docs_site import measured
from docs_site.measured import check_pages, check_text

TABLE = "| n | ms |\n|---|---|\n| 1.5 | 2.0 |\n| 2 | {} ms |\n\n<!--data:made-up:r.rows.ms-->"
DATA = {"results": {"a b": 1.25, "rows": [{"n": 1, "ms": 2.04}, {"n": 2, "ms": 31.9}]}}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made-up.json").write_text(json.dumps(DATA))
    monkeypatch.setattr(measured, "RESULTS", tmp_path)


def test_measured_numbers_agree_with_their_files() -> None:
    assert check_pages() == []


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Costs 2.0 ms.<!--data:made-up:r.rows(n=1).ms-->", None),
        ("Costs 2.1 ms.<!--data:made-up:r.rows(n=1).ms-->", "2.1 is 2.04 in made-up"),
        ("Costs 2.0 ms.", "2.0 names no data"),
        ("Costs 12ms.", "12 names no data"),
        ("A 1.4-fold speed.", "1.4 names no data"),
        ("It is 12.5x as fast.", "12.5 names no data"),
        ("At most 5%.<!--data:none-->", None),
        ("On 4 ranks, 2.0 and 31.9 ms.<!--data:made-up:r.rows.ms-->", None),
        ("On 4 ranks, 2.0 ms.<!--data:made-up:r.rows.ms-->", "the page lacks made-up: 31.9"),
        ('With 5% noise, 1.2× or 1.3×.<!--data:made-up:...,r.ab,r["a*"]-->', None),
        ("Costs 2.0 ms.<!--data:made-up:r.c-->", "KeyError"),
        ("Run `sleep 2.5 ms`, then 3 steps in 60 s.\n\n    took 2.5 ms\n", None),
        (TABLE.format(32), None),
        (TABLE.format(33), "33 is 31.9 in made-up"),
    ],
)
def test_only_wrong_or_unsourced_numbers_are_reported(text: str, fault: str | None) -> None:
    found = check_text(text)
    assert len(found) == (fault is not None), found
    assert fault is None or fault in found[0][1]
