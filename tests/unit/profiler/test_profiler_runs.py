"""Profiles of real ranks on both backends and both wrappers: recorded data and cleanup."""

from __future__ import annotations

import gc
import json
import shutil
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from insides import KILLED, CollectorPauses, path_of, read_ranks, recorder, write_results
from paceline import DistributedDataParallel, UsageError, World
from paceline.optim import ShardedOptimizer
from paceline.profiler import profile
from ranks import Pools

STEPS = 28
PATCHED = ((torch.autograd, "backward"), (dist, "all_reduce"), (nn.parallel.DistributedDataParallel, "__call__"))


def originals() -> list[Any]:
    return [getattr(owner, name) for owner, name in PATCHED]


def train(model: nn.Module, steps: int, sleep: float = 0.0) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(8 * steps, 64, generator=torch.Generator().manual_seed(1)))
    for (x,) in DataLoader(data, batch_size=8):
        optimizer.zero_grad()
        out = model(x)
        time.sleep(sleep)
        out.square().mean().backward()
        optimizer.step()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def seconds_of_step(model: nn.Module) -> float:
    began = time.perf_counter()
    train(model, 1)
    return time.perf_counter() - began


def profiled(world: World, folder: Path, sleep: float) -> list[bool]:
    original = originals()
    model = DistributedDataParallel(net(), bucket_cap_mb=0.02)
    if sleep:  # longer than the disturbances on a busy machine
        sleep = max(sleep, 5 * max(seconds_of_step(model) for _ in range(5)))
    with profile(folder):
        train(model, STEPS, sleep * (world.rank == 1))
    same = [one is other for one, other in zip(original, originals(), strict=True)]
    same.append(not any(isinstance(callback, CollectorPauses) for callback in gc.callbacks))
    return [*same, not recorder.on, not recorder.detailed, not recorder.spans, recorder.bucket_watch is None]


@pytest.mark.slow
def test_sleeping_rank_is_detected_and_all_files_are_written(pools: Pools, tmp_path: Path) -> None:
    pools.run(2, profiled, tmp_path, 0.15)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["straggler_rank"] == 1
    assert summary["steps"] == STEPS - 3 - 3 - 1, "without the steps that warm up, are traced, or end the trace"
    assert summary["bubble_ms_per_step"]["0"] > summary["bubble_ms_per_step"]["1"]
    assert summary["advice"][0]["kind"] == "straggler"
    assert summary["samples_per_step"] == 8 * 2
    assert 0 < summary["allreduce_share"] < 1
    assert summary["overlap"] is not None
    assert summary["parts_ms_per_step"]["1"]["other"] > 140, "the sleep is in the loop's own code"
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in trace}
    assert {"forward", "wait", "bucket 0", "bucket 1", "aten::addmm"} <= names
    assert "Rank 1" in (tmp_path / "report.html").read_text()


