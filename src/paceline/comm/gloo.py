"""Connects the ranks over Gloo, with errors that name ranks, and rejects connections from other users.

Gloo accepts any process that connects to its port in time and sends a rank's number. That process would receive the
rank's messages, and messages from it might be unpickled. Before a rank uses a new group, it therefore asks the kernel
which users are connected. This works only on one host.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import ProcessGroupGloo, Store

from paceline.core.host import reached
from paceline.core.missing_ranks import CONNECTION_REMEDY, GRACE_S, missing_from, named_ranks, reason_of
from paceline.core.stores import is_private
from paceline.errors import CommunicationError

_LINE = re.compile(r"^ *\d+: (\S+) (\S+) (?!06)(\S+) \S+ \S+ \S+ +(\d+) +\d+ (\d+) ", re.MULTILINE)
"""A socket in ``/proc/net/tcp``, except one in TIME_WAIT, which no process holds any longer."""
_LISTENING = "0A"
_ROOT = 0


def connect_gloo(store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int]) -> ProcessGroupGloo:
    """Connect this rank with the others; all of them call this. Error messages call rank r ``names[r]``."""
    try:
        previous = own_sockets()
        group = ProcessGroupGloo(store, rank, size, timeout)
        if size > 1 and is_private(store):  # on one host
            _check_peers(own_sockets() - previous, names[rank])
        store.set(f"connected/{rank}", "")
        return group
    except CommunicationError:
        # Set to any value, so that the other ranks do not report this one as missing.
        store.set(f"connected/{rank}", "failed")
        raise
    except RuntimeError as error:
        limit, absent = reached(error), list[int]()
        with suppress(RuntimeError):  # the store no longer exists
            store.set(f"connected/{rank}", "failed")
            missing = [] if limit else missing_from(store, [f"connected/{r}" for r in range(size)], GRACE_S)
            absent = [names[index] for index in missing]
        others = named_ranks(absent or [name for name in names if name != names[rank]])
        failure = f"rank {names[rank]}: Gloo could not connect with {others}"
        if limit:
            raise CommunicationError(f"{failure} ({reason_of(error)}), because {limit}") from error
        reason = "ended meanwhile, or is stuck" if absent else "cannot be reached, or failed as well"
        raise CommunicationError(
            f"{failure} within {timeout.total_seconds():g} s, which {reason} ({reason_of(error)}); {CONNECTION_REMEDY}"
        ).because_of(absent) from error


def _check_peers(sockets: set[int], name: int) -> None:
    if (found := foreign_connection(connections(), sockets, os.geteuid())) is not None:
        port, user = found
        who = f"by user {user}" if user >= 0 else "by a process that has ended"
        raise CommunicationError(
            f"rank {name}: Gloo's port {port} was connected to {who} while the process group was created, and may "
            "mistake it for a rank; unless a rank has failed, identify that process, then restart the job"
        )


@dataclass(frozen=True)
class Connection:
    """A line of ``/proc/net/tcp``, with addresses in the file's notation, such as ``0100007F:1F90``."""

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
        with suppress(OSError):  # closed in the meantime
            target = os.readlink(descriptor.path)
            if target.startswith("socket:["):
                inodes.add(int(target[8:-1]))
    return inodes


def connections() -> list[Connection]:
    """Return the TCP sockets in this network namespace that a process holds."""
    lines = []
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in _LINE.finditer(Path("/proc/net", table).read_text()):
                local, remote, state, user, inode = line.groups()
                lines.append(Connection(local, remote, state, int(user), int(inode)))
    return lines


def foreign_connection(table: list[Connection], sockets: set[int], user: int) -> tuple[int, int] | None:
    """Return a connection to one of the listening `sockets` that does not come from one of the `user`'s processes.

    Args:
        table: all sockets of the host.
        sockets: inodes of this process's sockets.
        user: the user whose processes may connect. Root's may too, because root can read their memory anyway.

    Returns:
        The port, and the user at the other end or -1 if that process has ended; None if all connections are valid.
    """
    own_lines = [line for line in table if line.inode in sockets]
    ports = {line.port for line in own_lines if line.state == _LISTENING}
    accepted = [line for line in own_lines if line.state != _LISTENING and line.port in ports]
    if not accepted:
        return None
    other_ends = {(line.local, line.remote): line for line in table}
    for connection in accepted:
        peer = other_ends.get((connection.remote, connection.local))
        if peer is None or peer.inode == 0:
            return connection.port, -1
        if peer.user not in (user, _ROOT):
            return connection.port, peer.user
    return None
