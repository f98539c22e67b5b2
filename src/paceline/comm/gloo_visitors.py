"""Who has connected to Gloo: on one host the kernel knows whose process is at the other end of a connection.

Gloo takes anyone for a rank who connects to its port in time and sends the rank's number, which is small. He would
get what is sent to that rank, and what he sends may be unpickled. So each rank looks, before it uses a new group.
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
    """The inodes of this process's sockets."""
    inodes = set()
    for descriptor in os.scandir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            target = os.readlink(descriptor.path)
            if target.startswith("socket:["):
                inodes.add(int(target[8:-1]))
    return inodes


def connections(*tables: str) -> list[Connection]:
    """Every TCP socket of this network namespace that a process has had a hand in lately, from ``tcp``, ``tcp6``."""
    found = []
    for table in tables or ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in _LINE.finditer(Path("/proc/net", table).read_text()):
                local, remote, state, user, inode = line.groups()
                found.append(Connection(local, remote, state, int(user), int(inode)))
    return found


def find_stranger(sockets: set[int], user: int) -> tuple[int, int] | None:
    """As :func:`stranger`, in the kernel's tables as they are now; reading one takes milliseconds."""
    table = connections("tcp")
    found = stranger(table, sockets, user)
    if (found is None and any(one.state == _LISTENING and one.inode in sockets for one in table)) or (
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
    ours = [one for one in table if one.inode in sockets]
    ports = {one.port for one in ours if one.state == _LISTENING}
    accepted = [one for one in ours if one.state != _LISTENING and one.port in ports]
    if not accepted:
        return None
    other_ends = {(one.local, one.remote): one for one in table}
    for one in accepted:
        other = other_ends.get((one.remote, one.local))
        if other is None or other.inode == 0:
            return one.port, -1
        if other.user not in (user, _ROOT):
            return one.port, other.user
    return None
