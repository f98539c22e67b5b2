"""Finds and names the ranks that did not come to a collective, or to make the process group.

After their timeout, Gloo and the store report that some rank did not come, without its name. When that happens to a
rank in a collective, it leaves a mark in the store, and looks for a moment which marks of other ranks are missing
there. Nothing is written, read or waited for while collectives succeed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from paceline.core.telemetry.spans import waiting
from paceline.core.torch_internals.distributed.c10d import PrefixStore, Store, TCPStore, get_default_store
from paceline.errors import CommunicationError, PacelineError

GRACE_S = 1.0
"""Seconds for the other ranks to report a failure, once this rank has one. They have it within a moment, because Gloo
then closes all connections at once."""
REMEDY = (
    "look for that rank's own error, and see that every rank makes the same calls; if it is only slow, give "
    "paceline.init(timeout=…) or PACELINE_TIMEOUT more seconds"
)
CONNECTION_REMEDY = (
    "look for another rank's own error; if there is none, set GLOO_SOCKET_IFNAME to a network interface through which "
    "the hosts reach each other (ip addr lists them)"
)
"""Remedy for ranks that have come but could not be connected."""
Value = TypeVar("Value", bound=Hashable)


def named_ranks(ranks: Sequence[int]) -> str:
    """Name `ranks` in a message: «rank 1», «ranks 0, 2»."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def ranks_by_value(values: Iterable[tuple[int, Value]]) -> dict[Value, list[int]]:
    """Group ranks by their values: pairs of rank and value become the ranks of each value, in their order."""
    groups: dict[Value, list[int]] = {}
    for rank, value in values:
        groups.setdefault(value, []).append(rank)
    return groups


def failed(event: str, ranks: Sequence[int], me: int, error: BaseException) -> CommunicationError:
    """Return the error of a collective of `ranks` that failed with torch's `error` on rank `me`.

    It names the ranks that did not come. Whoever took part has the same failure within a moment, so a rank that does
    not report one has ended, or is elsewhere.
    """
    reason = reason_of(error)
    try:
        store = PrefixStore("paceline/failed/", get_default_store())
        # Numbered, because marks of an earlier failure must not count for this one.
        turn = store.add(f"failures/{me}", 1)
        store.set(f"{turn}/{me}", event)
        absent = [ranks[index] for index in missing_from(store, [f"{turn}/{rank}" for rank in ranks], GRACE_S)]
    except (RuntimeError, ValueError):  # the store is lost, or torch knows no process group
        others = [rank for rank in ranks if rank != me]
        return CommunicationError(
            f"rank {me}: the {event} with {named_ranks(others)} failed ({reason}); no store is left that would tell "
            "which of them ended or did not come, so look for the first error of another rank"
        )
    if not absent:
        return CommunicationError(f"rank {me}: the {event} failed on {named_ranks(ranks)} alike ({reason}); {REMEDY}")
    return CommunicationError(
        f"rank {me}: the {event} failed, because {named_ranks(absent)} ended or did not come to it ({reason}); {REMEDY}"
    ).because_of(absent)


def failed_to_connect(me: int, size: int, error: BaseException) -> CommunicationError:
    """Return the error of a process group that torch could not make, for which all ranks had come."""
    others = named_ranks([rank for rank in range(size) if rank != me] or [me])
    return CommunicationError(
        f"rank {me}: {others} came to make the process group, but could not be connected with; {CONNECTION_REMEDY} "
        f"({reason_of(error)})"
    )


@contextmanager
def collective(event: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Replace torch's error of the block's collectives on `group` by :func:`failed`'s.

    The block must contain nothing else that raises a ``RuntimeError``.
    """
    try:
        yield
    except PacelineError:
        raise
    except RuntimeError as error:
        raise failed(event, dist.get_process_group_ranks(group), dist.get_rank(), error) from error


@contextmanager
def called_by_all(call: str) -> Iterator[None]:
    """Add to a :class:`CommunicationError` of the block that it happened in `call`, which all ranks must make."""
    try:
        yield
    except CommunicationError as error:
        message = re.sub(r"^rank \d+: ", "", str(error))
        raise CommunicationError(
            f"rank {dist.get_rank()}: in {call}, which every rank has to call: {message}"
        ).because_of(error.blamed or ()) from error


def open_store(address: str, port: int, rank: int, size: int, timeout: timedelta) -> Store:
    """Return torch's store at ``MASTER_ADDR`` and ``MASTER_PORT``, which rank 0 serves unless the launcher does."""
    place = f"{address}:{port} (MASTER_ADDR, MASTER_PORT)"
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    serves = rank == 0 and not by_launcher
    began = time.monotonic()
    try:
        # torch's rendezvous would wait for all ranks on rank 0, and after the timeout say only how many came. In torch
        # 2.15 it takes the launcher's store for another one where it is not named exactly as in the environment.
        return TCPStore(address, port, size, serves, timeout, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        if serves:
            raise CommunicationError(
                f"rank 0: the store at {place} could not be opened ({reason_of(error)}); choose a MASTER_PORT that "
                "nothing else uses, and an address of this host"
            ) from error
        server = "the launcher" if by_launcher else "rank 0"
        raise CommunicationError(
            f"rank {rank}: the store at {place}, which {server} serves, was not reached after "
            f"{time.monotonic() - began:.1f} s; see that address and port are right and not blocked, and look for the "
            f"first error of {server} ({reason_of(error)})"
        ) from error


def read_from(store: Store, key: str, me: int, other: int, timeout: timedelta) -> Any:
    """Wait until rank `other` has written `key`, and return its value."""
    try:
        if missing_from(store, [key], timeout.total_seconds()):  # faster: a FileStore's own wait looks every 10 ms
            raise late(me, {other}, timeout)
        return store.get(key)
    except CommunicationError:
        raise
    except RuntimeError as error:
        raise late(me, {other}, timeout) from error


def late(me: int, missing: Iterable[int], timeout: timedelta) -> CommunicationError:
    """Return rank `me`'s error that the ranks `missing` did not come to make the process group."""
    ranks = ", ".join(map(str, sorted(missing)))
    return CommunicationError(
        f"rank {me}: rank {ranks} did not come to make the process group within {timeout.total_seconds():g} s; {REMEDY}"
    )


def missing_from(store: Store, keys: Sequence[str], seconds: float = 0) -> list[int]:
    """Wait until all `keys` are in `store`, so many seconds at most; returns the indices of those that are not.

    ``Store.wait`` would do, but prints warnings of its own when its time is over.
    """
    if store.check(list(keys)):
        return []
    # Short naps first, for ranks that are about to come; longer ones later spare the store.
    deadline, nap = time.monotonic() + seconds, 0.0005
    with waiting():
        while not store.check(list(keys)):
            left = deadline - time.monotonic()
            if left <= 0:
                return [index for index, key in enumerate(keys) if not store.check([key])]
            time.sleep(min(nap, left))
            nap = min(nap * 1.5, 0.02)
    return []


def reason_of(error: BaseException) -> str:
    """Return the first line of torch's `error`, without the place in its sources and its advice."""
    line = (str(error).splitlines() or [""])[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).partition(" This is typically caused")[0].rstrip(".")
