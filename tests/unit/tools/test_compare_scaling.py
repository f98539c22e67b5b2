"""``paceline compare RECIPE --nproc 1,2,4``: its figures from planted records, and whole comparisons."""

from __future__ import annotations

import io
import json
import math
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from test_compare import SCRIPT, record

from paceline.errors import UsageError
from paceline.tools.compare.comparison import figures
from paceline.tools.compare.modes import Way, scaling_ways
from paceline.tools.compare.scaling import Point, draw, notes, show
from paceline.tools.compare.sm_occupancy import OccupancyMeter
from paceline.tools.compare.turns_progress import showing_turns
from processes import Running, alive, paceline, script


def points_of(difference: float = 1e-7, occupancy: float | None = None) -> list[Point]:
    """One, two and four ranks; a tenth of the time is the all-reduce, or a twentieth when accumulated."""
    single = figures("single", record([[4.0, 4.0]], rows=32), 1, None, "reference")
    points = [Point(single, None, None)]
    for count in (2, 4):
        seconds, rows = [8.0 / count] * 2, 32 // count
        batch = record([seconds] * count, rows=rows, all_reduce_seconds=[0.8 / count])
        for rank in batch["ranks"]:
            rank["sm_occupancy"] = occupancy
        window = record([[16.0 / count] * 2] * count, rows=2 * rows, batches=2, all_reduce_seconds=[0.8 / count])
        points.append(
            Point(
                figures("ddp", batch, count, single, f"differ by {difference:.0e}"),
                figures("ddp-accumulate", window, count, single, "fewer steps"),
                difference,
            )
        )
    return points


def test_ways_are_one_process_and_each_other_number_with_and_without_accumulation() -> None:
    ddp, accumulated = [Way("ddp", 2), Way("ddp", 4)], [Way("ddp-accumulate", 2), Way("ddp-accumulate", 4)]
    assert scaling_ways([4, 1, 2], is_recipe=True) == [Way("single", 1), *ddp, *accumulated]
    assert scaling_ways([1, 2, 4], is_recipe=False) == [Way("single", 1), *ddp]
    for counts, message in (([2, 4], "lacks 1, to which speed-up is relative"), ([1, 2, 2], "has a number twice")):
        with pytest.raises(UsageError, match=message):
            scaling_ways(counts, is_recipe=True)


PLAIN = re.compile(r"\x1b\[[\d;]*m")


@pytest.mark.parametrize("columns", [40, 80, None])
@pytest.mark.parametrize("occupancy", [None, 0.25])
def test_both_tables_are_whole_and_fit_80_columns(
    columns: int | None,
    occupancy: float | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (("COLUMNS", columns), ("FORCE_COLOR", columns and 1)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))
    show(points_of(occupancy=occupancy), "digits", 1, 40)
    out = PLAIN.sub("", capsys.readouterr().out)
    assert "…" not in out
    if columns == 80:
        assert max(map(len, out.splitlines())) <= 80
    # In a narrow terminal a table comes in parts, each with its row of four ranks.
    cells = [cell for line in out.splitlines() if re.match(r" *4 ", line) for cell in line.split()[1:]]
    assert cells[:6] == ["2,000", "16.0", "2.00", "0.50", "2,000", "2.00"]
    shares = cells[6:]
    assert shares[:2] == ["10.0%", "5.0%"], "half of the all-reduces in the same time"
    assert ("25.0%" in shares) == (occupancy is not None)
    words = re.sub(r"\s+", " ", out)
    assert "the same global batches of 32 samples on more ranks" in words
    assert "after 43 steps of the same global batches" in words
    assert "largest weight: equal to 1e-06." in words
    assert ("SM occupancy: warps" in words) == (occupancy is not None)


@pytest.mark.parametrize("difference", [2e-6, math.nan])
def test_weights_that_part_are_said_to(difference: float) -> None:
    assert "further than 1e-06 for 2, 4 ranks" in notes(points_of(difference), 1, 40)[-1]


def test_the_chart_has_the_speed_ups_and_the_shares_of_the_all_reduce() -> None:
    left, right = draw(points_of(), "digits").axes
    ideal, ranks, accumulated = ([list(line.get_xdata()), list(line.get_ydata())] for line in left.lines)
    assert ideal == [[1, 2, 4], [1, 2, 4]]
    assert ranks == [[1, 2, 4], pytest.approx([1, 1, 2])]
    assert accumulated == [[2, 4], pytest.approx([1, 2])]
    assert [label.get_text() for label in left.get_xticklabels()] == ["1\n1.00", "2\n0.50", "4\n0.50"]
    shares = [[bar.get_height() for bar in bars] for bars in right.containers]
    assert shares == [pytest.approx([10, 10]), pytest.approx([5, 5])]


