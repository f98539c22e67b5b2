"""Options and make targets named in README and docs exist."""

from __future__ import annotations

import re
import shlex

import pytest
from test_docs import PAGES, ROOT

from paceline.tools import run_command
from processes import run_here

LINE = re.compile(r"^    (?:[A-Z_]+=\S+ )*(paceline .*?)(?: {2,}.*)?$", re.MULTILINE)
COMMANDS = sorted({row for page in PAGES for row in LINE.findall(page.read_text("utf-8"))})


@pytest.mark.parametrize("command", COMMANDS)
def test_options_in_documented_commands_exist(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(command)
    if words[1] == "run":
        run_command.parse(words[2:])
        return
    place = 3 if words[1] == "train" else 2
    # Options are parsed before the help is printed.
    assert run_here(monkeypatch, *words[1:place], "--help", *words[place:]) == 0
    assert "--help" in capsys.readouterr().out


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        named = set(re.findall(r"(?:^    |`)make ([a-z][\w-]*)", page.read_text("utf-8"), re.MULTILINE))
        assert named <= targets, page
