"""The name of the backend, ``"paceline"``, in torch's list. Its process group is imported when one is made."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

NAME = "paceline"


def register() -> None:
    """Make the backend's name known to torch. Harmless when it is known already."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any = None) -> Any:
    """Make the group for ``init_process_group("paceline")`` and ``new_group``; torch calls this."""
    from paceline.comm.c10d.process_group import create

    return create(options)
