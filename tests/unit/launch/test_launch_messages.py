"""Overlong messages, and exceptions whose message cannot be formatted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.launch import failure_record
from paceline.launch.root_cause import End
from processes import paceline, script

LONG = 'try: raise KeyError("ACGT" * 250_000)\nexcept KeyError as error: raise ValueError("文" * 100_000) from error'


def test_long_errors_are_truncated_everywhere(tmp_path: Path) -> None:
    # A regular expression took quadratic time: 90 s for 100,000 characters, while signals were ignored.
    name = script(tmp_path, LONG)
    done = paceline(tmp_path, "run", "--report", "report.json", name, fork="all")
    assert done.returncode in (1, 2)
    assert "error: rank 0 failed first (exit code 1: " in done.stderr
    assert len(done.stderr) < 20_000
    assert (tmp_path / "report.json").stat().st_size < 100_000
    first = json.loads((tmp_path / "report.json").read_text())["failures"][0]["first"]
    assert first["exception"]["type"] == "ValueError"


def test_headline_fits_on_one_terminal_line() -> None:
    record = failure_record.Record("ValueError: unknown column\r\nname\r", "", 0.0)
    assert End(0, 1, 0.0, record=record).detail == "exit code 1: ValueError: unknown column"


WITHOUT_A_MESSAGE = {
    "raises": "def __str__(self): raise RuntimeError('no message')",
    "custom attributes": "def __getattr__(self, name): return {}[name]",
}


@pytest.mark.parametrize("body", WITHOUT_A_MESSAGE.values(), ids=WITHOUT_A_MESSAGE)
def test_exception_with_failing_str_is_named_with_its_traceback(body: str) -> None:
    # Only "exit code 1" was reported, without the exception.
    kinds: dict[str, type[Exception]] = {}
    exec(f"class Odd(Exception):\n    {body}\n", kinds)
    with pytest.raises(kinds["Odd"]) as raised:
        raise kinds["Odd"]
    record = failure_record.of(raised.value)
    assert End(0, 1, 0.0, record=record).detail.startswith("exit code 1: Odd")
    assert 'raise kinds["Odd"]' in record.trace
