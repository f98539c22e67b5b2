"""The agreement of all ranks on parameters that their modules got after they were wrapped.

A rank that finds other parameters in its module as a synchronized backward begins first runs a round of that backward's
collectives with zeros, and says so in its control block. If all ranks do, they compare names, shapes, dtypes and the
new values, and each rebuilds its buckets. A rank without a change meets the round in its own backward, so a change on
one rank alone is an error on all of them and leaves no rank waiting.
"""

from __future__ import annotations

import torch

from paceline.ddp.consistency.initial_sync import check_same_change
from paceline.ddp.consistency.module_changes import Change
from paceline.ddp.options.module_checks import check_averaged
from paceline.ddp.transport.channel import Channel
from paceline.ddp.transport.finisher import AllReduce, Finisher
from paceline.errors import UsageError


def find_refusal(change: Change, channel: Channel, finisher: Finisher, device: torch.device) -> UsageError | None:
    """Return the error for a `change` that is not the same on all ranks or cannot be taken in; called by all ranks."""
    try:
        check_same_change(channel, change.named, change.new)
        check_averaged(change.named)
    except UsageError as error:
        return error
    if not isinstance(finisher, AllReduce):
        return UsageError(
            f"parameters such as {change.new[0][0]!r} were added to the module after a communication hook was "
            "registered, whose state may not fit them; wrap the module again and register the hook with the new wrapper"
        )
    devices = sorted({str(parameter.device) for _, parameter in change.named} | {str(device)})
    if len(devices) > 1:
        return UsageError(
            f"parameters of the module were moved to another device or added there after it was wrapped "
            f"({', '.join(devices)}); move the whole module to one device and wrap it again"
        )
    return None
