"""Records in docs/decisions: short, each with a status and a row in the index, and cited where it holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "decisions"
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
MOST_LINES = 45
STATUS = re.compile(r"Status: (accepted|superseded by \[(\d+)\]\((\S+)\).*)\.")
CITING = ("src/**/*.py", "src/**/*.md", "scripts/**/*.py", "tests/**/*.py", "docs/*.md", "docs/site/*.py", "*.md")

each_record = pytest.mark.parametrize("record", RECORDS, ids=[record.stem for record in RECORDS])


def status(record: Path) -> re.Match[str]:
    found = STATUS.fullmatch(record.read_text("utf-8").splitlines()[2])
    assert found, "the third line is 'Status: accepted.' or 'Status: superseded by [N](file)…'"
    return found


@each_record
def test_a_record_is_at_most_a_screen_and_has_a_status(record: Path) -> None:
    assert record.read_text("utf-8").count("\n") <= MOST_LINES
    if status(record)[3]:
        assert (FOLDER / status(record)[3]).is_file()
        assert int(status(record)[2]) == int(status(record)[3][:4])


def test_the_index_has_a_row_for_each_record() -> None:
    rows = []
    for record in RECORDS:
        title = record.read_text("utf-8").splitlines()[0].removeprefix("# ")
        rows.append(f"| {record.stem[:4]} | [{title}]({record.name}) | {status(record)[1]} |")
    index = (FOLDER / "README.md").read_text("utf-8")
    assert re.findall(r"^\| \d+ .*$", index, re.MULTILINE) == rows


def test_each_record_is_cited_outside_of_the_folder() -> None:
    # 17 of 39 were cited nowhere, so who changed the code that they are about did not meet them.
    texts = [
        path.read_text("utf-8") for pattern in CITING for path in ROOT.glob(pattern) if path.name != "CHANGELOG.md"
    ]
    cited = {int(number) for text in texts for number in re.findall(r"decisions?[ /](\d+)", text, re.IGNORECASE)}
    assert not {record.stem for record in RECORDS if int(record.stem[:4]) not in cited}


@each_record
def test_files_that_a_record_names_exist(record: Path) -> None:
    files = [
        path.as_posix() for folder in ("src", "tests", "scripts", "benchmarks") for path in (ROOT / folder).rglob("*.*")
    ]
    named = re.findall(r"`([\w./]+\.(?:py|css))`", record.read_text("utf-8"))
    assert not [name for name in named if not any(file.endswith(f"/{name}") for file in files)]
