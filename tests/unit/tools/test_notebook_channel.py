"""The connection of a rank to the kernel, around interrupts."""

from __future__ import annotations

import signal
import threading
from multiprocessing import Pipe

import pytest

from paceline.core.processes.world import World
from paceline.tools.notebook.messages import INTERRUPTED
from paceline.tools.notebook.rank.main import Rank
from paceline.tools.notebook.rank.shell import Channel, asking
from twins import Pools


def test_the_answer_to_a_question_that_was_interrupted_is_not_taken_for_the_next_one() -> None:
    # It came as the next cell, and from then on each cell got the answer of the one before.
    kernel, rank = Pipe()
    channel = Channel(rank)
    kernel.send(("answer", 1, "", INTERRUPTED))
    with pytest.raises(KeyboardInterrupt):
        asking(channel)("first? ")
    kernel.send(("answer", 1, "late", ""))
    kernel.send(("answer", 2, "second", ""))
    assert asking(channel)("second? ") == "second"
    assert [kernel.recv(), kernel.recv()] == [("ask", 1, "first? "), ("ask", 2, "second? ")]


def test_a_frontend_that_cannot_ask_is_an_end_of_file() -> None:
    kernel, rank = Pipe()
    kernel.send(("answer", 1, "", "no frontend"))
    with pytest.raises(EOFError, match="no frontend"):
        asking(Channel(rank))()


def interrupted_in_a_message(world: World) -> list[tuple[str, int]]:
    """Send this rank, which is a process of its own, SIGINT while it sends; what has come of its message."""
    kernel, rank = Pipe()
    channel = Channel(rank)
    serving = Rank(channel, None, None, None, is_busy=True)  # type: ignore[arg-type]
    received = []
    size = 4_000_000  # more than the pipe holds, so that sending waits

    def read() -> None:
        while not channel.in_message:
            pass
        signal.raise_signal(signal.SIGINT)
        received.append(kernel.recv())

    before = signal.signal(signal.SIGINT, serving.interrupt)  # of a rank that runs other tests, too
    try:
        reader = threading.Thread(target=read)
        reader.start()
        with pytest.raises(KeyboardInterrupt):
            channel.send("display", b"x" * size)
        reader.join(60)
    finally:
        signal.signal(signal.SIGINT, before)
    return [(kind, len(content)) for kind, content in received]


def test_an_interrupt_divides_no_message(pools: Pools) -> None:
    assert pools.run(1, interrupted_in_a_message) == [[("display", 4_000_000)]]
