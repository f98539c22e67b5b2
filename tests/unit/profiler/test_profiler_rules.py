"""Rules of the verdict, each tested on synthetic records with one known fault and again without it."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from subprocess import PIPE
from typing import Any

import pytest
import torch

from insides import (
    LAUNCH,
    CollectorPauses,
    Forwards,
    HostLoad,
    OperatorTable,
    RankRecord,
    Report,
    Span,
    StackSampler,
    Step,
    between_spans,
    function_of,
    own_seconds,
    recorder,
    stack_samples,
)
from insides import host_load_busy_seconds as busy_seconds
from processes import until
from profile_records import Timing, cut, kinds, records, the, usual, verdict

DRAW = random.Random(0)
LENGTHS = [DRAW.randint(8, 512) for _ in range(256)]
CELL_S = 4e-6


def padded_batches(rank: int, step: int) -> dict[str, float]:
    """Simulate 32 sequences per rank, padded to the longest, with proportional compute times."""
    draw = random.Random(2 * step + rank)
    cells = 32 * max(draw.choices(LENGTHS, k=32)) if step % 2 else 32 * draw.randint(200, 512)
    return {"cells": cells, "forward": CELL_S * cells / 3, "backward": CELL_S * cells * 2 / 3}


def test_unequal_batches_are_reported_with_the_balancing_argument() -> None:
    report = verdict(records(2, 80, padded_batches))
    advice = the("balance", report)
    assert "paceline.data.DataLoader(…, cost=lambda sample: …)" in advice.text
    assert "padded=True" in advice.text
    assert "cells, including padding" in advice.reason
    assert advice.gain == pytest.approx(report.facts.shares["bubble"])
    assert report.headline.startswith("Ranks wait for each other, in turns, for ")


def saves_by_hand(rank: int, step: int) -> dict[str, float]:
    return {"gap": 0.0005 + (0.035 if rank == 0 and step % 5 == 0 else 0.0)}


def test_manual_save_on_one_rank_is_own_code_and_names_the_function() -> None:
    made = records(2, 80, saves_by_hand)
    made[0] = replace(
        made[0], own_code={"save() (train.py:8, in torch.serialization.save)": 40, "log() (train.py:9)": 2}
    )
    report = verdict(made)
    assert report.advice[0].kind == "own-code"
    assert "balance" not in kinds(report)
    assert "Look at save() (train.py:8, in torch.serialization.save) on rank 0" in report.advice[0].text
    assert report.headline.startswith(
        "Rank 0 slows the others down: its own code in the loop takes 6.8 ms longer per step, most of it in save()"
    )
    mended = verdict(records(2, 80))
    saved = 1 - mended.facts.length / report.facts.length
    assert report.advice[0].gain == pytest.approx(saved, rel=0.1)


def slow_half(rank: int, step: int) -> dict[str, float]:
    """Let rank 1 sleep 20 ms from step 75 on, in short steps whose ratios vary tenfold."""
    jitter = random.Random(f"{rank} {step}").uniform(0.1, 1)
    late = 0.02 if rank == 1 and step >= 75 else 0.0
    return {"data": 0.0, "forward": 0.002 * jitter, "backward": 0.002 * jitter, "optimizer": 0.0, "gap": late}


@pytest.mark.parametrize("steps", [150, 100])
def test_rank_that_becomes_slow_is_reported_with_its_onset_and_function(steps: int) -> None:
    """It looked like an occasional save, at half the cost; in 100 steps it is late for only half a second."""
    made = records(2, steps, slow_half)
    made[1] = replace(made[1], own_code={"augment() (train.py:8)": 150})
    report = verdict(made)
    assert report.headline.startswith("Rank 1 slows the others down: its own code in the loop takes ")
    assert "ms longer per step since step 75, most of it in augment() (train.py:8); " in report.headline
    assert float(report.headline.split("takes ")[1].split(" ms")[0]) == pytest.approx(20, abs=0.5)
    assert "since step 75" in report.advice[0].text
    assert "Checkpointer" not in report.advice[0].text
    mended = verdict(records(2, steps, lambda rank, step: slow_half(0, step + 1000 * rank)))
    assert report.advice[0].gain == pytest.approx(1 - mended.facts.length / report.facts.length, rel=0.1)


def evaluations(rank: int, step: int) -> dict[str, float]:
    return {"gap": 0.0005 + (0.3 if rank == 0 and step % 50 == 49 else 0.0)}


def test_few_long_evaluations_on_one_rank_are_own_code() -> None:
    """Three evaluations are too few for a test of the mean, regardless of their duration."""
    made = records(2, 190, evaluations)
    seen = {"evaluate() (train.py:30)": 80}
    report = verdict([replace(made[0], own_code=seen), made[1]])
    assert report.advice[0].kind == "own-code"
    assert report.headline.startswith("Rank 0 slows the others down: its own code in the loop takes 4.8 ms longer")
    assert "most of it in evaluate()" in report.headline
    few = {"evaluate() (train.py:30)": 20}
    assert "own-code" not in kinds(verdict([replace(made[0], own_code=few), made[1]])), "a fifth of their time"
    rare = [replace(made[0], own_code=few, sampled_s=0.025), replace(made[1], sampled_s=0.025)]
    assert "own-code" in kinds(verdict(rare)), "less frequent samples stand for more time"
    assert "own-code" not in kinds(verdict(made)), "no stack sample shows its own code"
    assert "own-code" not in kinds(verdict([replace(record, own_code=seen) for record in made])), "both ranks run it"
    two = records(2, 140, evaluations)
    assert "own-code" not in kinds(verdict([replace(two[0], own_code=seen), two[1]])), "two may be chance"
    both = records(2, 190, lambda rank, step: evaluations(0, step + 20 * rank))
    assert "own-code" not in kinds(verdict([replace(both[0], own_code=seen), both[1]])), "both ranks have such steps"


def test_batches_made_by_the_loop_are_its_own_code() -> None:
    made = records(2, 40, lambda *_: {"data": 0.0, "gap": 0.05})
    report = verdict([replace(record, own_code={"get_batch() (train.py:8)": 80}) for record in made])
    assert report.headline == "The loop's own code takes 57% of a step, much of it in get_batch() (train.py:8)."
    slow = verdict(records(2, 40, lambda rank, _: {"data": 0.0, "gap": 0.05 * rank}))
    assert "its own code in the loop takes 50.0 ms longer" in slow.headline


@pytest.mark.parametrize("lost", [0.1, 0.3])
def test_evaluations_under_load_count_without_the_delay(lost: float) -> None:
    """Next to two busy programs an evaluation may mostly lack a core; pure delays do not count as evaluations."""

    def loaded(rank: int, step: int) -> dict[str, float]:
        is_evaluating = rank == 0 and step % 50 == 49
        return evaluations(rank, step) | {"delayed": lost if is_evaluating else 0.004}

    made = records(2, 190, loaded)
    busy = {"busy_cores": 2.0, "own_cores": 0.5, "cores": 2}
    made = [replace(record, **busy) for record in made]
    report = verdict([replace(made[0], own_code={"evaluate() (train.py:30)": 40}), made[1]])
    assert ("own-code" in kinds(report)) == (lost < 0.3)


def own_function(sampler: StackSampler, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and len(sampler.samples) < 5:
        time.sleep(0.001)


def test_stack_samples_name_the_program_function() -> None:
    sampler = StackSampler()
    began = time.perf_counter()
    own_function(sampler, 30.0)
    sampler.stop()
    samples = sampler.of(began, time.perf_counter())
    names = between_spans(samples, [("other", began, time.perf_counter())])
    assert any(name.startswith("own_function() (test_profiler_rules.py:") for name in names)
    assert between_spans(samples, [("forward", began, time.perf_counter())]) == []
    called: list[str] = []
    sorted([1], key=lambda _: called.append(function_of(sys._getframe())))  # type: ignore[arg-type, return-value]
    assert called[0].startswith("<lambda>() (test_profiler_rules.py:")


class Held:
    """An object referenced by the sampled function."""


def hold_until_sampled(sampler: StackSampler) -> weakref.ref[Held]:
    held = Held()
    until(lambda: bool(sampler.samples))
    return weakref.ref(held)


def test_stack_sample_keeps_no_variable_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampling thread freed variables of a rank's main program, which aborted the rank at exit."""
    monkeypatch.setattr(stack_samples, "MOST_SHARE", 1e-9)  # after the first sample the thread sleeps for days
    sampler = StackSampler()
    held = hold_until_sampled(sampler)
    until(lambda: held() is None, lambda: "the sampling thread holds it")
    assert held() is None
    sampler.stop()


