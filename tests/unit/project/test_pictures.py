"""The pictures in the docs show what Paceline prints now."""

from __future__ import annotations

import pytest
from pictures import outdated


def test_pictures_and_outputs_in_the_docs_are_current() -> None:
    # The README's picture showed sentences that the report had not printed for weeks.
    assert list(outdated()) == []


def test_a_changed_message_and_a_changed_number_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.tools.top.describe", lambda statuses: "all is well")
    monkeypatch.setattr("paceline.profiler.page.digits", lambda number: f"{number + 1:.0f}")
    monkeypatch.setattr("pictures.outputs", lambda: [])
    report, top = outdated()
    assert report.startswith("docs/pictures/profile.png shows '")
    assert "top.svg shows 'rank 1 is slow: the others wait" in top.replace("\xa0", " ")
    assert "now prints 'all is well'; run: make pictures" in top.replace("\xa0", " ")
