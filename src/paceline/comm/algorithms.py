"""Collective algorithms as functions. As in torch.distributed, they work in place and all ranks call them.

Before sending any data, the ranks exchange their arguments (algorithm, number of elements, dtype, reduction, root) in
one small all-gather. A mismatch is therefore an error on every rank and never a hang.

Each function takes a contiguous tensor of any shape and raises

    UsageError          for a tensor that is not contiguous, a reduction that the dtype does not support, a root outside
                        the group, and on a rank that is not in the group
    DesyncError         if the ranks' arguments differ, or if another rank raised UsageError
    CommunicationError  if a rank ended or did not arrive in time

To add an algorithm, write its schedule and name it in :mod:`paceline.comm.schedules`, and give it a function here. For
``paceline bench``, name it in ``tools/bench/measure.py``. For ``paceline explain``, name it in
``tools/explain/explain_command.py``, and say what to watch in ``HINTS`` of ``tools/explain/collectives.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.comm.arithmetic import reduce_into, supports
from paceline.comm.operation_header import DTYPES
from paceline.comm.schedules import Schedule, Transfer, bounds, build
from paceline.comm.topology import host_number
from paceline.core.missing_ranks import failed, named_ranks, ranks_by_value
from paceline.core.torch_distributed import get_default_group, get_known_groups
from paceline.errors import DesyncError, PacelineError, UsageError, WorldError

SUM = ReduceOp.SUM
TAG = 5202
"""Tag that separates our messages from the user's own sends on the same group."""
_CALL_BYTES = 256
"""Size of a rank's description of its call, padded with zeros."""


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
    tensor: Tensor, *, op: ReduceOp.RedOpType = SUM, group: Any = None, hosts: Sequence[Hashable] | None = None
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


def execute(schedule: Schedule, flat: Tensor, members: Members, op: ReduceOp.RedOpType = ReduceOp.SUM) -> None:
    """Execute this rank's part of `schedule` in place on a flat contiguous tensor. All members call this together.

    A message to be added is received into a scratch tensor, and a message to be copied is received directly into its
    destination. For an average, the caller scales the sum.

    All messages of a step are sent at the same time. Splitting them, to add one piece while the next is being sent,
    does not help: with 2 ranks on 2 cores and 25 MB over Gloo, the ring took 22.5 ms with whole messages and 22.7 to
    24.9 ms with pieces of 256 KB to 8 MB, because the cores are busy copying in both cases.
    """
    members.guard(schedule.name, lambda: _execute(schedule, flat, members, op))


def _execute(schedule: Schedule, flat: Tensor, members: Members, op: ReduceOp.RedOpType) -> None:
    def part(transfer: Transfer) -> Tensor:
        return flat[bounds(flat.numel(), schedule.chunks, transfer.chunks.start, transfer.chunks.stop)]

    messages = (transfer for step in schedule.steps for transfer in step if transfer.dst == members.rank)
    summed = [part(transfer).numel() for transfer in messages if transfer.reduce]
    # One tensor is enough for all steps, because each step adds its messages before the next one receives.
    scratch = torch.empty(max(summed, default=0), dtype=flat.dtype, device=flat.device)
    for sent, received in schedule.of(members.rank):
        outgoing = [(piece, transfer.dst) for transfer in sent if (piece := part(transfer)).numel()]
        incoming, sums = [], []
        for transfer in received:  # one at most
            target = part(transfer)
            arrived = scratch[: target.numel()] if transfer.reduce else target
            if target.numel():
                incoming.append((arrived, transfer.src))
            if transfer.reduce:
                sums.append((target, arrived))
        receives, sends = members.start(outgoing, incoming)
        for work in receives:
            work.wait()
        for target, arrived in sums:
            reduce_into([target], [target, arrived], op)
        # Wait for the sends after the sums, which do not depend on them, but before the next step, which may overwrite
        # the sent data.
        for work in sends:
            work.wait()