@pytest.mark.parametrize(("host", "used", "is_advised"), [(0.611, 0.152, True), (0.12, 0.4, False), (0.4, 0.65, False)])
def test_idle_gpu_waiting_for_the_host_differs_from_a_busy_gpu(host: float, used: float, is_advised: bool) -> None:
    # With these published figures, an idle GPU got no advice.
    figures = {"utilization": used, "host": host, "tensor_cores": 0.5}
    report = verdict(records(2, 40), OperatorTable(calls=1000, seconds=0.004, device_figures=figures))
    assert ("host-bound" in kinds(report)) == is_advised
    assert ("larger-batch" in kinds(report)) == (not is_advised), "one piece of advice names the larger batch"
    if is_advised:
        assert "for 15% of the time; for 61%, only the host is busy" in the("host-bound", report).reason
        assert the("host-bound", report).gain == pytest.approx(0.611 * 0.84, abs=0.05)


SHORT = OperatorTable(calls=1000, seconds=0.004)


@pytest.mark.parametrize(
    ("timing", "travel", "operators", "kind", "words"),
    [
        (lambda *_: {"forward": 0.002, "backward": 0.003}, 0.004, SHORT, "larger-batch", "Steps are too small: commun"),
        (lambda *_: {"optimizer": 0.05}, 0.003, None, "", "The optimizer takes 59% of a step."),
        (lambda _, step: {"checkpoint": 0.05 * (step % 5 == 0)}, 0.003, None, "checkpoints", "Saving checkpoints take"),
        (lambda *_: {"data": 0.05}, 0.003, None, "data-loading", "The loop waits for data for 57% of the time."),
        (lambda *_: {"gap": 0.05}, 0.003, None, "loop", "The loop's own code takes 57% of a step."),
        (lambda *_: {}, 0.04, None, "accumulation", "Communication takes 53% of a step."),
        (lambda *_: {"optimizer": 0.001}, 0.001, None, "", "Nothing slows the ranks down: they compute for 90%"),
    ],
)
def test_headline_is_the_most_expensive_cause(
    timing: Timing, travel: float, operators: OperatorTable | None, kind: str, words: str
) -> None:
    report = verdict(records(2, 40, timing, travel), operators)
    assert report.headline.startswith(words)
    assert [*kinds(report), ""][0] == kind
    gains = [advice.gain for advice in report.advice]
    assert gains == sorted(gains, reverse=True)
    assert all(0 < gain < 1 for gain in gains)


