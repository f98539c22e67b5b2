"""The ranks of a group: messages between them, and the comparison of their arguments before a collective begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.processes.missing_ranks import failed, named_ranks, ranks_by_value
from paceline.core.torch_internals.distributed.c10d import get_default_group, get_known_groups
from paceline.errors import DesyncError, PacelineError, UsageError, WorldError

TAG = 5202
"""Tag that separates our messages from the user's own sends on the same group."""


_CALL_BYTES = 256
"""Size of a rank's description of its call, padded with zeros."""


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
            raise DesyncError(
                f"{named_ranks(refusing)} refused its tensor or argument; see the error there"
            ).because_of(refusing)
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