class Members:
    """The ranks of a group, as seen from this rank. Ranks are numbered within the group, from 0 to size − 1."""

    def __init__(self, group: Any = None) -> None:
        if group is None:
            if not dist.is_initialized():
                raise WorldError("no process group exists yet; call paceline.init() first, or pass group=")
            group = get_default_group()
        if group == dist.GroupMember.NON_GROUP_MEMBER or group.rank() < 0:
            who = f"rank {dist.get_rank()}" if dist.is_initialized() else "this rank"
            raise UsageError(f"{who} is not in the group; call the collective only on the group's ranks")
        self._group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        is_registered = group in get_known_groups()  # a bare ProcessGroupGloo is not registered
        self.world_ranks: list[int] = dist.get_process_group_ranks(group) if is_registered else list(range(self.size))
        """The members' global ranks, which error messages use."""

    @property
    def name(self) -> str:
        """Name of this rank in error messages."""
        return f"rank {self.world_ranks[self.rank]}"

    def carries(self, device: torch.device) -> bool:
        """Return whether the group can send tensors on `device`; Gloo sends only CPU tensors."""
        try:
            backend = self._group._get_backend(device) if hasattr(self._group, "_get_backend") else self._group
        except RuntimeError:  # the group has no backend for such tensors
            return False
        return device.type == "cpu" or not isinstance(backend, dist.ProcessGroupGloo)

    def start(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> tuple[Any, Any]:
        """Start these messages, each to or from a rank of the group; return the receive works and the send works."""
        if any(not tensor.is_cpu for tensor, _ in (*sends, *receives)):
            # One batch, because with NCCL two ranks that each send first would wait for each other.
            batch = [self._operation(dist.irecv, tensor, place) for tensor, place in receives]
            batch += [self._operation(dist.isend, tensor, place) for tensor, place in sends]
            works = dist.batch_isend_irecv(batch)
            return works, ()
        # Use the group's methods, because torch.distributed's functions do not know a bare ProcessGroupGloo.
        incoming = [self._group.recv([tensor], place, TAG) for tensor, place in receives]
        return incoming, [self._group.send([tensor], place, TAG) for tensor, place in sends]

    def _operation(self, verb: Any, tensor: Tensor, place: int) -> dist.P2POp:
        return dist.P2POp(verb, tensor, group=self._group, tag=TAG, group_peer=place)

    def agree(self, call: str, host: int, device: torch.device) -> Sequence[str]:
        """Compare the `call` that all members describe before any part of a tensor is sent; return each `host`.

        An empty `call` says that this rank rejects its arguments, and will raise an error.
        """
        if self.size == 1:
            return [str(host)]
        text = f"{host} {call}".encode().ljust(_CALL_BYTES, b"\0")
        sent = torch.tensor(list(text), dtype=torch.uint8, device=device)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        self.guard("agreement", lambda: self._group.allgather([received], [sent]).wait())
        texts = [bytes(row.tolist()).rstrip(b"\0").decode() for row in received]
        hosts, _, calls = zip(*(text.partition(" ") for text in texts), strict=True)
        ranks_by_call = ranks_by_value(zip(self.world_ranks, calls, strict=True))
        if call and (refusing := ranks_by_call.get("")):
            errors = "their arguments; see their errors" if len(refusing) > 1 else "its arguments; see its error"
            raise DesyncError(f"{named_ranks(refusing)} rejected {errors}").because_of(refusing)
        if call and len(ranks_by_call) > 1:
            difference = ", ".join(f"{text} on {named_ranks(ranks)}" for text, ranks in ranks_by_call.items())
            raise DesyncError(f"ranks call different collectives: {difference}; call the same one on every rank")
        return hosts

    def guard(self, event: str, function: Callable[[], Any]) -> Any:
        """Call `function`, and convert a backend failure into an error that names the `event`."""
        try:
            return function()
        except PacelineError:
            raise
        except RuntimeError as error:
            raise failed(event, self.world_ranks, self.world_ranks[self.rank], error) from error