def delayed_in_turns(rank: int, step: int) -> dict[str, float]:
    late = 0.02 if (step * 7 + rank * 3) % 5 < 2 else 0.0
    return {name: usual(rank, step)[name] + late * (name == "forward") for name in ("forward", "backward")} | {
        "delayed": late
    }


def test_host_load_that_explains_the_waiting_is_the_only_advice() -> None:
    loaded = verdict(records(2, 80, delayed_in_turns, busy_cores=2.0, own_cores=0.5))
    assert kinds(loaded) == ["host-load"]
    assert loaded.headline.startswith("Other programs slow the ranks down: rank ")
    assert "because of other programs, which keep 1.0 of 2 cores busy" in loaded.advice[0].reason
    alone = verdict(records(2, 80, delayed_in_turns, busy_cores=1.0, own_cores=0.5))
    assert "host-load" not in kinds(alone), "no other program ran"
    figures = {"utilization": 0.152, "host": 0.611, "tensor_cores": 0.5}
    operators = OperatorTable(calls=1000, seconds=0.004, device_figures=figures)
    waits = verdict(records(2, 80, delayed_in_turns, busy_cores=2.0, own_cores=0.5), operators)
    assert kinds(waits) == ["larger-batch", "host-load"], "even though the GPU waits for the host"


