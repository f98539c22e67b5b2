"""Profiles of programs that do more than train a single wrapper remain correct."""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from insides import (
    MOST,
    ProfileSettings,
    Report,
    Session,
    from_summary,
    path_of,
    rank_file,
    read_facts,
    read_ranks,
    recorder,
    report_of,
    write_results,
)
from insides import profiler_recorder as session
from insides import rank_file_FOLDER as FOLDER
from paceline import DistributedDataParallel, UsageError, World
from paceline.profiler import profile
from processes import paceline
from ranks import Pools, Ranks, run_ranks


def make_report(folder: Path) -> Report:
    return report_of(read_facts(folder))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def step(model: Any, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    for _ in range(times):
        optimizer.zero_grad()
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()


def wrapped(**options: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = DistributedDataParallel(net(), **options)
    return model, sgd(model)


def with_an_unwrapped_model(world: World, folder: Path) -> None:
    (model, optimizer), local = wrapped(), net()
    with profile(folder, operators=False):
        for number in range(14):
            step(model, optimizer)
            if world.rank == 0 and number % 3 == 0:
                step(local, sgd(local))


def test_steps_of_a_model_private_to_one_rank_do_not_shift_the_numbering(pools: Pools, tmp_path: Path) -> None:
    """Steps are matched by number; extra steps on one rank attributed bubbles to the wrong steps."""
    pools.run(2, with_an_unwrapped_model, tmp_path)
    assert [len(record.steps) for record in read_ranks(tmp_path)] == [14, 14]


def with_torchs_profiler(world: World, folder: Path, begin: int, use: str) -> list[int]:
    warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # emitted by torch 2.11 for any profiler
    model, optimizer = wrapped()
    profiler: Any = torch.profiler.profile() if use == "profiler" else torch.autograd.profiler.profile()
    if use == "schedule":
        profiler = torch.profiler.profile(schedule=torch.profiler.schedule(wait=0, warmup=begin, active=4, repeat=1))
    with profile(folder):
        for number in range(16):
            if number == (0 if use == "schedule" else begin):
                profiler.__enter__()
            step(model, optimizer)
            if use == "schedule":
                profiler.step()
            elif number == 12:
                profiler.__exit__(None, None, None)
        if use == "schedule":
            profiler.__exit__(None, None, None)
    return [len(profiler.key_averages())]


@pytest.mark.parametrize(("use", "begin"), [("profiler", 1), ("autograd", 9), ("schedule", 9)])
def test_program_that_uses_torch_profiler_keeps_its_profile(pools: Pools, tmp_path: Path, use: str, begin: int) -> None:
    """Two torch profilers in a process cause a segmentation fault, or leave one profile empty."""
    assert min(pools.run(1, with_torchs_profiler, tmp_path, begin, use)[0]) > 3
    report = make_report(tmp_path)
    assert not report.facts.operators.operators
    assert any("itself used torch's profiler" in note for note in report.missing)


def with_frozen_layers(world: World, folder: Path) -> None:
    model, _ = wrapped(bucket_cap_mb=0.001)
    model.module[0].requires_grad_(False)
    with profile(folder, operators=False):
        step(model, sgd(model), 12)


def test_layers_frozen_after_wrapping_leave_a_report(pools: Pools, tmp_path: Path) -> None:
    """Gradients are numbered among all wrapped parameters, but the bucket simulation knows only trained ones."""
    pools.run(2, with_frozen_layers, tmp_path)
    assert make_report(tmp_path).facts.accounts.steps


@pytest.mark.ranks(1)
def test_single_rank_also_measures_its_layers(world: World, tmp_path: Path) -> None:
    """A single rank has no reducer that records the arrival of gradients."""
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 64), nn.Linear(64, 2))
    module[0].requires_grad_(False)
    model = DistributedDataParallel(module)
    with profile(tmp_path, operators=False):
        step(model, sgd(model), 12)
    hooks = [len(parameter._post_accumulate_grad_hooks or ()) for parameter in module.parameters()]
    assert hooks == [0] * 6, "the profiler's hooks are removed"
    plan = from_summary(tmp_path).plan
    assert sorted(nbytes for _, nbytes in plan.layers[:2]) == [4 * 2, 4 * 2 * 64]
    assert sorted(nbytes for _, nbytes in plan.layers[2:]) == [4 * 64, 4 * 32 * 64]
    assert min(seconds for seconds, _ in plan.layers) >= 0
    # Measured, not derived from the bytes.
    assert len({f"{seconds / nbytes:.3g}" for seconds, nbytes in plan.layers}) > 1
    assert (plan.ranks, plan.samples, plan.all_reduces, plan.communication_s) == (1, 4, [], 0)


