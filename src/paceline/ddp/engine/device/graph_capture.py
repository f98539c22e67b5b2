"""Capture of a step in a CUDA graph. Features that a graph cannot replay are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.ddp.engine.parts import EngineParts


CHECK_FINITE = "check_finite=True, which the host reads"


def is_capturing(device: torch.device) -> bool:
    """Return whether operations on `device` are captured in a CUDA graph rather than run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_capturable(parts: EngineParts) -> None:
    """Refuse to have a backward captured that does more than a graph replays, which are operations of the device.

    Raises:
        UsageError: for the first such thing; names it.
    """
    unfit = {
        CHECK_FINITE: parts.check_finite,
        "check_replicas_every, which the host compares": parts.replica_check is not None,
        "model.weight(), whose sum over the ranks would stay that of this step": parts.ledger.is_weight_pending,
        "join(), in which ranks take part by turns": parts.join.is_active,
        "sparse gradients, whose size the host reads": bool(parts.storage.unbucketed),
        "a communication hook or compressor, or scattered gradients, for which the host works": (
            not parts.finisher.is_capturable
        ),
        "the wrapper's first steps, which find the order of the gradients": not parts.arrivals.order_known,
    }
    for name, is_used in unfit.items():
        if is_used:
            raise cannot_capture(name, parts.channel.rank)


def cannot_capture(name: str, rank: int) -> UsageError:
    """Return the error for something that is in a step and that a CUDA graph cannot capture."""
    return UsageError(
        f"rank {rank}: a CUDA graph cannot capture {name}; leave it out, or train this step without a graph; "
        "docs/nccl.md has the rules"
    )