def clipping_under_load(rank: int, step: int) -> dict[str, float]:
    late = random.Random(2 * step + rank).expovariate(1 / 0.04)
    return {"forward": 0.01 + late, "gap": 0.03, "delayed": late}


def test_load_does_not_hide_sampled_own_code() -> None:
    """A loop that spends 29 % of its time clipping gradients by hand was advised only about other programs."""
    made = records(2, 120, clipping_under_load, busy_cores=2.0, own_cores=0.5)
    report = verdict([replace(record, own_code={"clip() (train.py:8)": 60}) for record in made])
    assert kinds(report) == ["loop", "host-load"]
    assert report.headline.startswith("The loop's own code takes ")
    assert "much of it in clip() (train.py:8). In addition, other programs slow the ranks down: " in report.headline
    assert kinds(verdict(made)) == ["host-load"], "without a stack sample it may be a delay"


def test_communication_explained_by_load_gets_no_advice_next_to_a_slow_loader() -> None:
    """The data wait was unrelated to the load, but accumulation was advised for waits that the load explained."""

    def timing(rank: int, step: int) -> dict[str, float]:
        late = random.Random(2 * step + rank).expovariate(1 / 0.02)
        return {"data": 0.06, "forward": 0.01 + late, "delayed": late}

    loaded = verdict(records(2, 120, timing, travel=0.015, busy_cores=2.0, own_cores=0.5))
    assert loaded.facts.shares["communication"] > 0.1
    assert kinds(loaded) == ["data-loading"]
    assert "accumulation" in kinds(verdict(records(2, 120, timing, travel=0.015, busy_cores=0.5, own_cores=0.5)))


def test_slow_rank_is_distinguished_from_delays_that_exceed_its_own() -> None:
    def timing(rank: int, step: int) -> dict[str, float]:
        late = random.Random(2 * step + rank).expovariate(1 / 0.06)
        return {"forward": 0.02 + late, "gap": 0.015 * rank * slow, "delayed": late}

    slow = True
    report = verdict(records(2, 120, timing, busy_cores=2.0, own_cores=0.5))
    assert kinds(report) == ["straggler", "host-load"]
    assert report.headline.startswith("Rank 1 slows the others down: its own code in the loop")
    assert "In addition, other programs slow the ranks down: rank " in report.headline
    made = records(2, 120, timing, busy_cores=2.0, own_cores=0.5)
    del made[1].steps[60]
    advice = verdict(made).advice[0]
    assert advice.kind == "straggler"
    assert "nan" not in f"{advice.text} {advice.reason}", "a rank lacks a step"
    slow = False
    assert kinds(verdict(records(2, 120, timing, busy_cores=2.0, own_cores=0.5))) == ["host-load"]


def test_dominating_delays_make_no_rank_slow() -> None:
    """A tenth of the time was assumed to be own work, so the rank that lacked cores longer counted as slow."""

    def timing(rank: int, step: int) -> dict[str, float]:
        late = (0.9 if rank == 1 and step > 38 else 0.5) * random.Random(2 * step + rank).uniform(0.8, 1.2)
        return {"optimizer": 0.004 + late, "delayed": late}

    assert kinds(verdict(records(2, 130, timing, busy_cores=2.0, own_cores=0.1))) == ["host-load"]


def test_temporarily_slow_rank_is_not_the_headline_next_to_longer_data_waits() -> None:
    """«Rank 0 slows the others down: its waiting for data takes 37 ms longer per step», for 25 steps at the start."""
    report = verdict(records(2, 150, lambda rank, step: {"data": 0.06 if rank == 0 and step < 28 else 0.025}))
    assert kinds(report)[:2] == ["data-loading", "straggler"]
    assert report.headline.startswith("The loop waits for data for ")
    assert "its waiting for data takes 35.0 ms longer in steps 3 to 27" in the("straggler", report).text


