"""Another user of the host can connect to all our ports and abstract sockets, but gets no data and blocks no rank.

The public store is an unauthenticated TCPStore. Before there was a private store, anyone who wrote a
false socket name into it was sent a rank's memory.
"""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from forked import in_processes
from insides import LOOPBACK, Arena, Peer, connect_gloo, gloo, handshake, loopback_store, stores
from insides import stores as rendezvous
from insides import stores_path_of as path_of
from paceline.errors import CommunicationError
from processes import Running, script
from ranks import fork_server

TIMEOUT = timedelta(seconds=60)
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


class OtherUser:
    """Runs ``function(send, *arguments)`` as user `NOBODY` until the block ends; ``send`` sends a value back."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self._pipe, child_pipe = fork_server.Pipe()
        self.process = fork_server.Process(target=run_as_nobody, args=(child_pipe, function, arguments))
        self.process.start()
        child_pipe.close()

    def receive(self) -> Any:
        """Return the next value sent; fail if the process ended or stays silent for 30 seconds."""
        assert self._pipe.poll(30), "the other user's process sent no value"
        ok, value = self._pipe.recv()
        assert ok, value
        return value

    def __enter__(self) -> OtherUser:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


def run_as_nobody(pipe: Connection, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    try:
        function(lambda value: pipe.send((True, value)), *arguments)
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def listen(send: Callable[[Any], None]) -> None:
    """Listen on an abstract socket; report its name, then the data that each client sends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen()
        send(listener.getsockname().decode())
        while True:
            link, _ = listener.accept()
            link.settimeout(30)
            text, descriptors, _, _ = socket.recv_fds(link, 1000, 8)
            send((text, len(descriptors)))


# -- the handshake -----------------------------------------------------------------------------------------------------


@needs_root
def test_another_user_listening_in_place_of_a_rank_gets_no_data() -> None:
    store = HashStore()
    with OtherUser(listen) as user:
        store.set("socket/0", json.dumps([user.receive(), "00" * 32]))
        with pytest.raises(CommunicationError, match=f"rank 0 has ended, and user {NOBODY} listens in its place"):
            handshake.connect(store, 1, Arena(), TIMEOUT, range(2))
        assert user.receive() == (b"", 0)


def test_a_rank_shares_its_memory_only_with_peers_that_know_its_secret() -> None:
    """A client of the same user still has to present the listening rank's secret."""
    store, arena, found = HashStore(), Arena(), dict[int, Any]()
    rank = threading.Thread(target=meet, args=(0, store, found))
    rank.start()
    address, secret = json.loads(store.get("socket/0"))
    genuine = bytes.fromhex(secret) + (1).to_bytes(8, "little")
    for hello in (b"", os.urandom(len(genuine)), os.urandom(200), genuine):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.connect(address)
            socket.send_fds(link, [hello], [arena.descriptor] * 2) if hello else link.shutdown(socket.SHUT_WR)
            answer, descriptors, _, _ = socket.recv_fds(link, 100, 8)
            assert (answer[:32].hex(), len(descriptors)) == ((secret, 2) if hello is genuine else ("", 0))
            for descriptor in descriptors:
                os.close(descriptor)
    rank.join()
    close(found[0])


def flood(rank: int, pipe: Connection) -> None:
    """Connect to all our sockets repeatedly and send garbage, descriptors or no data."""
    if rank and os.geteuid() == 0:
        os.setuid(NOBODY)
    connections, held = 0, list[socket.socket]()
    pipe.send("here")
    while True:
        lines = Path("/proc/net/unix").read_text().splitlines()
        names = [line.rpartition("@")[2] for line in lines if "@pacel" in line]
        for number, name in enumerate(names * 20):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with suppress(OSError):
                link.setblocking(False)
                link.connect(f"\0{name}")
                connections += 1
                if number % 4 == 3 and len(held) < 100:
                    held.append(link)
                elif number % 4 == 2:
                    socket.send_fds(link, [bytes(48)], [link.fileno()] * 2)
                else:
                    link.send(os.urandom(48) if number % 4 else b"\xff" * 200_000)
            if link not in held:
                link.close()
        if names and connections > 100:
            pipe.send(connections)
            connections = 0


def received(pipes: list[Connection]) -> list[Any]:
    assert all(pipe.poll(30) for pipe in pipes)
    return [pipe.recv() for pipe in pipes]


@pytest.mark.slow
def test_a_flood_of_connections_does_not_extend_a_ranks_timeout() -> None:
    """With a connection always pending, the deadline was never checked."""
    with in_processes(flood, range(2)) as floods:
        assert received(floods) == ["here"] * 2
        start = time.monotonic()
        with pytest.raises(CommunicationError, match="rank 0: rank 1 did not arrive"):
            handshake.connect(HashStore(), 0, Arena(), timedelta(seconds=2), range(2))
        assert time.monotonic() - start < 60
        assert min(received(floods)) > 100


def meet(rank: int, store: Store, found: dict[int, Any]) -> None:
    arena = Arena(2)
    try:
        found[rank] = handshake.connect(store, rank, arena, TIMEOUT, range(2))
    except CommunicationError as error:
        found[rank] = error


