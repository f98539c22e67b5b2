"""``paceline compare``: its figures from planted records, and whole comparisons by the command."""

from __future__ import annotations

import json
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.output.wording import digits
from paceline.errors import UsageError
from paceline.tools.compare.comparison import Row, compare_weights, figures
from paceline.tools.compare.modes import MODES, choose_modes, devices_of, ranks_of
from paceline.tools.compare.report import draw, notes, show
from paceline.tools.compare.turn_taking import TURN, Place, Turns
from processes import Running, paceline, script

SCRIPT = """
import sys
import torch
from torch.utils.data import TensorDataset
import paceline
from paceline import DistributedDataParallel

with paceline.init() as world:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(64, 4, dtype=torch.float64), torch.randn(64, 2, dtype=torch.float64))
    for x, y in paceline.data.DataLoader(data, batch_size=int(sys.argv[1])):
        with model.weight(len(y)):
            (model(x) - y).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def record(seconds: list[list[float]], rows: int = 8, batches: int = 1, **changes: Any) -> dict[str, Any]:
    """What ranks with these times of steps would have written."""
    ranks = [
        {
            "seconds": times,
            "waited": [0.1 * (rank + 1)] * len(times),
            "batches": [batches] * len(times),
            "rows": [rows] * len(times),
            "largest": rows // batches,
            "memory": 1000 * (rank + 1),
            "sm_occupancy": None,
            "sha256": "same",
        }
        for rank, times in enumerate(seconds)
    ]
    turns = -(-len(seconds[0]) // TURN)
    return {"ranks": ranks, "all_reduce_seconds": [0.5] * turns, "wrappers": 1, **changes}


def test_figures_are_those_of_the_slowest_rank_and_relative_to_one_device() -> None:
    single = figures("single", record([[2.0, 2.0, 4.0]], rows=16), 2, None, "reference")
    row = figures("ddp", record([[1.0, 1.0, 2.0], [1.0, 2.0, 1.0]]), 2, single, "equal")
    assert (single.seconds, single.turns, single.seconds_per_batch) == (8, (2, 4), 3)
    assert (single.speedup, single.efficiency, single.all_reduce_share) == (1, 1, None)
    assert (single.all_reduce_seconds, single.exposed_seconds, single.bubble_seconds) == (None, None, None)
    assert row.turns == (1.5, 2), "of two steps each, by their slowest rank"
    assert (row.seconds, row.rows_per_batch) == (5, 16)
    assert row.seconds_per_batch == pytest.approx(3 * (1.5 / 2 + 2 / 4) / 2), "by the ratios of the turns"
    assert row.samples_per_second == pytest.approx(16 / row.seconds_per_batch)
    assert row.speedup == pytest.approx(3 / row.seconds_per_batch)
    assert row.efficiency == pytest.approx(row.speedup / 2)
    assert row.seconds_per_step == row.seconds_per_batch
    assert row.all_reduce_share == pytest.approx((0.5 / 1.5 + 0.5 / 2) / 2)
    assert row.all_reduce_seconds == pytest.approx(row.all_reduce_share * row.seconds_per_step)
    assert (row.memory_bytes, row.replicas_identical) == (2000, True)


def test_without_one_device_times_are_relative_to_the_first_mode() -> None:
    first = figures("dp", record([[3.0, 3.0]], rows=16), 2, None, "reference")
    row = figures("ddp", record([[1.0, 1.0]] * 2), 2, first, "equal")
    assert (first.seconds_per_batch, row.seconds_per_batch) == (3, 1)
    assert (first.speedup, first.efficiency, row.speedup, row.efficiency) == (None, None, None, None)


def test_ranks_that_wait_in_turn_wait_for_each_other_and_not_for_the_all_reduce() -> None:
    """Each was said to wait for the all-reduce, and for longer than that takes."""
    planted = record([[1.0] * 4] * 2)
    planted["ranks"][0]["waited"] = [0.3, 0.01, 0.3, 0.01]
    planted["ranks"][1]["waited"] = [0.01, 0.3, 0.01, 0.3]
    row = figures("ddp", planted, 2, None, "equal")
    assert row.exposed_seconds == pytest.approx(0.01), "for which even the last rank waited"
    assert row.bubble_seconds == pytest.approx((0.29 + 0) / 2)


def test_load_that_comes_and_goes_changes_no_ratio() -> None:
    """The modes have it alike, in each round: here rounds take 1, 3 and 9 times as long."""
    load = [slowness for slowness in (1.0, 9.0, 3.0) for _ in range(TURN)]
    single = figures("single", record([load], rows=16), 2, None, "reference")
    alone = [0.1 * slowness for slowness in (1.0, 9.0, 3.0)]
    halved = [slowness / 2 for slowness in load]
    row = figures("ddp", record([halved] * 2, all_reduce_seconds=alone), 2, single, "equal")
    assert (single.turns, row.turns) == ((1, 9, 3), (0.5, 4.5, 1.5))
    assert (row.speedup, row.efficiency) == (2, 1)
    assert row.all_reduce_share == pytest.approx(0.2)
    # Even where a mode's own median is of another round than that of the mode single.
    disturbed = [1.0] * TURN + halved[TURN:]
    assert figures("ddp", record([disturbed] * 2), 2, single, "equal").speedup == 2


def test_turns_of_modes_follow_each_other_and_their_ranks_share_them(tmp_path: Path) -> None:
    file = tmp_path / "turns"
    file.touch()
    counts, rounds = [1, 3, 2], 3
    events: list[tuple[str, int]] = []

    def rank(mode: int) -> None:
        turns = Turns(Place(str(file), sum(counts[:mode]), sum(counts)))
        events.append(("warm", mode))
        turns.end()
        for _ in range(rounds):
            turns.take()
            events.append(("take", mode))
            events.append(("end", mode))
            turns.end()

    threads = [threading.Thread(target=rank, args=(mode,)) for mode, count in enumerate(counts) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    warm_up = sum(counts)
    assert sorted(events[:warm_up]) == [("warm", mode) for mode, count in enumerate(counts) for _ in range(count)]
    of_a_round = [mode for mode, count in enumerate(counts) for _ in range(2 * count)]
    assert [mode for _, mode in events[warm_up:]] == rounds * of_a_round


def test_accumulation_halves_the_share_of_the_all_reduce() -> None:
    row = figures("ddp-accumulate", record([[4.0, 4.0]] * 2, rows=16, batches=2), 2, None, "fewer steps")
    assert (row.seconds_per_batch, row.rows_per_batch, row.speedup) == (2, 16, None)
    assert (row.seconds_per_step, row.all_reduce_share) == (4, pytest.approx(0.5 / 4))


def test_without_rows_modes_are_compared_by_batches() -> None:
    single = figures("single", record([[3.0]], rows=0), 2, None, "reference")
    row = figures("dp", record([[2.0]], rows=0), 2, single, "equal")
    assert (row.samples_per_second, row.speedup, row.efficiency) == (None, 1.5, 0.75)


def test_weights_are_compared_relative_to_the_largest() -> None:
    reference = {"a": torch.tensor([1.0, -4.0]), "b": torch.zeros(0)}
    assert compare_weights(reference, {"a": torch.tensor([1.0, -4.0]), "b": torch.zeros(0)}) == "equal"
    assert compare_weights(reference, {"a": torch.tensor([1.0, -4.004]), "b": torch.zeros(0)}) == "differ by 1e-03"
    assert compare_weights(reference, {"a": torch.zeros(2)}) == "another model"
    assert compare_weights({"a": torch.zeros(1)}, {"a": torch.ones(1)}) == "differ by 1e+00, absolutely"


def rows_of(count: int) -> list[Row]:
    single = figures("single", record([[2.0]], rows=16), count, None, "reference")
    return [single, *(figures(name, record([[1.5]] * 2), count, single, "equal") for name in ("dp", "ddp"))]


def test_a_note_warns_where_modes_did_different_work() -> None:
    rows = rows_of(2)
    assert "differ in size" not in str(notes(rows, 1))
    other = figures("ddp-torch", record([[1.5]] * 2, rows=16), 2, rows[0], "equal")
    assert "differ in size" in str(notes([*rows, other], 1))
    # A mode that came to the short last batch of an epoch more often than another did the same work.
    short = record([[1.5]] * 2, rows=7)
    short["ranks"] = [{**rank, "largest": 8} for rank in short["ranks"]]
    shorter = figures("ddp-torch", short, 2, rows[0], "equal")
    assert "differ in size" not in str(notes([*rows, shorter], 1))


def test_figures_are_shown_to_three_digits_or_all_before_the_point() -> None:
    shown = {0.0: "0.0000", 0.03456: "0.0346", 0.3456: "0.346", 3.456: "3.46", 34.56: "34.6", 99.96: "100"}
    shown |= {9.996: "10.0", 1234.5: "1,234", None: ""}
    assert {value: digits(value) for value in shown} == shown


PLAIN = re.compile(r"\x1b\[[\d;]*m")


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("columns", [40, 60, 80, 110, 160, None])
def test_tables_of_any_number_of_modes_fit_any_width_with_every_figure_whole(
    columns: int | None, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One table of all columns was 144 characters wide, so that a terminal of 110 lost the last ones.

    Later each of two was whole, but wider than COLUMNS=80.
    """
    for name, value in (("COLUMNS", columns), ("FORCE_COLOR", 1 if is_terminal else None)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))
    rows = [
        figures(
            name,
            record([[123.45]] * (1 if MODES[name].is_single else 2), rows=10**6, all_reduce_seconds=[12.34])
            | {"wrappers": 2},
            64,
            None,
            "differ by 3e-07",
        )
        for name in MODES
    ]
    show(rows, "a_script_with_a_long_name.py", 1)
    out = PLAIN.sub("", capsys.readouterr().out)
    assert "…" not in out
    if columns is not None:
        assert max(map(len, out.splitlines())) <= columns
    parts = [line.split() for line in out.splitlines() if line.startswith("ddp-torch")]
    assert len(parts) == 2 or (columns is not None and columns < 80)
    assert {part[0] for part in parts} == {"ddp-torch"}, "each part of a table names the modes"
    figures_shown = [figure for part in parts for figure in part[1:]]
    assert figures_shown[:8] == ["64", "2,000,000", "123,450", "16,201", "123,450", "12,340", "10.0%", "0"]
    words = re.sub(r"\s+", " ", out)
    for word in (
        "samples/s",
        "efficiency",
        "exposed",
        "bubble",
        "rank weights",
        "differ by",
        "3e-07",
        "wraps 2 models",
    ):
        assert word in words


