"""The ranks that tests run in."""

from __future__ import annotations

import time

import pytest

from paceline.core.processes.world import World
from ranks import RankFailed, Ranks


def is_there(world: World) -> bool:
    return True


def sleeps(world: World) -> None:
    time.sleep(600)


def fails_or_sleeps(world: World) -> None:
    if world.rank == 2:
        sleeps(world)
    raise ArithmeticError(f"of rank {world.rank}")


def test_a_failure_shows_that_of_every_rank_and_where_the_others_are() -> None:
    """The first to fail is often the one that lost its peer; the cause was hidden then."""
    with Ranks(3) as ranks, pytest.raises(RankFailed) as caught:
        ranks.run(fails_or_sleeps)
    for text in (
        "ArithmeticError: of rank 0",
        "ArithmeticError: of rank 1",
        "rank 2 did not answer, and is here:",
        "in sleeps",
    ):
        assert text in str(caught.value)


@pytest.mark.slow
def test_a_rank_that_hangs_shows_where() -> None:
    """From a signal in its own thread: a watchdog thread that dumped running frames crashed ranks that were slow."""
    with Ranks(2) as ranks:
        assert ranks.run(is_there) == [True, True]  # so that the short patience below is not for the start
        ranks.timeout = 2
        with pytest.raises(RankFailed, match=r"ranks \[0, 1\] did not answer") as caught:
            ranks.run(sleeps)
    assert str(caught.value).count("in sleeps") == 2
