"""The identity of this host. Ranks with the same identity share a host."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import sys
from pathlib import Path

from paceline.comm.shm_arena import Arena

SPLIT = "PACELINE_HOSTS"
"""Environment variable for tests: divides the ranks of a host into this many blocks, which count as hosts."""


class Refused(Exception):
    """Shared memory cannot be used here; the message says why."""


def host_number(rank: int, size: int) -> int:
    """Return a number that is equal on all ranks of one host, unless a test divides the host."""
    try:
        host = _kernel()
    except OSError:
        host = socket.gethostname()
    digest = hashlib.sha256(f"{host}/{_part(rank, size)}".encode()).digest()
    return int.from_bytes(digest[:7], "big")  # 7 bytes, which fit in an int64 tensor element


def memory_identity(rank: int, size: int) -> str:
    """Return a string that is equal on two ranks if and only if they can share memory.

    It names the kernel, the network and process namespaces, and the user.
    """
    if sys.platform != "linux":
        raise Refused(f"shared memory between ranks needs Linux, this is {sys.platform}")
    for name in ("memfd_create", "eventfd", "pidfd_open"):
        if not hasattr(os, name):
            raise Refused(f"this Python has no os.{name}")
    try:
        kernel = _kernel()
        # Abstract sockets belong to a network namespace, and pidfds to a process namespace.
        spaces = "/".join(os.readlink(f"/proc/self/ns/{space}") for space in ("net", "pid"))
        # A sandbox or an old kernel may reject calls that Python offers.
        os.close(os.eventfd(0))
        os.close(os.pidfd_open(os.getpid()))
        Arena().close()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.bind(f"\0paceline/{secrets.token_hex(16)}")
    except (OSError, ValueError) as error:
        raise Refused(f"the system refuses it: {error}") from error
    return f"{kernel}/{spaces}/{os.geteuid()}/{_part(rank, size)}"


def _kernel() -> str:
    """Return the random id that the kernel generated at boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _part(rank: int, size: int) -> int:
    """Return which part of this host `rank` is in, if a test divides the host."""
    return rank * int(os.environ.get(SPLIT, "1")) // size
