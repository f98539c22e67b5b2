"""The slow link between two hosts (network namespaces) has the promised rate and delay, and can be cut."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from namespaces import enter, two_hosts
from slow_link import MBIT, ROUND_TRIP_S, SlowLink

pytestmark = [pytest.mark.slow, pytest.mark.engines]
BYTES = 5_000_000


@pytest.fixture
def link() -> Iterator[SlowLink]:
    with two_hosts() as hosts, SlowLink(hosts) as made:
        yield made


@pytest.fixture
def ends(link: SlowLink) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return both ends of a connection over the link."""

    def listen() -> socket.socket:
        enter(link.hosts[0].name)
        return socket.create_server((link.addresses[0], 0))

    def connect(port: int) -> socket.socket:
        enter(link.hosts[1].name)
        return socket.create_connection((link.addresses[0], port))

    # Only the threads enter the hosts; a socket belongs to the host of the thread that created it.
    with (
        ThreadPoolExecutor(1) as first,
        ThreadPoolExecutor(1) as second,
        closing(first.submit(listen).result()) as server,
    ):
        connecting = second.submit(connect, server.getsockname()[1])
        with server.accept()[0] as accepted, connecting.result() as connected:
            for end in (accepted, connected):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                end.settimeout(60)
            yield accepted, connected


def round_trip(ends: tuple[socket.socket, socket.socket]) -> float:
    """Send a byte both ways, and return the seconds."""
    began = time.monotonic()
    for source, target in (ends, ends[::-1]):
        source.sendall(b"x")
        assert target.recv(1) == b"x"
    return time.monotonic() - began


def test_round_trip_takes_the_promised_time(ends: tuple[socket.socket, socket.socket]) -> None:
    fastest = min(round_trip(ends) for _ in range(20))
    assert ROUND_TRIP_S <= fastest < 1.5 * ROUND_TRIP_S


@pytest.mark.parametrize("is_reversed", [False, True])
def test_transfer_is_limited_to_the_rate(ends: tuple[socket.socket, socket.socket], is_reversed: bool) -> None:
    source, target = ends[::-1] if is_reversed else ends
    with ThreadPoolExecutor(1) as sender:
        began = time.monotonic()
        sending = sender.submit(source.sendall, bytes(BYTES))
        missing = BYTES
        while missing:
            missing -= len(target.recv(missing))
        sending.result()
    mbit = 8e-6 * BYTES / (time.monotonic() - began)
    assert 0.5 * MBIT < mbit <= 1.01 * MBIT  # slower on a busy machine


def test_cut_link_delivers_again_afterwards(link: SlowLink, ends: tuple[socket.socket, socket.socket]) -> None:
    round_trip(ends)
    link.cut(1.0)
    time.sleep(0.1)  # until the relay has read the order
    assert 0.85 < round_trip(ends) < 30
    assert min(round_trip(ends) for _ in range(5)) < 1.5 * ROUND_TRIP_S