def test_ranks_waiting_for_each_others_loaders_get_no_balancing_advice() -> None:
    """Besides more workers, the advice was to find the samples that take longer."""
    report = verdict(records(2, 120, lambda rank, step: {"data": 0.05 if step % 2 == rank else 0.0}))
    assert report.facts.shares["bubble"] > 0.2
    assert kinds(report) == ["data-loading"]
    assert report.headline.startswith("The loop waits for data for ")
    other = verdict(records(2, 120, lambda rank, step: {"forward": 0.06 if step % 2 == rank else 0.01}))
    assert "balance" in kinds(other)


def test_gradients_averaged_in_every_backward_of_a_step_are_reported() -> None:
    """The advice was to accumulate 16 batches instead of 4, which were not actually accumulated."""
    made = records(2, 40, travel=0.03)
    for step in (step for record in made for step in record.steps):
        step.batches, step.averages = 4, 4
    report = verdict(made)
    advice = the("accumulation", report)
    assert advice.text.startswith("Average gradients once per step, not 4 times: model.no_sync()")
    assert advice.gain == pytest.approx(0.75 * report.facts.shares["communication"])
    for step in (step for record in made for step in record.steps):
        step.averages = 1
    assert the("accumulation", verdict(made)).text.startswith("Accumulate 16 instead of 4 batches")


def test_two_models_in_a_step_share_a_batch_and_average_separately() -> None:
    """The advice for a GAN was to accumulate six batches instead of two, and its samples were counted twice."""
    x, models = torch.zeros(8, 3), [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
    launched = [Span(LAUNCH, 0.0, 0.0, 0), Span(LAUNCH, 0.0, 0.0, 1)]

    def described(*seen: torch.nn.Module, averages: int) -> tuple[int, int, int]:
        forwards, step = Forwards(), Step(5, "plain", 0.0, 1.0, {}, [], spans=launched * averages)
        for model in seen:
            forwards.add(model, (x,), {})
        forwards.describe(step)
        return step.batches, step.rows, step.averages

    assert described(*models, averages=2) == (1, 8, 1)
    assert described(*models[:1] * 4, averages=4) == (4, 32, 4), "accumulated without no_sync"
    assert described(*models[:1] * 4, averages=1) == (4, 32, 1)


def test_cost_of_saves_includes_the_steps_that_they_slow_down() -> None:
    def timing(_rank: int, step: int) -> dict[str, float]:
        return {"checkpoint": 0.02 * (step % 10 == 0), "forward": 0.01 + 0.02 * (step % 10 == 1)}

    advice = the("checkpoints", verdict(records(2, 103, timing)))
    steps = [verdict(records(2, 103, times)).facts.length for times in (timing, lambda *_: {})]
    assert advice.gain == pytest.approx(0.9 * (1 - steps[1] / steps[0]), rel=0.05)
    assert "every 100 steps instead of every 10" in advice.text


def test_virtual_ranks_get_no_unsupported_advice() -> None:
    """The advice was to accumulate their slices, which raises an error."""

    def advised(made: list[RankRecord]) -> set[str]:
        return set(kinds(verdict([replace(record, virtual_ranks=8) for record in made])))

    assert "accumulation" in kinds(verdict(records(2, 40, travel=0.06)))
    assert "accumulation" not in advised(records(2, 40, travel=0.06))
    padded = records(2, 80, padded_batches)
    assert "balance" in kinds(verdict(padded))
    assert "balance" not in advised(padded)


def test_other_bucket_sizes_are_compared_with_the_actual_ones() -> None:
    """The default buckets were assumed; here there are two, whose messages cost as much as one."""
    made = records(2, 40, travel=0.08, buckets=[4_000_000] * 8)
    advice = the("bucket-size", verdict(made))
    assert "bucket_cap_mb=25" in advice.text
    # The first of eight 10 ms messages follows the first gradient; a single one follows the last, 17.5 ms later.
    assert f"{(8 * 10 - 17.5) - 10:.1f} ms shorter" in advice.reason
    assert "bucket-size" not in kinds(verdict(records(2, 40, travel=0.01, buckets=[32_000_000])))


def test_garbage_collections_are_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "on", True)
    monkeypatch.setattr(recorder, "spans", [])
    pauses, cycle = CollectorPauses(), list[Any]()
    cycle.append(cycle)
    del cycle
    gc.callbacks.append(pauses)
    gc.collect()
    gc.callbacks.remove(pauses)
    [span] = recorder.spans
    assert (span.label, span.seconds > 0, pauses.collected > 0) == ("garbage collection", True, True)