def close(peers: list[Peer]) -> None:
    for descriptor in [held for peer in peers for held in peer.descriptors()]:
        os.close(descriptor)


def test_ranks_connect_despite_a_flood_of_connections() -> None:
    """Two ranks complete their handshake during a flood."""
    store = HashStore()
    found: dict[int, Any] = {}
    with in_processes(flood, range(2)) as floods:
        assert received(floods) == ["here"] * 2
        first = threading.Thread(target=meet, args=(0, store, found))
        first.start()
        assert min(received(floods)) > 100  # rank 0 listens, and the flood has reached it
        meet(1, store, found)
        first.join()
    for rank in range(2):
        assert [peer.rank for peer in found[rank]] == [1 - rank]
        close(found[rank])


# -- the private store -------------------------------------------------------------------------------------------------


def offer(send: Callable[[Any], None], name: str) -> None:
    """Hold a memory file that imitates a private store."""
    descriptor = os.memfd_create(name)
    os.fchmod(descriptor, 0o600)
    send(f"/proc/{os.getpid()}/fd/{descriptor}")
    time.sleep(60)


@needs_root
def test_another_user_cannot_open_a_private_store() -> None:
    with OtherUser(try_to_open, path_of(stores.make_file(""))) as user:
        assert user.receive() == "PermissionError"


def try_to_open(send: Callable[[Any], None], path: str) -> None:
    try:
        send(str(os.open(path, os.O_RDONLY)))
    except OSError as error:
        send(type(error).__name__)


@needs_root
def test_values_forged_in_the_public_store_are_refused_by_name(tmp_path: Path) -> None:
    public = loopback_store()
    file, other = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600), stores.make_file("1")
    with OtherUser(offer, f"paceline-store-{public.port}") as user:
        refused = {
            f"{user.receive()} {'0' * 32}": f"it belongs to user {NOBODY}, not to user 0",
            f"/etc/shadow {'0' * 32}": "which is not a valid path",
            "garbage " * 1000: "which is not a valid path",
            f"{path_of(file)} {'0' * 32}": "it is not a memory file of Paceline",
            f"{path_of(other)} {'0' * 32}": "it was not made for this job",
            f"{path_of(999999)} {'0' * 32}": "it cannot be opened: No such file",
        }
        for text, message in refused.items():
            public.set("private", text)
            with pytest.raises(CommunicationError, match=re.escape(message)) as caught:
                stores.private_store(public, 1, range(2), TIMEOUT, range(2))
            assert "rank 1: rank 0's private store" in str(caught.value)
            assert len(str(caught.value)) < 600
    os.close(file)
    os.close(other)


def store_write(send: Callable[[Any], None], port: int, entries: dict[str, str]) -> None:
    """Keep writing `entries` into matching keys of a TCPStore and garbage into all others."""
    store = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
    for key, value in entries.items():
        store.set(key, value)
    send(True)
    while True:
        time.sleep(0.001)
        for key in store.list_keys():
            store.set(key, entries.get(key.rpartition("/")[2], "garbage"))


def test_another_jobs_memory_file_is_not_used() -> None:
    descriptor = stores.make_file("7")
    with pytest.raises(stores.NotPrivate, match="was not made for this job"):
        stores.open_file(path_of(descriptor), "8")
    before = len(os.listdir("/proc/self/fd"))
    mine = stores.open_file(path_of(descriptor), "7")
    assert stores.open_file(path_of(descriptor), "7") == mine  # once per process
    assert len(os.listdir("/proc/self/fd")) == before + 1
    os.close(descriptor)


def test_a_private_store_is_reused_without_further_descriptors() -> None:
    gc.collect()  # garbage of earlier tests
    public = loopback_store()
    first = stores.private_store(public, 0, range(2), TIMEOUT, range(2))
    assert rendezvous.is_private(first)
    assert not rendezvous.is_private(public)
    inside = PrefixStore("y/", first)
    assert stores.private_store(inside, 1, range(2), TIMEOUT, range(2)) is inside
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        again = stores.private_store(PrefixStore(f"{number}/", public), 0, range(2), TIMEOUT, range(2))
        again.set("key", "value")
        assert not again.check(["other"])
        assert not first.check(["key"])
    del again
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


# -- whole jobs --------------------------------------------------------------------------------------------------------

TRAINING = """
import os, time, torch, torch.distributed as dist, paceline
open("new-" + os.environ["RANK"], "w").write(os.environ["MASTER_PORT"])
os.rename("new-" + os.environ["RANK"], "port-" + os.environ["RANK"])  # only now, because the test reads it at once
while not os.path.exists("go"): time.sleep(0.01)
world = paceline.init(timeout=30)
for _ in range(3):
    group = dist.new_group([0, 1])
    tensor = torch.full((5,), float(world.rank + 1))
    dist.all_reduce(tensor, group=group)
    assert tensor.eq(3).all() and group.native
everyone = [None, None]
dist.all_gather_object(everyone, world.rank)
assert everyone == [0, 1]
world.close()
"""
BOGUS = {
    f"{prefix}{key}": value
    for prefix in ("", "default_pg//", "default_pg//paceline/", "default_pg/0//paceline/", "1//paceline/", "world//")
    for key, value in (
        ("socket/0", '["\\u0000stolen", "00"]'),
        ("socket/1", '["\\u0000stolen", "00"]'),
        ("host/0", '{"refused": "by another user"}'),
        ("host/1", '{"refused": "by another user"}'),
        ("private", "/proc/1/fd/1 " + "0" * 32),
        ("0", "garbage"),
        ("met/1", "garbage"),
    )
}


