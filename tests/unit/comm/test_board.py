"""The board: ranks read what all ranks report; late, stopped and dead ranks delay a report or raise an error."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from insides import Board, count_reports, flip_bit, open_channel, shm_engine, under_way
from paceline import World
from paceline.errors import CommunicationError, DesyncError
from processes import until
from ranks import Pools, Ranks, run_ranks

MOST = 2**48 - 1
on_both = pytest.mark.parametrize("backend", ["paceline", "gloo"])


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[str, Pools]]:
    with Pools("paceline") as shared, Pools("gloo") as gathered:
        yield {"paceline": shared, "gloo": gathered}


def open_board(seconds: float = 60.0) -> Any:
    """Open a board; a wait on it ends after at most `seconds`."""
    return open_channel(dist.new_group(timeout=timedelta(seconds=seconds)), torch.device("cpu")).board


# -- contents and weights ----------------------------------------------------------------------------------------------


def post_and_read(world: World, odd: int) -> None:
    board = open_board()
    for number in range(12):
        different = number % 3 == 0
        contents = [MOST - number - (different and rank == odd) for rank in range(world.size)]
        board.post(contents[world.rank])
        assert board.contents() == contents
        assert board.is_unanimous() == (not different)


@on_both
@pytest.mark.parametrize("odd", [0, 2])
def test_every_rank_reads_all_reports(worlds: dict[str, Pools], backend: str, odd: int) -> None:
    worlds[backend].run(3, post_and_read, odd)


def read_weights(world: World) -> None:
    board = open_board()
    for weight in (1.0, 0.1, 0.0, 3.0, 5e-324, 1e300, 0.0, 0.0):
        weights = [weight * (rank + 1) for rank in range(world.size)]
        board.post(7, weights[world.rank])
        board.contents()
        assert list(map(float.hex, board.weights())) == list(map(float.hex, weights))


@on_both
def test_weights_are_exact_and_may_be_zero(worlds: dict[str, Pools], backend: str) -> None:
    worlds[backend].run(3, read_weights)


def wrap_around(world: World) -> None:
    board = open_board()
    for start in (2**16 - 4, 2**32 - 4):
        dist.barrier()
        count_reports(board, start)
        for number in range(8):
            board.post(number, float(number))
            assert board.contents() == [number] * world.size
            assert board.weights() == [float(number)] * world.size


def test_numbers_of_reports_may_wrap_around(worlds: dict[str, Pools]) -> None:
    worlds["paceline"].run(2, wrap_around)


# -- ranks that wait ---------------------------------------------------------------------------------------------------


def wait_for_late_rank(world: World, is_shared: bool) -> None:
    board, is_late = open_board(), world.rank == 1
    dist.barrier()
    began = time.monotonic()
    time.sleep(0.5 * is_late)
    board.post(7)
    if is_shared and not is_late:
        assert not board.is_unanimous()
        assert time.monotonic() - began < 0.4
    assert board.contents() == [7] * world.size
    assert 0.45 < time.monotonic() - began < 5


@on_both
def test_a_wait_ends_when_the_late_rank_posts(worlds: dict[str, Pools], backend: str) -> None:
    worlds[backend].run(3, wait_for_late_rank, backend == "paceline")


def miss(world: World, how: signal.Signals, seconds: float) -> tuple[str, float]:
    """Rank 1 is killed or stopped before its second report; return the error of the others, and after how long."""
    board = open_board(seconds)
    board.post(7)
    board.contents()
    if world.rank == 1:
        os.kill(os.getpid(), how)
    began = time.monotonic()
    board.post(7)
    with pytest.raises(CommunicationError) as caught:
        board.contents()
    assert caught.value.blamed == (1,)
    return str(caught.value), time.monotonic() - began


ENDED = r"rank 1 \(pid \d+\) has ended in the report of a step, report 2 of this group; see the error of that rank"
STOPPED = (
    r"rank 1 \(pid \d+, which has begun \d+ operations of this group\) did not take "
    r"part within 1 s in the report of a step, report 2 of this group; see the error of that rank"
)
OVER_GLOO = "the exchange of reports failed, because rank 1 ended or did not arrive"


@pytest.mark.parametrize(
    ("backend", "how", "seconds", "error"),
    [
        ("paceline", signal.SIGKILL, 60.0, ENDED),
        ("paceline", signal.SIGSTOP, 1.0, STOPPED),
        ("gloo", signal.SIGKILL, 60.0, OVER_GLOO),
        ("gloo", signal.SIGSTOP, 1.0, OVER_GLOO),
    ],
    ids=["killed", "stopped", "killed, over gloo", "stopped, over gloo"],
)
def test_a_rank_that_does_not_post_is_named(backend: str, how: signal.Signals, seconds: float, error: str) -> None:
    with Ranks(3, backend=backend) as ranks:
        ranks.start(miss, how, seconds)
        for rank in (0, 2):
            message, took = ranks.answer(rank, 60)
            assert re.match(f"rank {rank}: {error}", message), message
            assert took < 30, took
        ranks.kill()


def cross(world: World) -> str:
    """Rank 0 waits for a report; the others wait for rank 0 in a collective of another group."""
    shm_engine._NAP_S = 0.02
    board = open_board()
    board.post(7)
    board.contents()
    began = time.monotonic()
    if world.rank == 0:
        board.post(7)
    with pytest.raises(DesyncError) as caught:
        dist.all_reduce(torch.ones(1)) if world.rank else board.contents()
    assert time.monotonic() - began < 20
    return str(caught.value)


def test_a_deadlock_between_a_report_and_a_collective_is_named() -> None:
    for rank, message in enumerate(run_ranks(3, cross, backend="paceline", timeout=60)):
        assert message.startswith(f"rank {rank}: ranks wait for each other in different operations (rank"), message
        assert re.search(r"rank 0: the report of a step of ranks 0–2 \(", message), message
        assert re.search(r"ranks? [12, ]+: all_reduce of 1 ×", message), message


def close_unread(world: World) -> None:
    channel = open_channel(dist.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]
    if world.rank == 0:
        channel.board.post(7)
    assert under_way(channel) == 0
    channel.close()
    dist.barrier()


def test_a_gathered_board_closes_with_an_unread_report(worlds: dict[str, Pools]) -> None:
    worlds["gloo"].run(2, close_unread)


# -- stress ------------------------------------------------------------------------------------------------------------


def flip_each_bit(world: World) -> None:
    """One bit of rank 1's word is flipped after it has posted and before anyone reads."""
    board = open_board()
    for bit in range(16, 64):
        board.post(7)
        if world.rank == 1:
            flip_bit(board, bit)
        dist.barrier()
        assert not board.is_unanimous()
        assert board.contents() == [7, 7 ^ 1 << bit - 16]
        dist.barrier()
    for bit in (0, 1, 15):  # of the number of the report
        board = open_board(0.2)
        board.post(7)
        if world.rank == 1:
            flip_bit(board, bit)
        dist.barrier()
        assert not board.is_unanimous()
        if world.rank == 1:  # it reads rank 0's correct word, and waits in vain for the next one
            board.contents()
            board.post(7)
        with pytest.raises(CommunicationError, match="did not take part"):
            board.contents()


