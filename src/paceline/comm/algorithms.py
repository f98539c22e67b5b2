"""The algorithms as functions. As in torch.distributed, they work in place and all ranks call them.

Before sending any data, the ranks exchange their arguments (algorithm, number of elements, dtype, reduction, root) in
one small all-gather. A mismatch is therefore an error on every rank and never a hang.

Each function takes a contiguous tensor of any shape and raises

    UsageError          for a tensor that is not contiguous, a reduction that the dtype does not support, a root outside
                        the group, and on a rank that is not in the group
    DesyncError         if the ranks' arguments differ, or if another rank raised UsageError
    CommunicationError  if a rank ended or did not arrive in time
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.comm.algorithms.execute import execute
from paceline.comm.algorithms.participants import Members
from paceline.comm.algorithms.schedule import bounds
from paceline.comm.algorithms.schedules import build
from paceline.comm.arithmetic import supports
from paceline.comm.shm.header import DTYPES
from paceline.comm.topology import host_number
from paceline.core.processes.missing_ranks import named_ranks
from paceline.errors import UsageError

SUM = ReduceOp.SUM


def linear_broadcast(tensor: Tensor, *, src: int = 0, group: Any = None) -> None:
    """Copy rank `src`'s tensor to each rank in turn: p−1 steps of n bytes. `src` is a global rank."""
    _run("linear_broadcast", tensor, group, root=("src", src))


def tree_broadcast(tensor: Tensor, *, src: int = 0, group: Any = None) -> None:
    """Copy rank `src`'s tensor to every rank along a binomial tree: ⌈log₂ p⌉ steps of n bytes."""
    _run("tree_broadcast", tensor, group, root=("src", src))


def scatter_all_gather_broadcast(tensor: Tensor, *, src: int = 0, group: Any = None) -> None:
    """Copy rank `src`'s tensor to every rank in pieces: ⌈log₂ p⌉ + p−1 steps, under 2 n bytes (van de Geijn)."""
    _run("scatter_all_gather_broadcast", tensor, group, root=("src", src))


def linear_reduce(tensor: Tensor, *, dst: int = 0, op: ReduceOp.RedOpType = SUM, group: Any = None) -> None:
    """Reduce all tensors into rank `dst`'s tensor, one by one: p−1 steps of n bytes. Other tensors do not change."""
    _run("linear_reduce", tensor, group, op, root=("dst", dst))


def tree_reduce(tensor: Tensor, *, dst: int = 0, op: ReduceOp.RedOpType = SUM, group: Any = None) -> None:
    """Reduce all tensors into rank `dst`'s tensor along a binomial tree: ⌈log₂ p⌉ steps of n bytes.

    Afterwards the other ranks' tensors hold partial sums.
    """
    _run("tree_reduce", tensor, group, op, root=("dst", dst))


def ring_reduce_scatter(tensor: Tensor, *, op: ReduceOp.RedOpType = SUM, group: Any = None) -> Tensor:
    """Reduce all tensors; each rank gets its own chunk of the result: p−1 steps, (p−1)/p · n bytes.

    Returns:
        This rank's chunk, a flat view of `tensor`: elements ``n·r // p`` up to ``n·(r+1) // p`` for rank r of the
        group. The rest of `tensor` holds partial sums afterwards.
    """
    return _run("ring_reduce_scatter", tensor, group, op)


def ring_all_gather(tensor: Tensor, *, group: Any = None) -> None:
    """Copy every rank's chunk, as left by :func:`ring_reduce_scatter`, to all ranks: p−1 steps, (p−1)/p · n bytes."""
    _run("ring_all_gather", tensor, group)


def ring_all_reduce(tensor: Tensor, *, op: ReduceOp.RedOpType = SUM, group: Any = None) -> None:
    """All-reduce in a ring: 2 (p−1) steps, 2 (p−1)/p · n bytes (Patarasuk & Yuan 2009)."""
    _run("ring_all_reduce", tensor, group, op)


def tree_all_reduce(tensor: Tensor, *, op: ReduceOp.RedOpType = SUM, group: Any = None) -> None:
    """All-reduce in a binomial tree, to the first rank and back: 2 ⌈log₂ p⌉ steps of n bytes."""
    _run("tree_all_reduce", tensor, group, op)


