"""Interrupts on the connection between a rank and the kernel."""

from __future__ import annotations

import signal
import threading
from multiprocessing import Pipe

import pytest

from paceline.core.world import World
from paceline.tools.notebook.rank import Channel, Rank
from twins import Pools


def interrupted_in_a_message(world: World) -> list[tuple[str, int]]:
    """Interrupt this rank, which is a separate process, while it sends a message; return the received messages."""
    kernel, rank = Pipe()
    channel = Channel(rank)
    serving = Rank(channel, None, is_busy=True)  # type: ignore[arg-type]
    received = []
    size = 4_000_000  # exceeds the capacity of the pipe, so that sending blocks

    def read() -> None:
        while not channel.in_message:
            pass
        signal.raise_signal(signal.SIGINT)
        received.append(kernel.recv())

    previous = signal.signal(signal.SIGINT, serving.interrupt)  # restored because the rank also runs other tests
    try:
        reader = threading.Thread(target=read)
        reader.start()
        with pytest.raises(KeyboardInterrupt):
            channel.send("display", b"x" * size)
        reader.join(60)
    finally:
        signal.signal(signal.SIGINT, previous)
    return [(kind, len(content)) for kind, content in received]


def test_interrupt_does_not_split_a_message(pools: Pools) -> None:
    assert pools.run(1, interrupted_in_a_message) == [[("display", 4_000_000)]]
