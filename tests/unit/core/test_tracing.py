"""Spans of a training step, in our recorder and in torch's profiler."""

from __future__ import annotations

import itertools
import logging
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from insides import Recorder, recorder
from paceline import Checkpointer, DistributedDataParallel, World
from paceline.data import DataLoader

BUCKETS = 2


def train(folder: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model = DistributedDataParallel(net, bucket_cap_mb=3e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)))
    checkpointer = Checkpointer(folder)
    checkpointer.register("model", model)
    checkpointer.register("optimizer", optimizer)
    for (x,) in itertools.islice(DataLoader(data, batch_size=8), 3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    checkpointer.save(3)


@pytest.mark.ranks(2)
def test_a_step_is_recorded_from_batch_to_checkpoint(world: World, tmp_path: Path) -> None:
    train(tmp_path)
    assert recorder.spans == []
    recorder.on = True
    train(tmp_path)
    spans = recorder.spans
    # Waits and bucket sums lie inside the spans of their steps.
    one = [span for span in spans if span.label not in ("data wait", "collective", "reduce")]
    labels = [span.label for span in sorted(one, key=lambda span: span.start)]
    launches, waits = ["launch"] * BUCKETS, ["bucket wait"] * BUCKETS
    # The first step exchanges control blocks; later steps only compare a digest in the last bucket.
    first = ["forward", "backward", *launches, "control", "wait", *waits, "optimizer"]
    usual = ["forward", "backward", *launches, "wait", *waits, "optimizer"]
    # Parameters are compared after the first step, which takes an exchange in the second step.
    compared = ["forward", "backward", *launches, "wait", *waits, "control", "wait", "optimizer"]
    assert labels == ["checkpoint", *first, *compared, *usual, "checkpoint"]
    assert [span.label for span in spans].count("data wait") >= 3
    for name in ("launch", "bucket wait"):
        assert [span.bucket for span in spans if span.label == name] == [*range(BUCKETS)] * 3
    backward = next(span for span in spans if span.label == "backward")
    launch = next(span for span in spans if span.label == "launch")
    assert backward.start <= launch.start <= launch.end <= backward.end


@pytest.mark.ranks(2)
def test_torchs_profiler_shows_the_same_labels(world: World, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train(tmp_path)
    names = [event.name for event in profile.events()]
    for label in ("data wait", "forward", "backward", "launch 0", "launch 1", "wait", "bucket wait 1"):
        assert names.count(label) >= 3, label
    assert names.count("control") >= 1
    assert names.count("optimizer") == 3
    assert names.count("checkpoint") == 2  # the constructor and the save
    assert recorder.spans == []


def test_a_span_is_recorded_if_its_block_raises_and_is_free_when_off() -> None:
    log = Recorder(on=True)
    with pytest.raises(RuntimeError), log.span("wait"):
        raise RuntimeError
    end = log.open("backward")
    end()
    assert [span.label for span in log.spans] == ["wait", "backward"]
    assert Recorder().span("wait") is Recorder().span("launch")


@pytest.mark.ranks(2)
def test_decisions_are_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline")
    model = DistributedDataParallel(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    records = [f"{record.name}: {record.getMessage()}" for record in caplog.records]
    assert f"paceline.ddp.channel: rank {world.rank}: gradients travel through shared memory" in records
    order = "paceline.ddp.reducer: rank %d: buckets are in rank 0's order of arrival; bytes: 80"
    assert order % world.rank in records