@pytest.fixture(scope="module")
def finished(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a profile of two ranks."""
    folder = tmp_path_factory.mktemp("finished")
    restored = pools.run(2, profiled, folder, 0.0)
    assert all(map(all, restored)), "all patches of torch are removed"
    return folder


def test_parts_add_up_to_the_measured_steps(finished: Path) -> None:
    for record in read_ranks(finished):
        for step in record.steps:
            assert sum(step.seconds.values()) == pytest.approx(step.length, rel=0.01)
        assert (record.wrapper, record.ended) == ("paceline", "")
        assert [step.number for step in record.steps] == list(range(STEPS))
        assert record.memory["optimizer"] > record.memory["parameters"]


def noisy(_world: World, folder: Path) -> None:
    with profile(folder, operators=False, noise_scale=True):
        train(DistributedDataParallel(net()), STEPS)


def test_gradient_norms_are_measured_only_on_request(finished: Path, pools: Pools, tmp_path: Path) -> None:
    assert not any(step.norms for record in read_ranks(finished) for step in record.steps)
    assert json.loads((finished / "summary.json").read_text())["gradient_noise_scale"] is None
    pools.run(2, noisy, tmp_path)
    for record in read_ranks(tmp_path):
        assert [step.number for step in record.steps if step.norms] == [4, 8, 12, 16, 20, 24]
    # Both ranks train on the same data, so each gradient equals the average and shows no noise.
    assert json.loads((tmp_path / "summary.json").read_text())["gradient_noise_scale"] is None


def in_torchs_wrapper(world: World, folder: Path) -> dict[str, bool]:
    """Train with buffers and accumulation, with and without a profile; return the parameters with equal bits."""

    def trained(is_profiled: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
        model = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.001)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        draw = torch.Generator().manual_seed(world.rank)
        with profile(folder, operators=False) if is_profiled else nullcontext():
            for _ in range(8):
                with model.no_sync():
                    model(torch.randn(4, 64, generator=draw)).square().mean().backward()
                model(torch.randn(4, 64, generator=draw)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return model.state_dict()

    plain, profiled = trained(False), trained(True)
    return {name: torch.equal(value, profiled[name]) for name, value in plain.items()}


def test_waits_of_the_torch_wrapper_are_recorded_without_changing_bits(gloo: Pools, tmp_path: Path) -> None:
    same = gloo.run(2, in_torchs_wrapper, tmp_path)
    assert all(all(equal.values()) for equal in same), same
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 8 - 3
    assert any("torch's DistributedDataParallel" in note for note in summary["missing"])
    for record in read_ranks(tmp_path):
        for step in record.steps:
            labels = [span.label for span in step.spans]
            assert labels.count("wait") == 1, "the backward inside no_sync does not wait"
            assert labels.count("collective") == 1, "rank 0 broadcasts buffers original the synchronizing forward"
            assert [meeting.group for meeting in step.meetings] == [next(iter(record.groups))] * 2


def enough(world: World, folder: Path) -> int:
    model = DistributedDataParallel(net())
    with profile(folder, steps=4, operators=False):
        train(model, 12)
        return len(recorder.spans)


def without_wrapper(world: World, folder: Path) -> None:
    with profile(folder, operators=False):
        train(net(), 12)


def test_program_without_a_wrapper_is_reported(pools: Pools, tmp_path: Path) -> None:
    pools.run(2, without_wrapper, tmp_path)
    with pytest.raises(UsageError, match="trained no model in DistributedDataParallel"):
        write_results(tmp_path)


class Failing(torch.optim.SGD):
    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == 3:
            raise ArithmeticError
        return super().step(closure)


def take_steps(world: World, folder: Path, kind: str) -> None:
    """Profile 8 steps, optionally with a failing optimizer."""
    model = DistributedDataParallel(net())
    parts = [model.module[at] for at in (0, 2)] if kind == "two" else [model]
    make: Any = Failing if kind == "failing" else torch.optim.SGD
    optimizers = [make(part.parameters(), lr=0.1) for part in parts]
    if kind == "sharded":
        optimizers = [ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)]
        optimizers[0].register_step_post_hook(lambda *_: time.sleep(0.02))  # after the inner optimizer has stepped
    with profile(folder, operators=False):
        for _ in range(8):
            for left in reversed(range(3 if kind == "accumulating" else 1)):
                with model.no_sync() if left else nullcontext():
                    model(torch.randn(4, 64)).square().mean().backward()
            for optimizer in optimizers:
                with suppress(ArithmeticError):
                    optimizer.step()
                optimizer.zero_grad()


def test_accumulated_batches_are_one_step_including_all_backwards(pools: Pools, tmp_path: Path) -> None:
    pools.run(2, take_steps, tmp_path, "accumulating")
    for record in read_ranks(tmp_path):
        assert [(step.batches, step.rows) for step in record.steps] == [(3, 12)] * 8
        assert min(sum(span.label == "backward" for span in step.spans) for step in record.steps) >= 3


def test_every_span_is_recorded_once_until_enough_steps(pools: Pools, tmp_path: Path) -> None:
    """Spans from the wrapper and the step guard inside torch's backward and step would count time twice."""
    assert pools.run(2, enough, tmp_path) == [0, 0], "the block continues without spans"
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 4
    for record in read_ranks(tmp_path):
        for step in record.steps:
            labels = [span.label for span in step.spans]
            assert [labels.count(label) for label in ("forward", "backward", "optimizer")] == [1] * 3
            # In some steps the comparison of parameters follows the wait, and itself waits for an exchange of numbers.
            assert labels.count("wait") == 1 + labels[labels.index("wait") :].count("control")
            assert ("bucket wait" in labels) == (step.kind == "detailed")


def test_failed_optimizer_step_loses_no_later_span(pools: Pools, tmp_path: Path) -> None:
    pools.run(2, take_steps, tmp_path, "failing")
    for record in read_ranks(tmp_path):
        counts = [[span.label for span in step.spans].count("optimizer") for step in record.steps]
        assert counts[-4:] == [1] * 4


def test_two_optimizers_after_one_backward_make_one_step(pools: Pools, tmp_path: Path) -> None:
    pools.run(2, take_steps, tmp_path, "two")
    assert len(read_ranks(tmp_path)[0].steps) == 8


def test_nested_optimizers_end_a_step_with_the_outer_one(pools: Pools, tmp_path: Path) -> None:
    pools.run(2, take_steps, tmp_path, "sharded")
    for record in read_ranks(tmp_path):
        assert len(record.steps) == 8
        for step in record.steps:
            spans = [span for span in step.spans if span.label == "optimizer"]
            longest = max(spans, key=lambda span: span.end - span.start)
            assert longest.end - longest.start >= 0.02
            assert step.start <= longest.start < longest.end <= step.end


def failing(world: World, folder: Path) -> str:
    model = DistributedDataParallel(net())
    try:
        with profile(folder, operators=False):
            train(model, 10)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        return "ended"


def test_data_recorded_before_an_interrupt_is_written(pools: Pools, tmp_path: Path) -> None:
    assert pools.run(2, failing, tmp_path) == ["ended"] * 2
    report = write_results(tmp_path)
    assert len(report.facts.accounts.steps) == 7
    assert any("was stopped from outside, by Ctrl-C or SIGTERM" in note for note in report.missing)


def test_truncated_or_missing_records_are_used_as_far_as_possible(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    first, second = (path_of(tmp_path, rank) for rank in (0, 1))
    lines = second.read_text().splitlines()
    second.write_text("\n".join(lines[:15]) + "\n" + lines[15][:40])
    assert read_ranks(tmp_path)[1].ended == KILLED
    report = write_results(tmp_path)
    assert "rank 1 was killed; its last steps may be missing" in report.missing
    second.unlink()
    assert any("rank 1 left no record" in note for note in write_results(tmp_path).missing)
    first.write_text("nonsense\n")
    with pytest.raises(UsageError, match="is not a valid record of a rank"):
        write_results(tmp_path)


def test_unwritable_folders_and_nested_profiles_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match="cannot write to the profile's folder"), profile(file / "below"):
        pass
    with pytest.raises(UsageError, match="has no profile"):
        write_results(tmp_path)
    with profile(tmp_path / "outer"), pytest.raises(UsageError, match="another profile is"), profile(tmp_path):
        pass
    assert not recorder.on
