"""Finds real data for tests, which is not in the repository: in PACELINE_TEST_DATA or the folder beside the clone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def real_data(*parts: str) -> Path:
    """Return the path of a file or folder; skip the test if it does not exist."""
    default = Path(__file__).parents[2] / "shared" / "data"
    path = Path(os.environ.get("PACELINE_TEST_DATA", default)).joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no {path}; PACELINE_TEST_DATA names the folder of real data")
    return path
