"""Shares the cause of a failed start between hosts, through the rendezvous store."""

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
"""How long a host waits for another host to publish the cause, and for the other hosts to read it, in seconds."""
CAUSE, READ = "cause", "read"


@dataclass(frozen=True)
class HostEnds:
    """How the ranks of a host ended. Tracebacks are left out, because only that host shows them."""

    host: str
    ends: Sequence[End]


def is_known(ends: Sequence[End]) -> bool:
    """Return whether `ends` include the cause, and not just consequences of another host's failure."""
    failed = failures(ends)
    return bool(failed) and (failed[0].suspicion < LOST_A_PEER or bool(missed(ends)))


def publish(store: Store, ends: Sequence[End]) -> None:
    """Publish the cause, unless another host has done so."""
    store.compare_set(CAUSE, "", encoded(HostEnds(socket.gethostname(), ends)))


def published(store: Store, seconds: float = 0.0) -> HostEnds | None:
    """Wait up to `seconds` for the cause to be published, and return it; None if no host publishes one."""
    deadline = time.monotonic() + seconds
    while not store.check([CAUSE]):
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.05)
    return decoded(store.get(CAUSE))


def leave_together(store: Store, hosts: int) -> None:
    """Wait up to :data:`HEAR_S` until all `hosts` have read the cause, because the store exits with its host."""
    deadline = time.monotonic() + HEAR_S
    read = store.add(READ, 1)
    while read < hosts and time.monotonic() < deadline:
        time.sleep(0.05)
        read = store.add(READ, 0)


def place(store: Store, turn: int) -> Store:
    """Return the section of `store` for one start of the ranks."""
    return PrefixStore(f"paceline/{turn}/", store)


def encoded(cause: HostEnds) -> str:
    """Encode `cause` as text for the store."""
    ends = [replace(end, record=end.record and replace(end.record, trace=""), state=None) for end in cause.ends]
    return json.dumps({"host": cause.host, "ends": [asdict(end) for end in ends]})


def decoded(text: bytes | str) -> HostEnds | None:
    """Decode text from :func:`encoded`; return None for other text, because any host can write to the store."""
    try:
        note = json.loads(text)
        return HostEnds(str(note["host"]), [_end(values) for values in note["ends"]])
    except (ValueError, KeyError, TypeError):
        return None


def _end(values: dict[str, object]) -> End:
    record = values.pop("record")
    if isinstance(record, dict):
        blamed = record.pop("blamed")
        values["record"] = Record(**record, blamed=None if blamed is None else tuple(blamed))
    return End(**values)  # type: ignore[arg-type]
