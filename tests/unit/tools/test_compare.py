"""``paceline compare``: figures computed from synthetic records, and complete comparisons."""

from __future__ import annotations

import json
import math
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from insides import MODES, TURN, Turns, Way, choose_ways, digits, figures, notes, weights_difference
from insides import report_COLUMNS as COLUMNS
from insides import report_Row as Row
from processes import Running, alive, paceline, script

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


def record(seconds: list[list[float]], samples: int = 16) -> dict[str, Any]:
    """Return the record of ranks with these step times; `samples` counts all ranks in a step."""
    ranks = [
        {
            "seconds": times,
            "samples": samples * len(times) / len(seconds),
            "memory": 1000 * (rank + 1),
            "sha256": "same",
        }
        for rank, times in enumerate(seconds)
    ]
    return {"ranks": ranks}


def rows_of(records: dict[Way, dict[str, Any]], weights: dict[str, float] | None = None) -> list[Row]:
    """Return the rows of records; the only weight is 1 unless `weights` has its mode."""
    tensors: list[dict[str, Tensor]] = [{"a": torch.tensor([(weights or {}).get(way.mode, 1.0)])} for way in records]
    return figures(list(records), list(records.values()), tensors)


def test_figures_use_the_slowest_rank_relative_to_one_device() -> None:
    single, row = rows_of(
        {Way("single", 1): record([[2.0, 2.0, 4.0]]), Way("ddp", 2): record([[1.0, 1.0, 2.0], [1.0, 2.0, 1.0]])}
    )
    assert (single.turns, single.seconds_per_step) == ((2, 4), 3)
    assert (single.speedup, single.efficiency) == (1, 1)
    assert row.turns == (1.5, 2), "two steps each, by the slowest rank"
    assert row.seconds_per_step == pytest.approx(3 * (1.5 / 2 + 2 / 4) / 2), "from the ratios of the turns"
    assert row.samples_per_step == 16
    assert row.samples_per_second == pytest.approx(16 / row.seconds_per_step)
    assert row.speedup == pytest.approx(3 / row.seconds_per_step)
    assert row.efficiency == pytest.approx(row.speedup / 2)
    assert (row.memory_bytes, row.replicas_identical) == (2000, True)


def test_figures_are_relative_to_the_first_way_without_a_single_device() -> None:
    two, four = rows_of({Way("ddp", 2): record([[3.0]] * 2), Way("ddp", 4): record([[2.0]] * 4)})
    assert (two.speedup, two.efficiency, four.speedup, four.efficiency) == (1, 1, 1.5, 0.75)


def test_fluctuating_load_changes_no_ratio() -> None:
    """Rounds take 1, 3 and 9 times as long, equally for all ways."""
    load = [slowness for slowness in (1.0, 9.0, 3.0) for _ in range(TURN)]
    halved = [slowness / 2 for slowness in load]
    # The disturbed way has its median in another round than the mode single.
    disturbed = [1.0] * TURN + halved[TURN:]
    single, row, other = rows_of(
        {
            Way("single", 1): record([load]),
            Way("ddp", 2): record([halved] * 2),
            Way("ddp-torch", 2): record([disturbed] * 2),
        }
    )
    assert (single.turns, row.turns) == ((1, 9, 3), (0.5, 4.5, 1.5))
    assert (row.speedup, row.efficiency, other.speedup) == (2, 1, 2)


def test_speed_counts_steps_if_samples_are_unknown() -> None:
    for samples, other, speedup in ((16, 32, 3), (0, 0, 1.5)):
        _, row = rows_of({Way("single", 1): record([[3.0]], samples), Way("dp", 2): record([[2.0]], samples=other)})
        assert (row.speedup, row.efficiency) == (speedup, speedup / 2)
        assert (row.samples_per_second is None) == (samples == 0)


