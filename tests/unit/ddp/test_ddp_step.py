"""One step: overlap of backward and collectives, and the memory of gradients."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import torch

from deep import TINY, Deep, data
from insides import storage_of
from paceline.core.spans import GRADIENT, recorder
from paceline.core.world import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import WorldError
from twins import Pools

# -- overlap and memory ------------------------------------------------------------------------------------------------


def launched_before_the_last_gradient(world: World) -> list[tuple[int, int]]:
    """Return per step the number of launches before the first layer's gradient, and of all launches."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Deep(), bucket_cap_mb=TINY)
    counts = []
    for step in range(4):
        recorder.spans.clear()
        arrived: list[float] = []
        x = data(world.rank, step)
        hook = model.module.layers[0].weight.register_hook(
            lambda _, arrived=arrived: arrived.append(time.perf_counter())
        )
        with patch.multiple(recorder, on=True):
            model(x).sum().backward()
        hook.remove()
        launches = [span for span in recorder.spans if span.label == "launch"]
        counts.append((sum(span.end <= arrived[0] for span in launches), len(launches)))
        model.zero_grad()
    assert model.exposed_seconds > 0
    assert model.gradient_bytes_per_step == 6 * 20 * 8
    return counts


def test_buckets_overlap_backward_from_the_first_step(pools: Pools) -> None:
    for counts in pools.run(2, launched_before_the_last_gradient):
        for early, total in counts:
            assert total >= 4
            assert early >= total - 2


def marked_gradients(world: World) -> list[list[int]]:
    model = DistributedDataParallel(Deep(), bucket_cap_mb=TINY)
    marked = []
    for step in range(4):
        recorder.spans.clear()
        with patch.multiple(recorder, on=True, detailed=step % 2 == 1):
            model(data(world.rank, step)).sum().backward()
        marked.append(sorted(span.bucket for span in recorder.spans if span.label == GRADIENT))
        model.zero_grad()
    return marked


def test_detailed_recorder_records_every_gradient(pools: Pools) -> None:
    for plain, first, _, second in pools.run(2, marked_gradients):
        assert plain == []
        assert first == second == [*range(12)]


def where_gradients_live(world: World) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Deep(), bucket_cap_mb=TINY)
    for step in range(4):
        model(data(world.rank, step)).sum().backward()
        flats = [bucket.flat for bucket in storage_of(model).buckets]
        inside = [range(flat.data_ptr(), flat.data_ptr() + flat.nbytes) for flat in flats]
        assert all(any(p.grad.data_ptr() in memory for memory in inside) for p in model.parameters())
        assert sum(p.grad.nbytes for p in model.parameters()) == sum(flat.nbytes for flat in flats)
        model.zero_grad(set_to_none=step % 2 == 0)


def test_gradients_exist_only_in_the_buckets_between_steps(pools: Pools) -> None:
    pools.run(2, where_gradients_live)


# -- the world's own collectives ---------------------------------------------------------------------------------------


def main_first(world: World, path: str) -> str:
    with world.main_first() as is_main:
        if is_main:
            open(path, "w").write("made")  # noqa: SIM115
        content = open(path).read()  # noqa: SIM115
    assert is_main == world.is_main
    try:
        with world.main_first() as is_main:
            assert is_main, "no other rank comes here"
            raise KeyError("no cache")
    except (KeyError, WorldError) as error:
        return f"{content} {type(error).__name__}: {error}"
    return "nothing raised"


def test_main_first_fails_on_all_if_it_fails_on_rank_0(pools: Pools, tmp_path: Any) -> None:
    first, *others = pools.run(3, main_first, str(tmp_path / "cache"))
    assert first == "made KeyError: 'no cache'"
    for rank, message in enumerate(others, start=1):
        assert message.startswith(f"made WorldError: rank {rank}: the main_first block failed on rank 0 (KeyError: ")
