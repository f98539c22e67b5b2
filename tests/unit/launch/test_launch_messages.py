"""Messages that are much too long, or that an exception cannot tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.launch.failures.root_cause import End, identity
from paceline.launch.rank import failure_record
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


@pytest.mark.parametrize("text", ["ACGT" * 25_000, "文" * 100_000, "1-" * 50_000, "1" + "-" * 100_000, "a." * 50_000])
def test_errors_of_any_length_are_compared_in_linear_time(text: str) -> None:
    # Not cut, as the expression itself has to be linear; the test's time-out is the limit.
    assert identity(failure_record.Record(text, text, 0.0)) == identity(failure_record.Record(text, text, 1.0))


def test_a_long_error_that_differs_in_numbers_alone_is_the_same() -> None:
    def identity_of(number: int) -> str:
        error = ValueError(f"row {number}: " + "no such column, " * 10_000)
        record = failure_record.of(error)
        return identity(failure_record.Record(record.message, failure_record.shortened(record.trace, 8_000), 0.0))

    assert identity_of(7) == identity_of(123_456)


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
