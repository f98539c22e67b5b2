"""Two hosts in tests: network namespaces of this one, joined by a cable."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from processes import TIMEOUT_S


def ip(*arguments: str) -> None:
    """Run the command ``ip``."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def two_hosts() -> Iterator[list[tuple[str, str]]]:
    """Make two network namespaces with a device ``cable`` between them: (namespace, address) of each."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command to make network namespaces with")
    names = [f"paceline{os.getpid()}{side}" for side in "ab"]
    net = f"10.{os.getpid() // 250 % 250}.{os.getpid() % 250}"
    addresses = [f"{net}.1", f"{net}.2"]
    with ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
            for name, address in zip(names, addresses, strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
                for device in ("lo", "cable"):
                    ip("-n", name, "link", "set", device, "up")
                ip("netns", "exec", name, "true")
        except OSError as error:
            pytest.skip(f"network namespaces are not permitted here: {error}")
        yield list(zip(names, addresses, strict=True))


def enter(namespace: str) -> None:
    """Go where ``ip netns exec`` goes."""
    with Path("/run/netns", namespace).open() as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
