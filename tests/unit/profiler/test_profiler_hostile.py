"""Malicious profile folders: files outside stay untouched, and each error is one line."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from insides import RESULTS, ProfileSettings, path_of, print_summary, trace_of, write_facts, write_results, write_steps
from insides import rank_file_FOLDER as FOLDER
from paceline import UsageError
from paceline.profiler import profile
from profile_records import records


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid profile."""
    (tmp_path / "profile" / FOLDER).mkdir(parents=True)
    for record in records(2, 30):
        with path_of(tmp_path / "profile", record.rank).open("w") as file:
            write_facts(file, record)
            write_steps(file, record.steps)
            write_facts(file, record)
    return tmp_path / "profile"


def test_links_in_place_of_results_are_replaced_without_following_them(folder: Path, tmp_path: Path) -> None:
    outside = {name: tmp_path / f"own-{name}" for name in RESULTS}
    for name, file in outside.items():
        file.write_text("mine")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(file)
    write_results(folder)
    assert {file.read_text() for file in outside.values()} == {"mine"}
    assert not any((folder / name).is_symlink() for name in outside)


def test_link_in_place_of_the_records_is_not_followed_at_the_start(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "own"
    target.mkdir()
    (target / "rank-00000.jsonl").write_text("mine")
    new = tmp_path / "new"
    new.mkdir()
    (new / FOLDER).symlink_to(target)
    with pytest.raises(UsageError, match="ranks in it is a link"):
        ProfileSettings(str(new)).check()
    with pytest.raises(UsageError, match="ranks in it is a link"), profile(new):
        pass
    path_of(folder, 0).unlink()
    path_of(folder, 0).symlink_to(target / "rank-00000.jsonl")
    with profile(folder, operators=False):
        pass
    assert (target / "rank-00000.jsonl").read_text() == "mine"


MALICIOUS: dict[str, tuple[str, str]] = {
    # A pattern in the record of a rank, and its replacement.
    "huge world": ('"size": 2', '"size": 300000000'),
    "rank beyond the world": (r'"rank": \d', '"rank": 7'),
    "huge number": ('"own_cores": 0.0', '"own_cores": 1e308'),
    "not a number": ('"busy_cores": null', '"busy_cores": NaN'),
    "clocks as text": (r'"offsets": \[.*?\]\]', '"offsets": [["a", "b", "c"]]'),
    "zero-length steps": (r'"start": ([\d.]+), "end": [\d.]+', r'"start": \1, "end": \1'),
    "endless steps": (r'"end": [\d.]+', '"end": Infinity'),
    "unfinished collectives": (r'"meetings": \[.*?\]\]', '"meetings": [["ddp/0", 0]]'),
    "number in place of a line": (r"\A(.*\n)", r"\g<1>7\n"),
    "deep JSON": (r"\A(.*\n)", r"\1" + "[" * 100_000 + "]" * 100_000 + r"\n"),
    "number with many digits": ('"cores": 2', '"cores": ' + "9" * 100_000),
}


@pytest.mark.parametrize(("pattern", "replacement"), MALICIOUS.values(), ids=MALICIOUS)
def test_impossible_records_are_refused_in_one_line(folder: Path, pattern: str, replacement: str) -> None:
    for rank in range(2):
        text, count = re.subn(pattern, replacement, path_of(folder, rank).read_text())
        assert count > 0
        path_of(folder, rank).write_text(text)
    with pytest.raises(UsageError) as caught:
        write_results(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_nonregular_or_huge_files_are_not_read(folder: Path) -> None:
    path_of(folder, 1).unlink()
    os.mkfifo(path_of(folder, 1))
    with pytest.raises(UsageError, match="it is not a regular file"):
        write_results(folder)
    path_of(folder, 1).unlink()
    with path_of(folder, 1).open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UsageError, match="the limit is"):
        write_results(folder)


@pytest.mark.parametrize("text", ['{"traceEvents": [' * 50_000, '{"traceEvents": [{"ph": "X"}]}', "[]", '{"a": NaN}'])
def test_malicious_torch_trace_is_one_line_or_skipped(folder: Path, text: str) -> None:
    made = path_of(folder, 0).read_text().replace('"kind": "plain"', '"kind": "traced"', 3)
    path_of(folder, 0).write_text(made)
    trace_of(folder, 0).write_text(text)
    try:
        write_results(folder)
    except UsageError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_control_characters_do_not_reach_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        text = path_of(folder, rank).read_text()
        path_of(folder, rank).write_text(text.replace('"ended": ""', '"ended": "\\u001b[2J\\u0007gone"'))
    print_summary(write_results(folder))
    assert "gone" in (shown := capsys.readouterr().out)
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown


def test_long_errors_and_missing_records_take_one_short_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        text = path_of(folder, rank).read_text().replace('"size": 2', '"size": 40')
        path_of(folder, rank).write_text(text.replace('"ended": ""', f'"ended": "{"gone" * 5000}"'))
    print_summary(write_results(folder))
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not seen")]
    assert max(map(len, notes)) <= 2000
    assert sum("left no record" in line for line in notes) == 1
