"""File descriptors: how many a process group takes, and whether every rank has that many left."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence

from paceline.core.torch_internals.distributed.c10d import Store
from paceline.errors import UsageError


def needed(size: int, local: int) -> int:
    """Return how many descriptors a group of `size` ranks, `local` of them on this host, takes while it is made.

    Gloo takes a connection to every rank and some more. A peer on this host takes a pidfd, two eventfds, its memory
    (of which Python before 3.13 keeps a copy), and a socket for the handshake.
    """
    gloo, own_memory, handshake, spare = size + 4, 2, 2, 6
    return gloo + own_memory + 5 * (local - 1) + handshake + spare


def publish(store: Store, rank: int) -> None:
    """Tell the other ranks how many descriptors this one may open, and how many of them are free."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    store.set(f"descriptors/{rank}", f"{limit} {limit - _open_now()} {most}")


def check_enough(store: Store, rank: int, local: int, names: Sequence[int]) -> None:
    """Refuse, on every rank, to make a group for which a rank has too few. All ranks have called :func:`tell`.

    Args:
        store: the store that :func:`tell` wrote to.
        rank: this rank.
        local: how many ranks of the group share memory with each one, itself included.
        names: messages call rank r ``names[r]``.

    Raises:
        UsageError: names the first rank that has too few.
    """
    size = len(names)
    keys = [f"descriptors/{other}" for other in range(size)]
    entries = [store.get(key) for key in keys]
    for other, text in enumerate(entries):
        limit, free, most = map(int, text.split())
        count = needed(size, local)
        if free < count:
            # More of them will follow: each wrapper makes a group, each DataLoader worker takes some.
            advice = max(1024, 2 * (limit - free + count))
            hard = f" (the hard limit is {most})" if 0 <= most < advice else ""
            raise UsageError(
                f"rank {names[rank]}: a process group of {size} ranks takes up to {count} file descriptors, but rank "
                f"{names[other]} has {free} of its {limit} left; raise its limit with 'ulimit -n {advice}'{hard} in "
                "the shell that starts the ranks"
            )


def _open_now() -> int:
    try:
        return len(os.listdir("/dev/fd")) - 1  # without the one that lists them
    except OSError:  # not even one is left
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
