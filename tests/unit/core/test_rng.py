from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from insides import derive_seed, rng_state, seed_all, set_rng_state
from paceline import World, set_seed
from paceline.errors import UsageError
from ranks import Pools


def draw() -> list[float]:
    import numpy

    return [random.random(), float(numpy.random.random()), *torch.rand(3).tolist()]


def test_seeds_are_stable_distinct_and_fit_63_bits() -> None:
    seeds = [derive_seed(name, number) for name in ("rank", "order") for number in range(50)]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("seed", [-1, 1.5, "7", None, True, -(2**70)])
def test_a_seed_is_a_nonnegative_integer(seed: Any) -> None:
    with pytest.raises(UsageError, match=r"seed must be (a whole number|at least 0), not "):
        set_seed(seed)


def streams(world: World | None) -> list[list[float]]:
    """Draw inside the block, after it, and without a block."""
    with set_seed(3):
        inside = draw()
    after = draw()
    set_seed(3)
    return [inside, after, draw()]


def test_ranks_agree_inside_the_block_and_differ_after_it(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    results = pools.run(2, streams)
    (inside, after, _), (same, other, _) = results
    assert inside == same
    assert after != other
    assert all(after == alone for _, after, alone in results)
    # With set_seed() before init(), every rank had rank 0's streams and thus the same dropout.
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        assert streams(None) == results[rank]


@pytest.mark.parametrize("rank", ["", "one", "-1", "1.0"])
def test_a_rank_that_is_not_a_number_is_refused(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(UsageError, match=f"^RANK='{rank}' is not a whole number >= 0"):
        set_seed(3)


def nested(world: World) -> list[list[float]]:
    found = []
    with set_seed(3):
        found.append(draw())
        with set_seed(4):
            found.append(draw())
            with set_seed(5):
                pass
            found.append(draw())
        found.append(draw())
        set_seed(6)  # by a helper; the rest of the block must stay the same
        found.append(draw())
    return [*found, draw()]


def test_ranks_agree_in_nested_blocks_and_the_outer_stream_continues(pools: Pools) -> None:
    """The end of the inner block made the rest of the outer one, and the initial weights, differ by rank."""
    first, second = pools.run(2, nested)
    assert first[:-1] == second[:-1]
    assert first[-1] != second[-1]
    assert [first[0], first[3]] == two_draws(3)
    assert [first[1], first[2]] == two_draws(4)


def two_draws(seed: int) -> list[list[float]]:
    with set_seed(seed):
        return [draw(), draw()]


def test_an_exception_closes_the_block() -> None:
    with set_seed(3):
        found = [draw()]
        with pytest.raises(KeyError), set_seed(4):  # noqa: PT012
            draw()
            raise KeyError
        found.append(draw())
    assert found == two_draws(3)


def test_a_block_created_before_its_outer_block_does_not_affect_it() -> None:
    inner = set_seed(4)
    with set_seed(3):
        found = [draw()]
        with inner, inner:
            draw()
        found.append(draw())
    assert found == two_draws(3)


def test_numpy_integers_and_large_integers_are_valid_seeds() -> None:
    import numpy

    for seed, same in ((numpy.int64(7), 7), (numpy.uint8(7), 7), (torch.tensor(7), 7)):
        found = []
        for one in (seed, same):
            with set_seed(one):
                found.append(draw())
            found.append(draw())
        assert found[:2] == found[2:]
    several = []
    for large in (2**64 - 1, 2**64, 2**64 + 1, 2**200):
        with set_seed(large):
            several.append(tuple(draw()[2:]))
    assert len(set(several)) == 4


def test_a_state_restores_every_generator() -> None:
    seed_all(1)
    random.gauss(0, 1)  # keeps the second number of a pair, which is also state
    state = rng_state()
    first = [*draw(), random.gauss(0, 1)]
    draw()
    set_rng_state(state)
    assert [*draw(), random.gauss(0, 1)] == first