def test_turns_are_sequential_and_shared_by_the_ranks_of_a_way(tmp_path: Path) -> None:
    file = tmp_path / "turns"
    file.touch()
    counts, rounds = [1, 3, 2], 3
    events: list[tuple[str, int]] = []

    def rank(way: int) -> None:
        turns = Turns(str(file), sum(counts[:way]), sum(counts))
        events.append(("warm", way))
        turns.end()
        for _ in range(rounds):
            turns.take()
            events.append(("take", way))
            events.append(("end", way))
            turns.end()

    threads = [threading.Thread(target=rank, args=(way,)) for way, count in enumerate(counts) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    warm_up = sum(counts)
    assert sorted(events[:warm_up]) == [("warm", way) for way, count in enumerate(counts) for _ in range(count)]
    of_a_round = [way for way, count in enumerate(counts) for _ in range(2 * count)]
    assert [way for _, way in events[warm_up:]] == rounds * of_a_round


def test_weights_are_compared_relative_to_the_largest() -> None:
    reference = {"a": torch.tensor([1.0, -4.0]), "b": torch.zeros(0)}
    assert weights_difference(reference, reference) == 0
    assert weights_difference(reference, {**reference, "a": torch.tensor([1.0, -4.004])}) == pytest.approx(
        1e-3, rel=1e-3
    )
    assert weights_difference({"a": torch.zeros(1)}, {"a": torch.ones(1)}) == 1, "absolute if all are zero"
    assert weights_difference(reference, {"a": torch.zeros(2)}) is None, "from another model"


def test_notes_name_ways_with_different_work_or_weights() -> None:
    def said(weight: float = 1.0, samples: int = 16) -> str:
        records = {Way("single", 1): record([[2.0]]), Way("ddp", 2): record([[1.0]] * 2, samples)}
        return str(notes(rows_of(records, {"ddp": weight}), 1, 40))

    assert "different sizes" not in said()
    assert "different sizes" in said(samples=32)
    assert "after 43 steps" in said()
    assert "all equal to 1e-06." in said(1 + 1e-7)
    for weight in (1 + 2e-6, math.nan):
        assert "above 1e-06 for ddp on 2." in said(weight)


@pytest.mark.parametrize(
    ("names", "counts", "ways"),
    [
        (None, [4], [("single", 1), ("dp", 4), ("ddp", 4), ("ddp-torch", 4)]),
        ("ddp, single,ddp", [4], [("ddp", 4), ("single", 1)]),
        (None, [4, 1, 2, 2], [("single", 1), ("ddp", 2), ("ddp", 4)]),
        ("ddp,ddp-torch", [1, 2, 4], [("single", 1), ("ddp", 2), ("ddp", 4), ("ddp-torch", 2), ("ddp-torch", 4)]),
    ],
)
def test_ways_are_modes_or_numbers_of_ranks(names: str | None, counts: list[int], ways: list[tuple[str, int]]) -> None:
    chosen = choose_ways(names, counts)
    assert [(way.mode, way.devices) for way in chosen] == ways
    assert [way.ranks for way in chosen] == [devices if mode.startswith("ddp") else 1 for mode, devices in ways]


MISTAKES = [
    (["--nproc", "1", "digits"], "--nproc 1 leaves only one way to train"),
    (["--nproc", "2", "--steps", "0", "digits"], "--steps must be at least 1, not 0"),
    (["--nproc", "2", "--modes", "fast", "digits"], "--modes has 'fast'; choose among single, dp, ddp,"),
    (["--nproc", "2", "--json", "no/x.json", "digits"], "--json no/x.json: the folder"),
    (["--nproc", "2", "digits", "--max-restarts", "9"], "--max-restarts is an option of paceline train, not of"),
    (["--nproc", "2", "digits", "--checkpoint-dir", "points"], "--checkpoint-dir writes files for one training"),
    (["digits", "--nproc", "1,2,64"], "--nproc 64 is more than the 32 samples of a batch; give fewer ranks or"),
    (["digits", "--virtual-ranks", "8"], "--virtual-ranks needs Paceline's wrapper, and compare also runs torch"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_are_one_line_before_anything_runs(arguments: list[str], message: str, refusal: Any) -> None:
    assert message in refusal("compare", *arguments)


def compared(tmp_path: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    """Run a comparison and return the rows of its JSON, keyed by mode and devices as in ``ddp-2``."""
    done = paceline(tmp_path, "compare", "--json", "out.json", *arguments, fork="all", **environment)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    return {f"{row['mode']}-{row['devices']}": row for row in rows}


def test_script_with_a_wrapper_subclass_runs_in_all_modes_with_equal_weights(tmp_path: Path) -> None:
    subclass = "class Own(DistributedDataParallel):\n    pass\n\nwith paceline.init()"
    text = SCRIPT.replace("with paceline.init()", subclass).replace("model = DistributedDataParallel(", "model = Own(")
    # Two ranks split the 98 samples into micro-batches of 7, which do not divide evenly.
    loader = "paceline.data.DataLoader(data, batch_size=int(sys.argv[1]))"
    text = text.replace(f"in {loader}", f"in paceline.accumulate(model, {loader}, 2)").replace("64, ", "98, ")
    text = text.replace("        optimizer", "        if model.do_sync: optimizer")
    options = ["--nproc", "2", "--steps", "4"]
    rows = compared(tmp_path, *options, script(tmp_path, text), "7", OMP_NUM_THREADS="1")
    assert list(rows) == ["single-1", "dp-2", "ddp-2", "ddp-torch-2"]
    assert {row["samples_per_step"] for row in rows.values()} == {14}
    assert all(row["replicas_identical"] for row in rows.values())
    assert all(row["weights_difference"] < 1e-12 for row in rows.values())
    assert "ddp-torch" in (tmp_path / "stdout").read_text()


@pytest.mark.slow
def test_recipe_weights_agree_to_a_millionth_in_all_modes(tmp_path: Path) -> None:
    rows = compared(tmp_path, "digits", "--nproc", "2", "--steps", "20")
    assert len(rows) == 4
    for row in rows.values():
        assert row["weights_difference"] <= 1e-6
        assert row["samples_per_step"] == 32
    out = (tmp_path / "stdout").read_text()
    assert "all equal to 1e-06" in re.sub(r"\s+", " ", out)
    shown = [line.split() for line in out.splitlines() if line.split(" ")[0] in MODES]
    for row, cells in zip(rows.values(), shown, strict=True):
        assert cells[2:4] == [digits(1e3 * row["seconds_per_step"]), digits(row["samples_per_second"])]
    assert len(COLUMNS) == len(next(cells for cells in shown if cells[0] == "ddp"))


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


@pytest.mark.parametrize(("seed", "least", "most"), [("0", 0.0, 1e-12), ("7", 1e-3, 1e3)])
def test_two_wrapped_models_are_measured_and_compared(seed: str, least: float, most: float, tmp_path: Path) -> None:
    """The figures were those of the last model to run its forward; another seed changes the first one on two ranks."""
    options = ["--nproc", "2", "--steps", "4", "--modes", "single,ddp"]
    rows = compared(tmp_path, *options, script(tmp_path, GAN), "1", "20", SEED=seed)
    assert {row["samples_per_step"] for row in rows.values()} == {8}
    assert all(row["replicas_identical"] for row in rows.values())
    assert least <= rows["ddp-2"]["weights_difference"] < most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "code", "message"),
    [("raise RuntimeError('no luck')", 1, "RuntimeError: no luck"), ("sys.exit(0)", 2, "took 2 optimizer steps")],
)
def test_failing_mode_ends_the_modes_waiting_for_a_turn(tmp_path: Path, line: str, code: int, message: str) -> None:
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
    assert f"ddp on 2 devices ended with exit code {code}; to compare the others, give --modes single" in done.stderr
    assert "interrupted" not in done.stderr
    assert done.stdout == ""


def test_ctrl_c_ends_the_ranks_of_every_mode(tmp_path: Path) -> None:
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
