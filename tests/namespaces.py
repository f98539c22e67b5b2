"""Two hosts on one machine: network namespaces joined by a virtual cable. Creating them requires root.

with two_hosts() as hosts:                       skips the test if namespaces are not permitted
    Forked(…, first=partial(enter, hosts[0].name))
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

CABLE = "cable"
"""The network interface of each host."""


class Host(NamedTuple):
    name: str
    """Name of the namespace."""
    address: str


def ip(*arguments: str) -> None:
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=60)
    if result.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {result.stderr.strip()}")


@contextlib.contextmanager
def two_hosts() -> Iterator[list[Host]]:
    if shutil.which("ip") is None:
        pytest.skip("creating network namespaces needs the ip command")
    names = [f"paceline{os.getpid()}{side}" for side in "ab"]
    net = f"10.{os.getpid() // 250 % 250}.{os.getpid() % 250}"
    hosts = [Host(name, f"{net}.{number}") for number, name in enumerate(names, 1)]
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            ip("link", "add", CABLE, "netns", names[0], "type", "veth", "peer", "name", CABLE, "netns", names[1])
            for name, address in hosts:
                ip("-n", name, "addr", "add", f"{address}/24", "dev", CABLE)
                for device in ("lo", CABLE):
                    ip("-n", name, "link", "set", device, "up")
                ip("netns", "exec", name, "true")
        except OSError as error:
            pytest.skip(f"network namespaces are not permitted here: {error}")
        yield hosts


def enter(namespace: str) -> None:
    """Enter a namespace like ``ip netns exec``, and turn warnings into errors."""
    with Path("/run/netns", namespace).open() as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    warnings.simplefilter("error")
