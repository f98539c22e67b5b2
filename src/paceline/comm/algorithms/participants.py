"""The ranks of a group: messages between them, and the comparison of their arguments before a collective begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.algorithms.schedules import NAMES
from paceline.comm.arithmetic import name_of
from paceline.comm.shm.header import DTYPES
from paceline.core.processes.missing_ranks import failed, named_ranks, ranks_by_value
from paceline.core.torch_internals.distributed.c10d import get_default_group, get_known_groups
from paceline.errors import DesyncError, PacelineError, UsageError, WorldError

TAG = 5202
"""Tag that separates our messages from the user's own sends on the same group."""


class Call(NamedTuple):
    """A rank's description of a collective before it begins. Only the last two fields may differ between ranks."""

    algorithm: int
    numel: int
    dtype: int
    op: int
    root: int
    host: int = 0
    """Ranks with the same number share a host."""
    refused: int = 0
    """1 if this rank rejects its arguments and will raise an error."""


_FIELDS: dict[str, Callable[[int], str]] = {
    "algorithm": NAMES.__getitem__,
    "dtype": lambda code: str(DTYPES[code]).removeprefix("torch."),
    "op": name_of,
}
_WORDS = {"algorithm": "algorithms", "numel": "numbers of elements", "dtype": "dtypes", "op": "ops", "root": "roots"}


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

    def place_of(self, world_rank: int, argument: str) -> int:
        """Convert a global rank to a rank within the group."""
        if world_rank not in self.world_ranks:
            raise UsageError(
                f"{argument}={world_rank} is not a rank of the group, which has {named_ranks(self.world_ranks)}; "
                "pass one of these"
            )
        return self.world_ranks.index(world_rank)

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

    def agree(self, call: Call, device: torch.device) -> list[Call]:
        """Exchange calls with all members before any part of a tensor is sent, and return the calls."""
        if self.size == 1:
            return [call]
        sent = torch.tensor(call, dtype=torch.int64, device=device)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        self.guard("agreement", lambda: self._group.allgather([received], [sent]).wait())
        calls = [Call(*fields.tolist()) for fields in received]
        if call.refused:  # this rank's own error is more specific
            return calls
        if refusing := [rank for rank, peer_call in zip(self.world_ranks, calls, strict=True) if peer_call.refused]:
            raise DesyncError(
                f"{named_ranks(refusing)} refused its tensor or argument; see the error there"
            ).because_of(refusing)
        for field in _WORDS:
            values = [getattr(peer_call, field) for peer_call in calls]
            if len(set(values)) > 1:
                raise DesyncError(self._difference(field, values))
        return calls

    def _difference(self, field: str, values: Sequence[int]) -> str:
        groups = ranks_by_value(zip(self.world_ranks, values, strict=True))
        text_of = _FIELDS.get(field, str) if field != "root" else lambda place: f"rank {self.world_ranks[place]}"
        parts = ", ".join(f"{text_of(value)} on {named_ranks(ranks)}" for value, ranks in groups.items())
        return f"ranks call a collective with different {_WORDS[field]}: {parts}; use the same on every rank"

    def guard(self, event: str, function: Callable[[], Any]) -> Any:
        """Call `function`, and convert a backend failure into an error that names the `event`."""
        try:
            return function()
        except PacelineError:
            raise
        except RuntimeError as error:
            raise failed(event, self.world_ranks, self.world_ranks[self.rank], error) from error
