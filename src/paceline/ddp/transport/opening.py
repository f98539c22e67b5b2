"""Opens a wrapper's channel: the process groups for its gradients and control blocks."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from paceline.comm.own_group import open_own_group
from paceline.core.processes import OWN_BACKEND
from paceline.core.processes.missing_ranks import called_by_all, collective
from paceline.ddp.transport.channel import Channel, DeviceChannel, HostChannel
from paceline.errors import CommunicationError

if TYPE_CHECKING:
    from paceline.comm.c10d.process_group import PacelineProcessGroup

TEST_HOST_CHANNEL = "PACELINE_TEST_HOST_CHANNEL"
"""Environment variable for tests: makes ranks on CPUs open a host channel and read control blocks late, as with GPUs.
With the value ``always``, blocks are read late even after surprises."""
logger = logging.getLogger(__name__)


def open_channel(
    group: dist.ProcessGroup,
    device: torch.device,
    caller: str = "DistributedDataParallel(…)",
) -> Channel:
    """Open a channel between the ranks of `group` for gradients on `device`. All ranks call this together."""
    on_cpu = device.type == "cpu"
    # Use the group's own backend, which may differ from the default group's.
    on_nccl = device.type == "cuda" and "nccl" in str(dist.get_backend_config(group))
    backend = "nccl" if on_nccl else dist.get_backend(group)
    timeout = timeout_of(group, device)
    with called_by_all(caller), collective("connection of the ranks", group):
        own_group = open_own_group(group, backend, timeout)
        is_shared = backend == OWN_BACKEND and own_group.native
        channel: Channel
        if on_cpu and is_shared:
            from paceline.ddp.transport.shared_channel import SharedChannel

            channel = SharedChannel(group, own_group)
        elif on_cpu:
            channel = Channel(group, own_group)
        else:
            channel = DeviceChannel(group, own_group, device)
        # A Paceline group in shared memory already handles host data, so it needs no second group.
        if not on_cpu or TEST_HOST_CHANNEL in os.environ:
            channel.use_host(_open_host_channel(group, timeout, own_group if is_shared and not on_cpu else None))
    through = "shared memory" if on_cpu and is_shared else f"the group's backend, {backend}"
    logger.info("rank %d: gradients travel through %s", dist.get_rank(group), through)
    return channel


def _open_host_channel(group: dist.ProcessGroup, timeout: timedelta | None, present: Any) -> Channel:
    """Open a channel for control blocks between CPUs, using the group `present` if given."""
    own_group = present or open_host_group(group, timeout)
    logger.info(
        "rank %d: control blocks travel through %s",
        dist.get_rank(group),
        "shared memory" if own_group.native else "Gloo",
    )
    return HostChannel(group, own_group) if own_group.native else Channel(group, own_group)


def open_host_group(group: dist.ProcessGroup, timeout: timedelta | None) -> PacelineProcessGroup:
    """Open a group with the ranks of `group` for host data, using shared memory, or Gloo between hosts."""
    try:
        own_group: PacelineProcessGroup = open_own_group(group, OWN_BACKEND, timeout)
    except CommunicationError as error:
        raise CommunicationError(
            "with gradients on GPUs, ranks exchange control blocks between their CPUs, which requires Gloo over TCP "
            f"between hosts, even if the world was initialized with NCCL alone: {error}"
        ).because_of(error.blamed or ()) from error
    return own_group


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the group's timeout, which groups created from it do not inherit."""
    if dist.get_backend(group) == OWN_BACKEND:
        return cast("PacelineProcessGroup", group).timeout
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None
