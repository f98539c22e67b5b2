"""The processes that have connected to Gloo. On one host the kernel knows who is at the other end of a connection.

Gloo takes anyone for a rank who connects to its port in time and sends the rank's number, which is small. He would
get the messages for that rank, and his own may be unpickled. So each rank looks, before it uses a new group.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"^ *\d+: (\S+) (\S+) (?!06)(\S+) \S+ \S+ \S+ +(\d+) +\d+ (\d+) ", re.MULTILINE)
"""A socket in ``/proc/net/tcp``, unless it is in TIME_WAIT, which no process holds any more."""
_LISTENING = "0A"
_ROOT = 0


@dataclass(frozen=True)
class Connection:
    """A line of ``/proc/net/tcp``. Addresses are as they stand there, ``0100007F:1F90``."""

    local: str
    remote: str
    state: str
    user: int
    inode: int

    @property
    def port(self) -> int:
        """The local port."""
        return int(self.local.rpartition(":")[2], 16)


def own_sockets() -> set[int]:
    """Return the inodes of this process's sockets."""
    inodes = set()
    for descriptor in os.scandir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            target = os.readlink(descriptor.path)
            if target.startswith("socket:["):
                inodes.add(int(target[8:-1]))
    return inodes


def connections(*tables: str) -> list[Connection]:
    """Read every TCP socket of this network namespace that a process has held lately, from ``tcp``, ``tcp6``."""
    found = []
    for table in tables or ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in _LINE.finditer(Path("/proc/net", table).read_text()):
                local, remote, state, user, inode = line.groups()
                found.append(Connection(local, remote, state, int(user), int(inode)))
    return found


def find_stranger(sockets: set[int], user: int) -> tuple[int, int] | None:
    """Call :func:`stranger` with the kernel's tables as they are now; reading one takes milliseconds."""
    table = connections("tcp")
    found = stranger(table, sockets, user)
    if (found is None and any(line.state == _LISTENING and line.inode in sockets for line in table)) or (
        found is not None and found[1] >= 0
    ):
        return found
    return stranger(table + connections("tcp6"), sockets, user)


def stranger(table: list[Connection], sockets: set[int], user: int) -> tuple[int, int] | None:
    """Find a connection to one of the listening `sockets` that does not come from a process of `user`.

    Args:
        table: all sockets of the host.
        sockets: inodes of this process's sockets.
        user: who may connect; so may root, who needs no such ways.

    Returns:
        The port, and the other end's user, -1 if that has ended; None if there is no such connection.
    """
    ours = [line for line in table if line.inode in sockets]
    ports = {line.port for line in ours if line.state == _LISTENING}
    accepted = [line for line in ours if line.state != _LISTENING and line.port in ports]
    if not accepted:
        return None
    other_ends = {(line.local, line.remote): line for line in table}
    for connection in accepted:
        other = other_ends.get((connection.remote, connection.local))
        if other is None or other.inode == 0:
            return connection.port, -1
        if other.user not in (user, _ROOT):
            return connection.port, other.user
    return None