def halving_doubling_all_reduce(tensor: Tensor, *, op: ReduceOp.RedOpType = SUM, group: Any = None) -> None:
    """All-reduce by halving and doubling: about 2 log₂ p steps, 2 (p−1)/p · n bytes (Rabenseifner 2004)."""
    _run("halving_doubling_all_reduce", tensor, group, op)


def hierarchical_all_reduce(
    tensor: Tensor,
    *,
    op: ReduceOp.RedOpType = SUM,
    group: Any = None,
    hosts: Sequence[Hashable] | None = None,
) -> None:
    """All-reduce in rings: within hosts, across hosts, and within hosts again.

    Args:
        hosts: the host of each rank of the group; by default the ranks exchange their hosts.
    """
    _run("hierarchical_all_reduce", tensor, group, op, hosts=hosts)


def _run(
    name: str,
    tensor: Tensor,
    group: Any,
    op: ReduceOp.RedOpType = SUM,
    *,
    root: tuple[str, int] | None = None,
    hosts: Sequence[Hashable] | None = None,
) -> Tensor:
    """Check the call, build the schedule and execute it; return the part of the tensor that holds the result.

    `root` is the name and the value of the argument that gives a root's global rank.
    """
    members = Members(group)
    problem = _problem(name, tensor, op, root, members)
    # A rank with invalid arguments also takes part; otherwise the other ranks would wait for it. Exchange on the
    # tensor's device if possible: the other ranks' tensors are probably there, and other backends would not reach them.
    device = tensor.device if members.carries(tensor.device) else torch.device("cpu")
    host = host_number(members.rank, members.size) if name == "hierarchical_all_reduce" else 0
    found = members.agree("" if problem else _description(name, tensor, op, root), host, device)
    if problem is not None:
        raise problem
    place = 0 if root is None else members.world_ranks.index(root[1])
    schedule = build(name, members.size, place, found if hosts is None else hosts)
    flat = tensor.detach().view(-1)
    # torch refuses to write to inference tensors outside inference mode, and to save other tensors for backward inside.
    with torch.inference_mode(tensor.is_inference()):
        execute(schedule, flat, members, op)
        if schedule.result == "reduce-scatter":
            flat = flat[bounds(flat.numel(), schedule.chunks, members.rank)]
        # Scale only on ranks that have the result, because linear_reduce() leaves the other ranks' tensors unchanged.
        if op is ReduceOp.AVG and schedule.root in (None, members.rank):
            flat.mul_(1 / members.size)
    return flat


def _description(name: str, tensor: Tensor, op: ReduceOp.RedOpType, root: tuple[str, int] | None) -> str:
    """Describe a call; the ranks compare the descriptions."""
    text = f"{name} of {tensor.numel()} × {_name(tensor.dtype)}"
    if "reduce" in name:
        text += f" by {_name(op)}"
    return text if root is None else f"{text} with {root[0]}={root[1]}"


def _name(value: torch.dtype | ReduceOp.RedOpType) -> str:
    return str(value).rpartition(".")[2]


def _problem(
    name: str, tensor: Tensor, op: ReduceOp.RedOpType, root: tuple[str, int] | None, members: Members
) -> UsageError | None:
    """Return the error for an invalid argument on this rank; None if all are valid."""
    where = f"{name} on {members.name}"
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return UsageError(
            f"{where}: the tensor of shape {tuple(tensor.shape)} is not contiguous; pass tensor.contiguous()"
        )
    if not members.carries(tensor.device):
        return UsageError(f"{where}: the group has no backend that sends tensors on {tensor.device}; use another group")
    if tensor.is_conj() or tensor.is_neg():
        return UsageError(f"{where}: the tensor is a conjugate or negative view; pass tensor.resolve_conj().clone()")
    if tensor.dtype not in DTYPES or not supports(op, tensor.dtype):
        return UsageError(f"{where}: {_name(op)} of {_name(tensor.dtype)} is not supported; use another op or dtype")
    if root is not None and root[1] not in members.world_ranks:
        return UsageError(
            f"{root[0]}={root[1]} is not a rank of the group, which has {named_ranks(members.world_ranks)}; "
            "pass one of these"
        )
    return None
