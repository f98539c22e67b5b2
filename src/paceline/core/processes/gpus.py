"""Chooses the GPU of a rank, and refuses a GPU that two ranks have."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.torch_internals.distributed.c10d import Store
from paceline.errors import WorldError

_REMEDY = "or train on the CPU with CUDA_VISIBLE_DEVICES= (empty)"


def choose_gpu(rank: int, local_rank: int, visible: int) -> int:
    """Return the index of this rank's GPU among the `visible` ones.

    It is the local rank's, or the only one where a scheduler shows each rank its own GPU alone.
    """
    if local_rank < visible:
        return local_rank
    # Such a scheduler numbers the GPU 0 in each process.
    if visible == 1:
        return 0
    raise WorldError(
        f"rank {rank}: local rank {local_rank} has no GPU of its own, as {visible} are visible; start at most that "
        f"many ranks on a host, show each rank one GPU alone, {_REMEDY}"
    )


def gpu_name(uuid: str, environment: Mapping[str, str]) -> str:
    """Return the identity of a GPU: its UUID, and which part of it is visible if it is divided (MIG).

    A host's name in ``NCCL_HOSTID`` is part of it: NCCL allows ranks to share a GPU that it takes to be on different
    hosts, and sends through sockets then.
    """
    visible, host = environment.get("CUDA_VISIBLE_DEVICES", ""), environment.get("NCCL_HOSTID")
    parts = [uuid, *([visible] if "MIG" in visible else []), *([f"of NCCL_HOSTID={host}"] if host else [])]
    return " ".join(parts)


def check_own_gpu(store: Store, rank: int, size: int, gpu: str) -> None:
    """Refuse a GPU, given by its :func:`gpu_name`, that another rank has, too. All ranks call this, with one store."""
    store.set(f"gpu/{rank}", gpu)
    for other in range(size):
        if other != rank and store.get(f"gpu/{other}").decode() == gpu:
            raise WorldError(
                f"rank {rank}: rank {other} has the same GPU {gpu}, and NCCL takes one rank a GPU; start at most as "
                f"many ranks as there are GPUs, {_REMEDY}"
            )