def test_a_flipped_bit_is_a_difference_or_an_error(worlds: dict[str, Pools]) -> None:
    worlds["paceline"].run(2, flip_each_bit)


@contextmanager
def delays(seed: str, share: float, seconds: float) -> Iterator[None]:
    """Sleep for up to `seconds` at a random `share` of the lines that the board runs."""
    board, chance = sys.modules[Board.__module__].__file__, random.Random(seed)

    def trace(frame: FrameType, _event: str, _argument: object) -> Any:
        if frame.f_code.co_filename != board:
            return None
        if chance.random() < share:
            time.sleep(chance.random() * seconds)
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def stress(world: World, count: int, begun: Path) -> str:
    """Post and read `count` reports, some different, some weighted; return the error if a rank ends."""
    board, random_of_all = open_board(), random.Random(world.size)
    count_reports(board, 2**16 - 100)
    dist.barrier()
    (begun / f"{count}-{world.rank}").touch()
    try:
        with delays(str(world.rank), 1e-3, 0.002):
            for number in range(count):
                contents, odd = [number + 2] * world.size, random_of_all.randrange(4 * world.size)
                contents[odd:] = [0] * len(contents[odd:])
                weights = [random_of_all.random() * 2**number for number in range(world.size)]
                is_weighted = random_of_all.random() < 0.5
                board.post(contents[world.rank], weights[world.rank] if is_weighted else None)
                is_unanimous = board.is_unanimous()
                assert not is_unanimous or odd == 0 or odd >= world.size
                if not is_unanimous or number % 2:
                    assert board.contents() == contents
                if is_weighted:
                    assert board.weights() == weights
    except CommunicationError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4, 8])
def test_reports_are_exact_while_ranks_are_delayed_stopped_and_killed(size: int, tmp_path: Path) -> None:
    chance = random.Random(size)
    with Ranks(size, 60, "paceline") as ranks:
        for count in (10_000, 10_000_000):
            ranks.start(stress, count, tmp_path)
            until(lambda count=count: all((tmp_path / f"{count}-{rank}").exists() for rank in range(size)))
            for _ in range(20):
                pid = chance.choice(ranks.processes).pid
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.05 * chance.random())
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.05 * chance.random())
            if count == 10_000:
                assert [ranks.answer(rank, 50) for rank in range(size)] == [""] * size
        victim = chance.randrange(size)
        ranks.processes[victim].kill()
        for rank in set(range(size)) - {victim}:
            assert re.match(rf"rank {rank}: rank {victim} \(pid \d+\) has ended in the report", ranks.answer(rank, 20))