@needs_root
def test_overwriting_every_store_key_does_not_affect_our_launchers_jobs(tmp_path: Path) -> None:
    with Running(tmp_path, "run", "--nproc", "2", script(tmp_path, TRAINING), fork="all") as job:
        job.wait_for("port-0", "port-1")
        with OtherUser(store_write, int((tmp_path / "port-0").read_text()), BOGUS) as user:
            assert user.receive()
            (tmp_path / "go").touch()
            assert job.wait() == 0, job.stderr


# -- Gloo --------------------------------------------------------------------------------------------------------------


def connect_as_peer(send: Callable[[Any], None], orders: Connection) -> None:
    """Connect to the given ports and claim to be a peer, with each number that Gloo may have assigned."""
    held = []
    while True:
        port = orders.recv()
        for number in range(20):
            link = socket.socket()
            link.connect((LOOPBACK.encode(), port))
            link.send(number.to_bytes(8, "little"))
            held.append(link)
        send(port)


@needs_root
def test_an_impostor_in_gloo_is_detected_before_any_data_is_sent() -> None:
    """Gloo alone accepted the impostor as rank 1: it got rank 0's data, and rank 1 waited until its timeout."""
    theirs, orders = fork_server.Pipe()
    store, before, ends = HashStore(), gloo.own_sockets(), {}

    def connect(rank: int) -> None:
        try:
            connect_gloo(store, rank, 2, timedelta(seconds=20), range(2))
        except CommunicationError as error:
            ends[rank] = str(error)

    with OtherUser(connect_as_peer, theirs) as user:
        first = threading.Thread(target=connect, args=(0,))
        first.start()
        deadline, ports = time.monotonic() + 60, []
        while not ports and time.monotonic() < deadline:
            new = gloo.own_sockets() - before
            ports = [one.port for one in gloo.connections() if one.state == "0A" and one.inode in new]
        orders.send(ports[0])
        assert user.receive() == ports[0]  # before rank 1 connects
        connect(1)
        first.join()
    assert f"rank 0: Gloo's port {ports[0]} was connected to by user {NOBODY}" in ends[0]


CONNECTED = [("A:1F90", "A:0001", "01", 7, 11), ("A:0001", "A:1F90", "01", 7, 12)]
LISTENS = ("0:1F90", "0:0000", "0A", 7, 10)


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ([LISTENS], None),
        ([LISTENS, *CONNECTED], None),
        ([*CONNECTED], None),
        ([LISTENS, CONNECTED[0], ("A:0001", "A:1F90", "01", 8, 12)], (0x1F90, 8)),
        ([LISTENS, CONNECTED[0], ("A:0001", "A:1F90", "01", 0, 12)], None),
        ([LISTENS, CONNECTED[0], ("A:0001", "A:1F90", "05", 0, 0)], (0x1F90, -1)),
        ([LISTENS, CONNECTED[0]], (0x1F90, -1)),
        ([LISTENS, CONNECTED[0], ("B:0001", "A:1F90", "01", 7, 12)], (0x1F90, -1)),
        # connections from this process, and between other processes, do not belong to Gloo's port
        ([LISTENS, ("A:0002", "A:0050", "01", 7, 11), ("A:0050", "A:0002", "01", 8, 12)], None),
        ([LISTENS, ("A:0003", "A:0051", "01", 8, 13), ("A:0051", "A:0003", "01", 9, 14)], None),
    ],
)
def test_a_connection_of_another_user_is_found_in_the_kernel_table(
    table: list[tuple[str, str, str, int, int]], found: tuple[int, int] | None
) -> None:
    assert gloo.foreign_connection([gloo.Connection(*line) for line in table], {10, 11}, 7) == found


# -- nested jobs -------------------------------------------------------------------------------------------------------


def test_a_nested_job_does_not_use_the_outer_jobs_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun inherits the environment if a rank of ``paceline run`` starts it."""
    outer, public = stores.make_file("1"), loopback_store()
    inner = stores.make_file(str(public.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def world(variable: str) -> Store:
        monkeypatch.setenv(rendezvous.STORE, variable)
        return rendezvous.world_stores(LOOPBACK, str(public.port), 0, 1, True, TIMEOUT, os.getpid())[0]

    assert not rendezvous.is_private(world(f"1 {path_of(outer)}"))
    assert rendezvous.is_private(world(f"{public.port} {path_of(inner)}"))
    with pytest.raises(CommunicationError, match=r"the launcher's store at .* cannot be used, because it was not"):
        world(f"{public.port} {path_of(outer)}")
    os.close(outer)
    os.close(inner)
