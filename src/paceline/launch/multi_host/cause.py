"""The cause of a failed start, which the host that knows it tells the others through the store of the rendezvous."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from paceline.core.torch_internals.distributed.c10d import PrefixStore, Store
from paceline.launch.failures.root_cause import LOST_A_PEER, End, failures, missed
from paceline.launch.rank.failure_record import Record

HEAR_S = 5.0
"""How long a host waits for another one to tell the cause, and for the others to read it before it leaves."""
CAUSE, READ = "cause", "read"


@dataclass(frozen=True)
class Told:
    """How the ranks of a host ended, without tracebacks, which that host shows itself."""

    host: str
    ends: Sequence[End]


def is_known(ends: Sequence[End]) -> bool:
    """Return whether the cause is among `ends`, which may all be consequences of another host's failure."""
    failed = failures(ends)
    return bool(failed) and (failed[0].suspicion < LOST_A_PEER or bool(missed(ends)))


def tell(store: Store, ends: Sequence[End]) -> None:
    """Tell the other hosts the cause, unless another host has done so first."""
    store.compare_set(CAUSE, "", encoded(Told(socket.gethostname(), ends)))


def heard(store: Store, seconds: float = 0.0) -> Told | None:
    """Return what a host has told, waiting for it so many seconds at most; None if nobody has."""
    deadline = time.monotonic() + seconds
    while not store.check([CAUSE]):
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.05)
    return decoded(store.get(CAUSE))


def leave_together(store: Store, hosts: int) -> None:
    """Wait until all `hosts` have read the cause, but not for long; the store ends with the host that keeps it."""
    deadline = time.monotonic() + HEAR_S
    read = store.add(READ, 1)
    while read < hosts and time.monotonic() < deadline:
        time.sleep(0.05)
        read = store.add(READ, 0)


def place(store: Store, turn: int) -> Store:
    """Return the part of `store` for the start of the ranks with this number."""
    return PrefixStore(f"paceline/{turn}/", store)


def encoded(told: Told) -> str:
    """Return `told` as text for the store."""
    ends = [replace(end, record=end.record and replace(end.record, trace=""), state=None) for end in told.ends]
    return json.dumps({"host": told.host, "ends": [asdict(end) for end in ends]})


def decoded(text: bytes | str) -> Told | None:
    """Return what :func:`encoded` wrote; None for anything else, since whoever reaches the store may write to it."""
    try:
        note = json.loads(text)
        return Told(str(note["host"]), [_end(values) for values in note["ends"]])
    except (ValueError, KeyError, TypeError):
        return None


def _end(values: dict[str, object]) -> End:
    record = values.pop("record")
    if isinstance(record, dict):
        blamed = record.pop("blamed")
        values["record"] = Record(**record, blamed=None if blamed is None else tuple(blamed))
    return End(**values)  # type: ignore[arg-type]
