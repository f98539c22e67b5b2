"""Registers the backend's name, ``"paceline"``. The process group itself is imported on first use."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from paceline.core import OWN_BACKEND


def register() -> None:
    """Register the backend's name with torch if this has not been done yet."""
    if OWN_BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(OWN_BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any = None) -> Any:
    """Return the group for ``init_process_group("paceline")`` and ``new_group``; torch calls this."""
    # Imported here, because a script that uses another backend should not pay for the import.
    from paceline.comm.process_group import create

    names = options.global_ranks_in_group or range(options.group_size)
    # Connect now: the first delegated operation may be a send, and connecting needs all ranks.
    return create(options.store, options.group_rank, options.group_size, options.timeout, names, delegates=True)
