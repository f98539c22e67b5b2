"""The connection of a rank to the kernel, around interrupts."""

from __future__ import annotations

import signal
import threading
from multiprocessing import Pipe

import pytest

from paceline.core.world import World
from paceline.tools.notebook.rank import Channel, Rank
from twins import Pools


def interrupted_in_a_message(world: World) -> list[tuple[str, int]]:
    """Send this rank, which is a process of its own, SIGINT while it sends; what has come of its message."""
    kernel, rank = Pipe()
    channel = Channel(rank)
    serving = Rank(channel, None, is_busy=True)  # type: ignore[arg-type]
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