def test_nothing_is_measured_of_a_gpu_that_is_not_there() -> None:
    meter = OccupancyMeter()
    meter.begin()
    meter.end()
    assert meter.mean() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "1,0"], "--nproc=0 is less than 1"),
        (["--nproc", "3,x"], "--nproc='x' is neither a number nor auto, gpu or cpu"),
        (["--nproc", "1,"], "--nproc='' is neither a number nor"),
        (["--nproc", "1,2,64"], "--nproc 64 is more than the 32 samples of a batch; give fewer ranks, or"),
        (
            ["--nproc", "1,2", "--batch-size", "4", "--micro-batches", "4"],
            "--nproc 2 is more than the 1 samples of a batch",
        ),
        (["--nproc", "2,4"], "--nproc 2,4 lacks 1, to which speed-up is relative; give --nproc 1,2,4"),
        (["--nproc", "1,2,2"], "--nproc 1,2,2 has a number twice; give each once"),
        (["--nproc", "1,2", "--modes", "ddp"], "--modes is for one --nproc"),
    ],
)
def test_mistakes_are_one_line_before_anything_runs(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = paceline(tmp_path, "compare", "digits", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    lines = [line for line in done.stderr.splitlines() if not line.startswith("note:")]
    assert len(lines) == 1
    assert message in lines[0]


def test_a_script_on_more_ranks_has_the_weights_of_one_process(tmp_path: Path) -> None:
    options = ["--nproc", "1,2", "--steps", "3", "--json", "out.json", "--plot", "out.png"]
    done = paceline(tmp_path, "compare", *options, script(tmp_path, SCRIPT), "8", fork="all", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["1/2 single: 1 rank", "2/2 ddp: 2 ranks"]
    one, two = json.loads((tmp_path / "out.json").read_text())["ranks"]
    assert (one["ranks"], one["weights_difference"], one["accumulated"], two["ranks"]) == (1, None, None, 2)
    assert two["weights_difference"] < 1e-12
    assert two["row"]["speedup"] == pytest.approx(one["row"]["seconds_per_batch"] / two["row"]["seconds_per_batch"])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_recipe_on_1_2_and_4_ranks_ends_with_weights_equal_to_a_millionth(tmp_path: Path) -> None:
    options = ["--nproc", "1,2,4", "--steps", "20", "--json", "out.json"]
    done = paceline(tmp_path, "compare", "digits", *options, fork="all", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())["ranks"]
    assert [each["ranks"] for each in found] == [1, 2, 4]
    assert all(0 <= each["weights_difference"] <= 1e-6 for each in found[1:])
    assert all(each["row"]["rows_per_batch"] == 32 for each in found)
    assert [each["accumulated"]["weights"] for each in found[1:]] == ["fewer steps"] * 2
    assert re.search(r"largest\s+weight: equal to 1e-06", done.stdout)


def test_ctrl_c_leaves_no_rank_of_any_number(tmp_path: Path) -> None:
    text = SCRIPT.replace(
        "    for x, y in",
        "    import os, time, pathlib; place = f'{world.size}{world.rank}'\n"
        "    pathlib.Path(f'pid{place}').write_text(str(os.getpid()))\n"
        "    pathlib.Path(f'ready{place}').touch(); time.sleep(100)\n"
        "    for x, y in",
    )
    with Running(tmp_path, "compare", "--nproc", "1,2", script(tmp_path, text), "8", fork="all") as job:
        for ready in ("ready10", "ready20", "ready21"):
            job.wait_for(ready)
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130
    pids = [int(file.read_text()) for file in tmp_path.glob("pid*")]
    assert len(pids) == 3
    assert not [pid for pid in pids if alive(pid)]
    assert not re.search("Traceback", (tmp_path / "stderr").read_text())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_how_many_turns_were_taken_and_its_cursor_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen, turns = Terminal(), tmp_path / "turns"
    monkeypatch.setattr(sys, "stderr", screen)
    turns.write_bytes(b"")
    with showing_turns(turns, ranks=3, steps=4):  # a byte of each rank for its warm-up, and one for each of two turns
        for share, length in (("0%", 0), ("33%", 3), ("67%", 6)):
            turns.write_bytes(b"." * length)
            while share not in screen.getvalue():
                time.sleep(0.01)
    shown = screen.getvalue()
    assert shown.index("starting") < shown.index("measuring")
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert "\x1b[2K" in shown[shown.rindex("67%") :], "the bar is removed"


def test_elsewhere_it_shows_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with showing_turns(tmp_path / "turns", 3, 4):
        pass
    assert capsys.readouterr().err == ""