def test_the_plot_has_a_bar_for_each_mode_and_its_waiting() -> None:
    rows = rows_of(2)
    [axes] = draw(rows, "a < b").axes
    computing, exposed, bubbles = axes.containers
    assert len(computing) == 3
    assert [bar.get_width() for bar in exposed] == pytest.approx([0, 0, 100]), "only Paceline's ranks count it"
    assert [bar.get_width() for bar in bubbles] == pytest.approx([0, 0, 50])
    assert len(axes.figure.legends) == 1
    ends = [bar.get_x() + bar.get_width() for bar in bubbles]
    assert ends == pytest.approx([1e3 * row.seconds_per_batch for row in rows])
    assert axes.get_title() == "a < b: time per global batch, median of 1 turn"


def test_modes_are_all_that_the_target_can_run_or_those_named() -> None:
    assert choose_modes(None, is_recipe=True) == list(MODES)
    assert choose_modes(None, is_recipe=False) == ["single", "dp", "ddp", "ddp-torch"]
    assert choose_modes("ddp, single", is_recipe=False) == ["ddp", "single"]
    assert [ranks_of(mode, 4) for mode in MODES.values()] == [1, 1, 4, 4, 4]
    assert [devices_of(name, 4) for name in MODES] == [1, 4, 4, 4, 4]
    for names in ("ddp,none", "ddp,ddp", "ddp-accumulate", ""):
        with pytest.raises(UsageError, match="--modes"):
            choose_modes(names, is_recipe=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "'missing.py' is neither a recipe nor a file"),
        (["--nproc", "1", "digits"], "--nproc 1 leaves nothing to compare"),
        (["--nproc", "2", "--steps", "0", "digits"], "--steps must be at least 1, not 0"),
        (["--nproc", "2", "--modes", "fast", "digits"], "--modes has 'fast', which is none of single, dp, ddp,"),
        (["--nproc", "2", "--plot", "x.html", "digits"], "--plot x.html: the name has to end in .svg, .png or .pdf"),
        (["--nproc", "2", "--json", "no/x.json", "digits"], "--json no/x.json: the folder"),
        (["--nproc", "2", "digits", "--batch-size", "0"], "--batch-size must be at least 1, not 0"),
        (["digits", "--batch-size", "0", "--nproc=2"], "--batch-size must be at least 1, not 0"),
        (["digits", "--steps", "0", "--nproc", "2"], "--steps must be at least 1, not 0"),
        (["--nproc", "2", "digits", "--timeout", "9"], "--timeout is for paceline train, not paceline compare"),
        (["--nproc", "2", "digits", "--none"], "No such option: --none"),
        (["--nproc", "2", "digits", "--checkpoint-dir", "points"], "--checkpoint-dir keeps files of one training"),
        (["--nproc", "two", "digits"], "--nproc='two' is neither a number nor"),
        (["--nproc", "0", "digits"], "--nproc=0 is less than 1"),
        (["--nproc", "64", "digits"], "--nproc 64 is more than the 32 samples of a batch; give fewer ranks, or"),
    ],
)
def test_mistakes_are_one_line_before_anything_runs(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = paceline(tmp_path, "compare", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    lines = [line for line in done.stderr.splitlines() if not line.startswith("note:")]
    assert len(lines) == 1
    assert message in lines[0]


def test_a_script_is_compared_in_all_its_modes_with_equal_weights(tmp_path: Path) -> None:
    name = script(tmp_path, SCRIPT)
    options = ["--nproc", "2", "--steps", "4", "--json", "out.json", "--plot", "out.svg"]
    done = paceline(tmp_path, "compare", *options, name, "8", fork="all", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    outcome = json.loads((tmp_path / "out.json").read_text())
    modes = {row["mode"]: row for row in outcome["modes"]}
    assert list(modes) == ["single", "dp", "ddp", "ddp-torch"]
    assert {row["rows_per_batch"] for row in modes.values()} == {8}
    assert all(row["replicas_identical"] for row in modes.values())
    for row in list(modes.values())[1:]:
        assert row["weights"] == "equal" or float(row["weights"].removeprefix("differ by ")) < 1e-12
    assert modes["ddp"]["all_reduce_share"] > 0
    assert "ddp-torch" in done.stdout
    assert "<svg" in (tmp_path / "out.svg").read_text()


def test_a_recipe_accumulates_batches_of_its_own_size(tmp_path: Path) -> None:
    options = ["--nproc", "2", "--steps", "3", "--modes", "ddp,ddp-accumulate", "--json", "out.json"]
    done = paceline(tmp_path, "compare", *options, "digits", "--batch-size", "64", fork="all", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["modes"]
    assert [row["rows_per_batch"] for row in rows] == [64, 64]
    assert [row["weights"] for row in rows] == ["reference", "fewer steps"]


def between(text: str) -> tuple[float, float]:
    """The least and the largest number that is shown as `text`."""
    number, scale = text.replace(",", ""), 100 if text.endswith("%") else 1
    number = number.rstrip("%")
    half = 0.5 * 10.0 ** -len(number.partition(".")[2])
    return (float(number) - half) / scale, (float(number) + half) / scale


def agrees(quotient: str, dividend: str, divisor: str, scale: float = 1) -> bool:
    """Whether `quotient` is `scale` times one figure by the other, each as rounded as it is shown."""
    (low, high), (least, most), (small, large) = between(quotient), between(dividend), between(divisor)
    return low <= scale * most / small and scale * least / large <= high


@pytest.mark.slow
def test_every_derived_figure_of_a_comparison_follows_from_those_beside_it(tmp_path: Path) -> None:
    """The speed-up was a median of ratios beside a ratio of medians: 0.66 where samples/s said 0.73."""
    options = ["--nproc", "2", "--steps", "6", "--json", "out.json"]
    done = paceline(tmp_path, "compare", *options, "digits", fork="all", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.split(" ")[0] in MODES]
    speed, ranks = ({line[0]: line[1:] for line in table} for table in (lines[: len(MODES)], lines[len(MODES) :]))
    assert list(speed) == list(ranks) == list(MODES)
    for devices, samples, ms, rate, gain, efficiency in speed.values():
        assert agrees(rate, samples, ms, scale=1000)
        assert agrees(gain, rate, speed["single"][3])
        assert agrees(efficiency, gain, devices)
    for name, (step, alone, share, *_) in ranks.items():
        if not MODES[name].is_single:
            assert agrees(share, alone, step)

    outcome = json.loads((tmp_path / "out.json").read_text())
    assert outcome["times"] in re.sub(r"\s+", " ", done.stdout)
    assert outcome["times"].startswith("Times: single's is the median of 3 turns of 2 steps;")
    [single] = [row for row in outcome["modes"] if row["mode"] == "single"]
    for row in outcome["modes"]:
        assert row["samples_per_second"] == pytest.approx(row["rows_per_batch"] / row["seconds_per_batch"])
        assert row["speedup"] == pytest.approx(row["samples_per_second"] / single["samples_per_second"])
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["devices"])
        waits = [row[name] for name in ("all_reduce_seconds", "exposed_seconds", "bubble_seconds")]
        if row["all_reduce_seconds"] is not None:
            assert row["all_reduce_share"] == pytest.approx(row["all_reduce_seconds"] / row["seconds_per_step"])
        shown = [row["rows_per_batch"], 1e3 * row["seconds_per_batch"], row["samples_per_second"]]
        assert speed[row["mode"]][1:4] == [digits(value) for value in shown]
        times = [1e3 * value for value in (row["seconds_per_step"], *waits) if value is not None]
        assert [figure for figure in ranks[row["mode"]] if "%" not in figure][: len(times)] == list(map(digits, times))


def test_a_program_that_takes_too_few_steps_says_how_many(tmp_path: Path) -> None:
    done = paceline(tmp_path, "compare", "--nproc", "2", "--modes", "ddp", script(tmp_path, SCRIPT), "32", fork="all")
    assert done.returncode == 2
    assert "took 2 optimizer steps" in done.stderr
    assert "smaller --steps" in done.stderr
    assert "Traceback" not in done.stderr


GAN = """
import os, sys
import torch
from torch import nn
import paceline
from paceline import DistributedDataParallel

with paceline.init() as world:
    torch.manual_seed(int(os.environ.get("SEED", "0")) * world.size)
    generator = DistributedDataParallel(nn.Linear(3, 4).double())
    torch.manual_seed(1)
    critic = DistributedDataParallel(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double())
    makers = torch.optim.SGD(generator.parameters(), lr=0.1)
    critics = torch.optim.SGD(critic.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(200, 4).double(), torch.randn(200, 3).double())
    every, limit = int(sys.argv[1]), int(sys.argv[2])
    for number, (real, noise) in enumerate(paceline.data.DataLoader(data, batch_size=8)):
        if number == limit:
            break
        (critic(generator(noise).detach()) - critic(real)).mean().backward()
        critics.step()
        critics.zero_grad()
        if number % every == every - 1:
            (-critic(generator(noise))).mean().backward()
            makers.step()
            makers.zero_grad()
            critics.zero_grad()
"""


def test_two_wrapped_models_are_measured_together_and_both_compared(tmp_path: Path) -> None:
    """The figures were those of the model whose forward came last."""
    options = ["--nproc", "2", "--steps", "5", "--json", "out.json"]
    done = paceline(tmp_path, "compare", *options, script(tmp_path, GAN), "1", "20", fork="all")
    assert done.returncode == 0, done.stderr
    assert "wraps 2 models" in done.stdout
    modes = {row["mode"]: row for row in json.loads((tmp_path / "out.json").read_text())["modes"]}
    assert {row["wrappers"] for row in modes.values()} == {2}
    assert {row["rows_per_batch"] for row in modes.values()} == {8}
    assert all(row["replicas_identical"] for row in modes.values())
    for row in list(modes.values())[1:]:
        assert row["weights"] == "equal" or float(row["weights"].removeprefix("differ by ")) < 1e-12


def test_a_difference_of_the_model_that_was_wrapped_first_is_seen(tmp_path: Path) -> None:
    options = ["--nproc", "2", "--steps", "2", "--modes", "single,ddp", "--json", "out.json"]
    done = paceline(tmp_path, "compare", *options, script(tmp_path, GAN), "1", "20", fork="all", SEED="7")
    assert done.returncode == 0, done.stderr
    said = json.loads((tmp_path / "out.json").read_text())["modes"][1]["weights"]
    assert float(said.removeprefix("differ by ")) > 1e-3


def test_a_step_is_one_of_the_optimizer_that_came_last(tmp_path: Path) -> None:
    """So it holds all optimizers' work, where one of them steps every second time: nine batches hold four such steps,
    before the first of which two of the other optimizer were counted."""
    options = ["--nproc", "2", "--steps", "4", "--modes", "ddp"]
    done = paceline(tmp_path, "compare", *options, script(tmp_path, GAN), "2", "9", fork="all")
    assert done.returncode == 2
    assert "took 6 optimizer steps" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("raise RuntimeError('no luck')", 1, "RuntimeError: no luck"),
        ("sys.exit(3)", 1, "exit code 3"),
        ("sys.exit(0)", 2, "took 2 optimizer steps"),
        ("import os; os._exit(0)", 1, "mode ddp ended with exit code 1"),
    ],
)
def test_a_mode_that_fails_ends_those_that_wait_for_their_turns(
    tmp_path: Path, line: str, code: int, message: str
) -> None:
    text = SCRIPT.replace(
        "for x, y in paceline.data.DataLoader", "for step, (x, y) in enumerate(paceline.data.DataLoader"
    )
    text = text.replace("1])):", "1]))):").replace(
        "        with model.weight", f"        if world.size == 2 and step == 2: {line}\n        with model.weight"
    )
    name = script(tmp_path, text)
    done = paceline(tmp_path, "compare", "--nproc", "2", "--modes", "single,ddp", "--steps", "4", name, "8", fork="all")
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert f"mode ddp ended with exit code {code}; to compare the others, give --modes single" in done.stderr
    assert "interrupted" not in done.stderr
    assert done.stdout == ""


def test_one_by_one_modes_do_not_wait_for_each_other(tmp_path: Path) -> None:
    text = SCRIPT.replace("    torch.manual_seed(0)", "    print(world.size, file=open('order', 'a'))")
    options = ["--nproc", "2", "--steps", "2", "--modes", "ddp,single", "--one-by-one", "--json", "out.json"]
    done = paceline(tmp_path, "compare", *options, script(tmp_path, text), "8", fork="all")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "order").read_text().split() == ["2", "2", "1"]
    rows = json.loads((tmp_path / "out.json").read_text())["modes"]
    assert [row["mode"] for row in rows] == ["ddp", "single"]
    assert rows[0]["speedup"] > 0, "also where the mode single is not the first"


