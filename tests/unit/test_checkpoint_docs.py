"""The page about checkpoints: its snippets run as pasted, one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def test_the_snippets_run_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(snippets) == 3
    for _ in range(2):  # the second time it resumes
        names: dict[str, Any] = {}
        for snippet in snippets:
            exec(snippet, names)
        assert names["best_acc1"] == 30.0
    assert len(list((tmp_path / "runs" / "7").iterdir())) == 3