def collecting(pauses: Sequence[float], freed: int = 0) -> Report:
    """Return the report of ranks whose optimizer steps include pauses by the collector of `pauses` seconds."""
    made = records(2, 60, lambda rank, _: {"optimizer": 0.004 + pauses[rank]})
    for record, pause in zip(made, pauses, strict=True):
        for step in record.steps:
            end = step.spans[-1].end
            step.spans.append(Span("garbage collection", end - pause, end))
            step.seconds, step.collected = cut(step.spans, step.start, step.end)[0], freed
    return verdict(made)


def test_garbage_collection_is_named_instead_of_the_part_it_pauses() -> None:
    """Pauses were part of the optimizer's time, and the verdict was that the optimizer takes most of a step."""
    report = collecting([0.04, 0.04])
    assert report.headline.startswith("Python's garbage collector takes 5"), report.headline
    assert report.facts.accounts.mean("optimizer") == pytest.approx(0.004)
    advice = the("garbage-collection", report)
    assert "gc.freeze() and gc.disable()" in advice.text
    assert advice.gain == pytest.approx(0.04 / report.facts.length, rel=0.01)
    # Freeing 100,000 objects takes half of the time, with or without pauses.
    assert the("garbage-collection", collecting([0.04, 0.04], freed=100_000)).gain == pytest.approx(advice.gain / 2)
    assert kinds(collecting([0.001, 0.001])) == []


def test_rank_paused_alone_is_named_with_the_cause() -> None:
    report = collecting([0.0, 0.04])
    assert report.headline.startswith("Rank 1 slows the others down: its garbage collection takes 40.0 ms longer")
    assert the("garbage-collection", report).gain > 0.4, "the other rank waits"


def test_own_code_of_one_rank_is_named_with_the_rank_on_a_busy_host() -> None:
    """Manual saves on rank 0 were «the loop's own code» if delays hid their duration."""
    made = records(2, 80, lambda rank, _: {"gap": 0.01 * (1 - rank), "delayed": 0.009}, busy_cores=2.0, own_cores=0.5)
    report = verdict([replace(made[0], own_code={"save() (train.py:8)": 40}), made[1]])
    assert "save() (train.py:8) on rank 0" in " ".join([report.headline, *(advice.text for advice in report.advice)])


@pytest.mark.skipif(busy_seconds() is None, reason="no accounts of Linux here")
def test_cores_and_delays_of_a_rank_are_read() -> None:
    load, began = HostLoad(), own_seconds()
    while own_seconds() - began < 0.05:
        pass
    assert load.delay() >= 0
    record = records(1, 0)[0]
    time.sleep(0.001)  # switches to another thread
    load.close(record)
    assert record.own_cores > 0
    assert record.switches > 0
    assert record.busy_cores is not None


@pytest.mark.skipif(busy_seconds() is None, reason="no accounts of Linux here")
def test_children_of_other_threads_count_as_own() -> None:
    """DataLoader workers started by another thread counted as other programs."""
    before, children = own_seconds(), []
    code = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True); input()"
    started, end = threading.Event(), threading.Event()

    def start() -> None:
        children.append(subprocess.Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE))
        started.set()
        end.wait(60)

    thread = threading.Thread(target=start)
    thread.start()
    assert started.wait(60)
    (child,) = children
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert own_seconds() - before >= 0.15
    finally:
        child.communicate(b"\n")
        end.set()
        thread.join()