def test_a_batch_without_samples_for_a_rank_is_a_step_of_it_too(tmp_path: Path) -> None:
    old = SCRIPT[SCRIPT.index("    for x, y in") : SCRIPT.index("        optimizer.step")]
    new = """
    for batch in paceline.data.DataLoader(data, batch_size=int(sys.argv[1])):
        if batch is None:
            model.sync_gradients()
        else:
            with model.weight(len(batch[0])):
                (model(batch[0]) - batch[1]).square().sum().backward()
"""
    text = SCRIPT.replace(old, new).replace("randn(64", "randn(65")  # the last batch has one sample
    name = script(tmp_path, text)
    done = paceline(tmp_path, "compare", "--nproc", "2", "--modes", "single,ddp", "--steps", "6", name, "8", fork="all")
    assert done.returncode == 0, done.stderr


def test_ctrl_c_ends_it_and_leaves_nothing_behind(tmp_path: Path) -> None:
    text = SCRIPT.replace(
        "    for x, y in", "    open('ready', 'w').close(); import time; time.sleep(100)\n    for x, y in"
    )
    arguments = ["--nproc", "2", "--modes", "single,ddp", script(tmp_path, text), "8"]
    with Running(tmp_path, "compare", *arguments, fork="all") as job:
        job.wait_for("ready")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130
    assert not re.search("Traceback", (tmp_path / "stderr").read_text())
