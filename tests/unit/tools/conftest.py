"""Fixtures that run commands in the test process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from insides import agent
from processes import run_here


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a command with the given arguments and return its exit code."""
    return partial(run_here, monkeypatch)


@pytest.fixture
def refusal(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run a command that must be refused in one line before any rank starts, and return that line."""

    def refusal(*arguments: str) -> str:
        monkeypatch.setattr(agent, "launch", lambda job: pytest.fail("ranks were started"))
        assert run(*arguments) == 2
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if not line.startswith("note: ")]
        assert (out, len(lines)) == ("", 1), err
        assert lines[0].startswith("error: ")
        return lines[0]

    return refusal
