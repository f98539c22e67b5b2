"""Messages that are much too long, or that an exception cannot tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.launch import failure_record
from paceline.launch.root_cause import End
from processes import paceline, script

LONG = 'try: raise KeyError("ACGT" * 250_000)\nexcept KeyError as error: raise ValueError("文" * 100_000) from error'


def test_a_long_error_is_cut_to_a_few_kilobytes_everywhere(tmp_path: Path) -> None:
    # A regular expression took quadratic time for it: 90 s for 100,000 letters, with signals unheeded.
    name = script(tmp_path, LONG)
    done = paceline(tmp_path, "run", "--report", "report.json", name, fork="all")
    assert done.returncode in (1, 2)
    assert "error: rank 0 failed first (exit code 1: " in done.stderr
    assert len(done.stderr) < 20_000
    assert (tmp_path / "report.json").stat().st_size < 100_000
    first = json.loads((tmp_path / "report.json").read_text())["failures"][0]["first"]
    assert first["exception"]["type"] == "ValueError"


def test_a_headline_is_one_line_on_a_terminal() -> None:
    record = failure_record.Record("ValueError: unknown column\r\nname\r", "", 0.0)
    assert End(0, 1, 0.0, record=record).detail == "exit code 1: ValueError: unknown column"


WITHOUT_A_MESSAGE = {
    "raises": "def __str__(self): raise RuntimeError('no message')",
    "has attributes of its own": "def __getattr__(self, name): return {}[name]",
}


@pytest.mark.parametrize("body", WITHOUT_A_MESSAGE.values(), ids=WITHOUT_A_MESSAGE)
def test_an_exception_that_cannot_tell_its_message_is_named_with_its_traceback(body: str) -> None:
    # It was "exit code 1", without the exception.
    kinds: dict[str, type[Exception]] = {}
    exec(f"class Odd(Exception):\n    {body}\n", kinds)
    with pytest.raises(kinds["Odd"]) as raised:
        raise kinds["Odd"]
    record = failure_record.of(raised.value)
    assert End(0, 1, 0.0, record=record).detail.startswith("exit code 1: Odd")
    assert 'raise kinds["Odd"]' in record.trace
