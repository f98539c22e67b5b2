"""The GPU of each rank, which no other rank may use."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed import Store

from paceline.errors import WorldError

_REMEDY = "or train on the CPU with CUDA_VISIBLE_DEVICES= (empty)"


def choose_gpu(rank: int, local_rank: int, visible: int) -> int:
    """Return the index of this rank's GPU among the `visible` ones.

    This is the local rank, or 0 if a scheduler makes only one GPU visible to each rank.
    """
    if local_rank < visible:
        return local_rank
    if visible == 1:
        return 0
    raise WorldError(
        f"rank {rank}: local rank {local_rank} has no GPU, because only {visible} are visible; start at most "
        f"that many ranks per host, make one GPU visible to each rank, {_REMEDY}"
    )


def gpu_name(uuid: str, environment: Mapping[str, str]) -> str:
    """Return the identity of a GPU: its UUID, plus the visible part if the GPU is divided (MIG).

    It includes the host's name in ``NCCL_HOSTID``, because NCCL lets ranks share a GPU if their host names differ.
    """
    visible, host = environment.get("CUDA_VISIBLE_DEVICES", ""), environment.get("NCCL_HOSTID")
    parts = [uuid, *([visible] if "MIG" in visible else []), *([f"of NCCL_HOSTID={host}"] if host else [])]
    return " ".join(parts)


def check_own_gpu(store: Store, rank: int, size: int, gpu: str) -> None:
    """Raise if another rank uses the GPU with this :func:`gpu_name`. All ranks call this with the same store."""
    store.set(f"gpu/{rank}", gpu)
    for peer in range(size):
        if peer != rank and store.get(f"gpu/{peer}").decode() == gpu:
            raise WorldError(
                f"rank {rank}: rank {peer} has the same GPU {gpu}, and NCCL allows one rank per GPU; start at most "
                f"as many ranks as GPUs, {_REMEDY}"
            )
