"""Errors that name the ranks missing from a collective or from the creation of the process group.

After a timeout, Gloo and the store do not report which rank was missing. A rank whose collective fails therefore leaves
a mark in the store and waits briefly for the marks of the other ranks. Successful collectives do not use the store.

Three other modules name missing ranks: ``comm/shm_engine.py`` in a collective in shared memory, ``comm/gloo.py`` while
connecting, and ``checkpoint/rank_states.py`` at an optimizer step.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import groupby
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from paceline.core.host import reached
from paceline.core.spans import waiting
from paceline.core.torch_distributed import get_default_store
from paceline.errors import CommunicationError, PacelineError

GRACE_S = 1.0
"""Seconds to wait for other ranks to report the same failure. They fail almost immediately, because Gloo closes all
connections."""
REMEDY = (
    "see the error of that rank, and check that every rank makes the same calls; if it is only slow, raise "
    "paceline.init(timeout=…) or PACELINE_TIMEOUT"
)
CONNECTION_REMEDY = (
    "see the errors of the other ranks; if there are none, set GLOO_SOCKET_IFNAME to the network interface between "
    "the hosts (ip addr lists them)"
)
"""Remedy for ranks that arrived but could not be connected."""
Value = TypeVar("Value", bound=Hashable)


def named_ranks(ranks: Sequence[int]) -> str:
    """Return the text ``rank 1``, ``ranks 0, 2`` or ``ranks 0–3, 7``."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    names = [f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"


def ranks_by_value(values: Iterable[tuple[int, Value]]) -> dict[Value, list[int]]:
    """Group ranks by value, given pairs of rank and value."""
    groups: dict[Value, list[int]] = {}
    for rank, value in values:
        groups.setdefault(value, []).append(rank)
    return groups


def failed(event: str, ranks: Sequence[int], me: int, error: BaseException) -> CommunicationError:
    """Return the error to raise for a collective of `ranks` that failed with torch's `error` on rank `me`.

    It names the missing ranks. All ranks that joined the collective fail almost immediately, so a rank without a report
    has ended or called something else.
    """
    reason = reason_of(error)
    try:
        store = PrefixStore("paceline/failed/", get_default_store())
        # Numbered, so that marks of an earlier failure do not count.
        turn = store.add(f"failures/{me}", 1)
        store.set(f"{turn}/{me}", event)
        absent = [ranks[index] for index in missing_from(store, [f"{turn}/{rank}" for rank in ranks], GRACE_S)]
    except (RuntimeError, ValueError):  # the store is lost, or torch has no process group
        others = [rank for rank in ranks if rank != me]
        return CommunicationError(
            f"rank {me}: the {event} with {named_ranks(others)} failed ({reason}), and the store that would "
            "name the missing rank is lost; see the first error of another rank"
        )
    if not absent:
        return CommunicationError(f"rank {me}: the {event} failed on all of {named_ranks(ranks)} ({reason}); {REMEDY}")
    return CommunicationError(
        f"rank {me}: the {event} failed, because {named_ranks(absent)} ended or did not arrive ({reason}); {REMEDY}"
    ).because_of(absent)


def failed_to_connect(me: int, size: int, error: BaseException) -> CommunicationError:
    """Return the error for a process group that torch could not create although all ranks arrived."""
    others = named_ranks([rank for rank in range(size) if rank != me] or [me])
    return CommunicationError(
        f"rank {me}: {others} arrived to create the process group but could not be connected ({reason_of(error)}); "
        f"{reached(error) or CONNECTION_REMEDY}"
    )


@contextmanager
def collective(event: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """If a collective on `group` fails in the block, replace torch's error with that of :func:`failed`.

    No other code in the block may raise a ``RuntimeError``.
    """
    try:
        yield
    except PacelineError:
        raise
    except RuntimeError as error:
        raise failed(event, dist.get_process_group_ranks(group), dist.get_rank(), error) from error


@contextmanager
def called_by_all(call: str) -> Iterator[None]:
    """Add `call`, which all ranks must make, to the message of a :class:`CommunicationError` from the block."""
    try:
        yield
    except CommunicationError as error:
        message = re.sub(r"^rank \d+: ", "", str(error))
        raise CommunicationError(
            f"rank {dist.get_rank()}: in {call}, which every rank must call: {message}"
        ).because_of(error.blamed or ()) from error


def open_store(address: str, port: int, rank: int, size: int, timeout: timedelta) -> Store:
    """Return torch's store at ``MASTER_ADDR`` and ``MASTER_PORT``, which rank 0 serves unless the launcher does."""
    place = f"{address}:{port} (MASTER_ADDR, MASTER_PORT)"
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    serves = rank == 0 and not by_launcher
    began = time.monotonic()
    try:
        # On rank 0, torch's rendezvous would wait for all ranks and report only how many arrived. In torch 2.15 it
        # recognizes the launcher's store only if the address is spelled exactly as in the environment.
        return TCPStore(address, port, size, serves, timeout, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        if serves:
            raise CommunicationError(
                f"rank 0: the store at {place} could not be opened ({reason_of(error)}); set MASTER_PORT to a free "
                "port, and MASTER_ADDR to an address of this host"
            ) from error
        server = "the launcher" if by_launcher else "rank 0"
        raise CommunicationError(
            f"rank {rank}: the store at {place}, which {server} serves, was not reached after "
            f"{time.monotonic() - began:.1f} s ({reason_of(error)}); check address, port and firewall, and see the "
            f"first error of {server}"
        ) from error


def read_from(store: Store, key: str, me: int, peer: int, timeout: timedelta) -> Any:
    """Wait until rank `peer` has written `key`, and return its value."""
    try:
        if missing_from(store, [key], timeout.total_seconds()):  # faster than FileStore's wait, which polls every 10 ms
            raise late(me, {peer}, timeout)
        return store.get(key)
    except CommunicationError:
        raise
    except RuntimeError as error:
        raise late(me, {peer}, timeout) from error


def late(me: int, missing: Collection[int], timeout: timedelta) -> CommunicationError:
    """Return the error for rank `me` if ranks did not arrive to create the process group; `missing` may be empty."""
    who = f"{named_ranks(sorted(missing))} did not arrive" if missing else "not every rank arrived"
    return CommunicationError(
        f"rank {me}: {who} to create the process group within {timeout.total_seconds():g} s; {REMEDY}"
    )


def missing_from(store: Store, keys: Sequence[str], seconds: float = 0) -> list[int]:
    """Wait at most `seconds` until all `keys` are in `store`; return the indices of the missing keys.

    Unlike ``Store.wait``, it prints no warnings at the timeout.
    """
    if store.check(list(keys)):
        return []
    # Sleep briefly at first, for ranks that are about to arrive, and longer later, to reduce the load on the store.
    deadline, nap = time.monotonic() + seconds, 0.0005
    with waiting():
        while not store.check(list(keys)):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return [index for index, key in enumerate(keys) if not store.check([key])]
            time.sleep(min(nap, remaining))
            nap = min(nap * 1.5, 0.02)
    return []


def reason_of(error: BaseException) -> str:
    """Return the first line of torch's `error`, or its class, without source location and advice."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).partition(" This is typically caused")[0].rstrip(".")
