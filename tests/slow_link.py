"""A slow link between two hosts: 100 Mbit/s and a round trip of 20 ms, which can be cut. Requires root.

with two_hosts() as hosts, SlowLink(hosts) as link:
    Forked(…, first=partial(enter, hosts[0].name), GLOO_SOCKET_IFNAME=SLOW)     master address: link.addresses[0]
    link.cut(30)

    host a, device "slow" ─► tbf, 100 Mbit/s ─┐         ┌─► queue, 10 ms ─► device "slow", host b
                                              ├─ relay ─┤
    host b, device "slow" ─► tbf, 100 Mbit/s ─┘         └─► queue, 10 ms ─► device "slow", host a

The usual tool for delays is netem, a module that many kernels lack. Here, the link is a TUN device on each host, and
the relay, a process outside both hosts, reads every IP packet from one device and writes it to the other 10 ms later.
Programs on the hosts need no change. `tc` limits the rate at each device. The hosts' fast cable stays as it is.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from namespaces import Host, enter, ip

SLOW = "slow"
"""The network interface of each host."""
MBIT = 100
ROUND_TRIP_S = 0.02
MTU = 9000
"""Size of the largest packet: jumbo frames, because every packet costs the relay the same CPU time."""
QUEUE_S = 0.05
"""Longest time that a packet waits to be sent; `tc` drops the packets after it."""
TICK_S = 0.0005
"""Packets due within this time leave together, which halves the relay's CPU time."""
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h


class SlowLink:
    """Joins two hosts by a slow link until the end of the block."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = hosts
        self.addresses = [f"192.168.7.{number}" for number, _ in enumerate(hosts, 1)]

    def __enter__(self) -> SlowLink:
        self._relay = subprocess.Popen(
            [sys.executable, __file__, *(host.name for host in self.hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._orders = self._relay.stdin
        try:
            assert self._relay.stdout.readline() == "ready\n", "the relay could not create its devices"
            shape = f"rate {MBIT}mbit burst {2 * MTU} latency {1e3 * QUEUE_S:g}ms"
            for host, address in zip(self.hosts, self.addresses, strict=True):
                ip("-n", host.name, "addr", "add", f"{address}/24", "dev", SLOW)
                ip("-n", host.name, "link", "set", SLOW, "mtu", str(MTU), "up")
                tc = ["tc", "-n", host.name, "qdisc", "add", "dev", SLOW, "root", "tbf", *shape.split()]
                subprocess.run(tc, check=True, timeout=60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._relay.kill()
        self._relay.communicate()

    def cut(self, seconds: float) -> None:
        """Start to lose all packets in both directions for some seconds; return at once.

        TCP doubles its pause after each lost retry, so a connection recovers up to twice as long after the cut began.
        """
        self._orders.write(f"{seconds}\n")

    def cpu_seconds(self) -> float:
        """Return the CPU time that the relay has used, including the kernel's part."""
        user, system = Path(f"/proc/{self._relay.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def has_netem() -> bool:
    """Return whether this kernel could delay packets itself."""
    name = f"netem{os.getpid()}"
    ip("netns", "add", name)
    try:
        tc = ["tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "10ms"]
        return subprocess.run(tc, capture_output=True, timeout=60).returncode == 0
    finally:
        ip("netns", "del", name)


def tun(host: str) -> int:
    """Enter a host, create its device, and return the device's file descriptor, which works outside the host too."""
    enter(host)
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", SLOW.encode(), IFF_TUN | IFF_NO_PI))
    return file


def relay(hosts: Sequence[str]) -> None:
    """Forward packets until stdin closes. A line on stdin says how many seconds to lose all packets."""
    os.setpriority(os.PRIO_PROCESS, 0, -20)  # because a link does not slow down when the hosts are busy
    orders = sys.stdin.fileno()
    ends = [tun(host) for host in hosts]
    ways = [(ends[0], ends[1], deque[tuple[float, bytes]]()), (ends[1], ends[0], deque[tuple[float, bytes]]())]
    print("ready", flush=True)
    cut_until = 0.0
    while True:
        heads = [queue[0][0] for _, _, queue in ways if queue]
        pause = max(TICK_S, min(heads) - time.monotonic()) if heads else None
        readable, _, _ = select.select([orders, *ends], [], [], pause)
        now = time.monotonic()
        if orders in readable:
            line = os.read(orders, 100)
            if not line:
                return
            cut_until = now + float(line.split()[-1])
        for source, target, queue in ways:
            while source in readable:
                try:
                    packet = os.read(source, MTU)
                except BlockingIOError:
                    break
                if now >= cut_until:
                    queue.append((now + ROUND_TRIP_S / 2, packet))
            while queue and queue[0][0] <= now:
                packet = queue.popleft()[1]
                if now >= cut_until:
                    with suppress(OSError):  # the device is not up yet, or the host's memory for packets is used up
                        os.write(target, packet)


if __name__ == "__main__":
    relay(sys.argv[1:])
