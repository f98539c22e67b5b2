"""A Gloo group among ranks that have all come, whose failures to connect name ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

from paceline.comm.gloo_visitors import find_stranger, own_sockets
from paceline.core.processes.missing_ranks import CONNECTION_REMEDY, GRACE_S, missing_from, named_ranks, reason_of
from paceline.core.processes.private_store import is_private
from paceline.core.torch_internals.distributed.c10d import ProcessGroupGloo, Store
from paceline.errors import CommunicationError


def connect_gloo(store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int]) -> ProcessGroupGloo:
    """Connect this rank with the others; all call this together. Messages call rank r ``names[r]``.

    Raises:
        CommunicationError: if that fails; names the ranks that got no further either, or else that ended. On one host
            also if another user's process has connected to Gloo.
    """
    try:
        before = own_sockets()
        group = ProcessGroupGloo(store, rank, size, timeout)
        if size > 1 and is_private(store):  # on one host
            _check_no_stranger(own_sockets() - before, names[rank])
        store.set(f"connected/{rank}", "")
        return group
    except CommunicationError:
        store.set(f"connected/{rank}", "failed")
        raise
    except RuntimeError as error:
        try:
            store.set(f"connected/{rank}", "failed")
            absent = [names[index] for index in missing_from(store, [f"connected/{r}" for r in range(size)], GRACE_S)]
        except RuntimeError:
            absent = []  # the store is gone
        others = named_ranks(absent or [name for name in names if name != names[rank]])
        reason = "ended meanwhile, or is stuck" if absent else "cannot be reached, or failed as well"
        raise CommunicationError(
            f"rank {names[rank]}: Gloo could not connect with {others} within {timeout.total_seconds():g} s, which "
            f"{reason} ({reason_of(error)}); {CONNECTION_REMEDY}"
        ).because_of(absent) from error


def _check_no_stranger(sockets: set[int], name: int) -> None:
    stranger = find_stranger(sockets, os.geteuid())
    if stranger is not None:
        port, user = stranger
        who = f"by user {user}" if user >= 0 else "by a process that has ended"
        raise CommunicationError(
            f"rank {name}: Gloo's port {port} was connected to {who} while the process group was made, and may take it "
            "for a rank; if no rank has failed, find out who that is, and start again"
        )
