"""Tables of measurements: figures are those of a dated file, and each ratio follows from its neighbours."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "measurements.md"
STEPS = {
    "MLP, 10 M parameters": "mlp-10M",
    "GPT, 17 M": "gpt-17M",
    "MLP, 100 M": "mlp-100M",
    "CNN, 3 M": "cnn-3M",
    "200 tiny layers": "tiny-200",
    "50 layers with norms": "normed-50",
    "1,000 parameters of 1 KB": "thousand-1KB",
}
SIZES = {"4 KB": "4096", "64 KB": "65536", "1 MB": "1000000", "25 MB": "26214400", "100 MB": "104857600"}


def rows(page: Path, titles: dict[str, str]) -> dict[str, list[str]]:
    """Return the cells of the rows with these titles, by the name in the results."""
    table = [re.split(r" *\| *", line.strip("| \n")) for line in page.read_text("utf-8").splitlines() if "|" in line]
    return {titles[first]: cells for first, *cells in table if first in titles}


def results(page: Path, benchmark: str) -> dict[str, Any]:
    """Return the results in the file that the page names for a benchmark."""
    [file] = set(
        re.findall(rf"\((?:\.\./)?benchmarks/results/(\d{{4}}-\d\d-\d\d-{benchmark}\.json)\)", page.read_text("utf-8"))
    )
    found: dict[str, Any] = json.loads((RESULTS / file).read_text("utf-8"))["results"]
    return found


def assert_shows(cell: str, value: float) -> None:
    """Assert that a cell is `value`, rounded to the digits that it shows."""
    digits = cell.removesuffix(" ms")
    decimals = len(digits.partition(".")[2])
    assert abs(float(digits) - value) <= 0.5 * 10**-decimals + 1e-9, f"{cell} stands for {value}"


@pytest.mark.parametrize("page", [README, PAGE], ids=lambda page: page.stem)
def test_training_steps_are_those_of_the_file_and_ratios_follow(page: Path) -> None:
    # 762 ms, 1.34 and 1.13 stood beside 1.24 ×, a median over rounds that no reader could compute again.
    measured, shown = results(page, "step-time"), rows(page, STEPS)
    assert len(shown) >= 6
    for name, (bare, *middle, torch, ours, ratio) in shown.items():
        result = measured[name]
        assert_shows(bare, result["bare ms"] if "bare ms" in result else result["bare, zeroed ms"])
        for cell in middle:
            assert_shows(cell, result["reference / bare"])
        assert_shows(torch, result["torch / bare"])
        assert_shows(ours, result["paceline / bare"])
        assert_shows(ratio, float(torch) / float(ours))
        assert float(ours) >= 1, "a step faster than bare has to be explained"


def test_all_reduces_are_those_of_the_file_and_ratios_follow() -> None:
    measured, shown = results(PAGE, "collectives-2-ranks"), rows(PAGE, SIZES)
    assert shown.keys() == set(SIZES.values())
    for size, (gloo, ordinary, shared, limit, *ratios) in shown.items():
        for cell, name in zip((gloo, ordinary, shared, limit), ("gloo", "ordinary", "zero copy", "limit"), strict=True):
            assert_shows(cell, measured[size][f"{name} ms"])
        quotients = float(gloo) / float(ordinary), float(gloo) / float(shared), float(limit) / float(shared)
        for cell, quotient in zip(ratios, quotients, strict=True):
            assert_shows(cell, quotient)