def with_compile(world: World, folder: Path, what: str) -> None:
    wrap: Any = nn.parallel.DistributedDataParallel if what == "torch" else DistributedDataParallel
    model = wrap(torch.compile(net(), backend="eager") if what == "module" else net())
    optimizer = sgd(model)
    with profile(folder, operators=False):
        step(model if what == "module" else torch.compile(model, backend="eager"), optimizer, 10)


@pytest.mark.parametrize(
    ("what", "backend"),
    [("module", None), *(pytest.param(*row, marks=pytest.mark.slow) for row in (("wrapper", None), ("torch", "gloo")))],
)
def test_compiled_modules_are_recorded(tmp_path: Path, what: str, backend: str | None) -> None:
    """A compiled wrapper was traced through the function that records its forward, and its names had torch's prefix."""
    run_ranks(2, with_compile, tmp_path, what, backend=backend)
    for record in read_ranks(tmp_path):
        assert [step.rows for step in record.steps] == [4] * 10
        assert record.wrapper == ("torch" if what == "torch" else "paceline")
        sizes = sum(nbytes for _, nbytes in record.parameters)
        assert sum(record.buckets) == (0 if what == "torch" else sizes) < sizes + 1
        assert record.parameters[0][0] == "0.weight"


def train_in_a_child() -> None:
    model = net()
    assert not recorder.on
    step(model, sgd(model), 4)


@pytest.mark.ranks(1)
def test_forked_child_records_nothing_and_its_parent_continues(world: World, tmp_path: Path) -> None:
    """A child inherits the open file and would write its steps between those of its parent."""
    model, optimizer = wrapped()
    with profile(tmp_path):
        for number in range(14):
            step(model, optimizer)
            if number in (4, 9):
                child = multiprocessing.get_context("fork").Process(target=train_in_a_child)
                child.start()
                child.join(20)
                assert child.exitcode == 0
    [record] = read_ranks(tmp_path)
    assert [step.number for step in record.steps] == list(range(14))
    assert record.ended == ""


def elsewhere(world: World, folder: Path) -> None:
    os.chdir(folder.parent)
    training = wrapped()
    with profile(folder.name):
        os.chdir("/")
        step(*training, 14)
        dist.destroy_process_group()


def short(world: World, folder: Path) -> None:
    with profile(folder, operators=False):
        step(*wrapped(), 6)


def test_second_profile_in_a_folder_excludes_the_first(pools: Pools, tmp_path: Path) -> None:
    """On one host, all ranks count time from its boot, which alone cannot show which record is newer."""
    pools.run(2, short, tmp_path)
    (tmp_path / FOLDER / "rank-00000.torch.json").write_text("{}")
    second = path_of(tmp_path, 1).read_text()
    path_of(tmp_path, 2).write_text(second.replace('"rank": 1, "size": 2', '"rank": 2, "size": 3'))
    pools.run(2, short, tmp_path)
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["rank-00000.jsonl", "rank-00001.jsonl"]
    path_of(tmp_path, 1).write_text(second)
    assert [record.ended for record in read_ranks(tmp_path)] == ["", "missing"]


def before_its_world(world: World, folder: Path) -> str:
    """Start a profile before a process group exists; the program above has destroyed its group."""
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    with suppress(AssertionError), profile(folder / str(world.rank), operators=False):
        dist.init_process_group("gloo", f"file://{folder}/store", rank=world.rank, world_size=world.size)
        model = nn.parallel.DistributedDataParallel(net())
        with pytest.raises(UsageError) as raised:
            step(model, sgd(model))
    return str(raised.value)


def test_program_may_change_its_folder_and_recreate_its_group(tmp_path: Path) -> None:
    """Rank 0 waits for the other records without a collective. Without a group, each process counted as rank 0."""
    with Ranks(2) as ranks:
        ranks.run(elsewhere, tmp_path / "out")
        messages = ranks.run(before_its_world, tmp_path)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert not any("killed" in note or "no record" in note for note in summary["missing"])
    assert make_report(tmp_path / "out").facts.operators.operators
    for rank, message in enumerate(messages):
        assert f"but this is rank {rank} of 2 now; call paceline.init()" in message


@pytest.mark.ranks(1)
def test_step_with_too_many_spans_uses_bounded_memory_and_is_excluded(world: World, tmp_path: Path) -> None:
    (model, optimizer), most = wrapped(), 0
    with patch.object(session, "CROWD", 50), profile(tmp_path, operators=False):
        for number in range(10):
            for _ in range(100 if number == 6 else 1):
                model(torch.ones(4, 16)).square().mean().backward()
                most = max(most, len(recorder.spans))
            optimizer.step()
            optimizer.zero_grad()
    assert most < 80
    assert make_report(tmp_path).facts.accounts.steps == [3, 4, 5, 7, 8, 9]


@pytest.mark.ranks(1)
def test_loop_without_an_optimizer_gets_a_hint_on_ending_steps(world: World, tmp_path: Path) -> None:
    model = DistributedDataParallel(net())
    with profile(tmp_path, operators=False):
        for _ in range(5):
            model(torch.ones(4, 16)).square().mean().backward()
    with pytest.raises(UsageError, match=r"a step ends when an optimizer of torch\.optim steps after a backward"):
        write_results(tmp_path)


def on_a_full_disk(world: World, folder: Path) -> int:
    training = wrapped()
    with Session(folder, operators=False):
        file = str(rank_file.path_of(folder, 0).resolve())
        [number] = (int(entry.name) for entry in Path("/proc/self/fd").iterdir() if os.path.realpath(entry) == file)
        with Path("/dev/full").open("w") as device:
            os.dup2(device.fileno(), number)  # further writes fail
        session.FLUSH_S = 0.0  # type: ignore[misc]
        step(*training, 5)
        assert not recorder.on
    return 5


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_full_disk_ends_the_profile_but_not_the_training(tmp_path: Path) -> None:
    assert run_ranks(1, on_a_full_disk, tmp_path) == [5]


def test_unrelated_files_and_too_many_steps_are_refused(tmp_path: Path) -> None:
    """``--out .`` removed a project's own summary.json; with more than the maximum of steps the program did not end."""
    unrelated = tmp_path / "summary.json"
    unrelated.write_text("mine")
    with pytest.raises(UsageError, match=r"has a summary.json that a profile did not write and would delete"):
        ProfileSettings(str(tmp_path)).check()
    assert unrelated.read_text() == "mine"
    with pytest.raises(UsageError, match=r"--steps must be at most 10000"):
        ProfileSettings(str(tmp_path / "new"), steps=MOST + 1).check()


SCRIPT = """
import os, sys
from pathlib import Path
import torch
import paceline, beside
assert Path(__file__).is_absolute() and sys.argv[1:] == ["--a", "b c"], (__file__, sys.argv)
assert sys.path[0] == os.path.dirname(beside.__file__), sys.path
paceline.init()
model = paceline.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
os.chdir("/")
for _ in range(8):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
sys.exit(3)
"""


def test_script_runs_as_under_python(tmp_path: Path) -> None:
    """Its real folder comes first on the path instead of the current one, and its file path is absolute."""
    real = tmp_path / "the real one"
    real.mkdir()
    (real / "train.py").write_text(SCRIPT)
    (real / "beside.py").write_text("")
    (tmp_path / "link").mkdir()
    (tmp_path / "link.py").symlink_to(real / "train.py")
    result = paceline(tmp_path, "profile", "--nproc=1", "--out=an out", "link/../link.py", "--a", "b c", fork="all")
    assert result.returncode == 1, result.stderr
    summary = json.loads((tmp_path / "an out" / "summary.json").read_text())
    assert (summary["title"], summary["steps"]) == ("link.py --a b c", 5)
