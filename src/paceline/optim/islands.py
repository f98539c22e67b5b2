"""Islands: groups of ranks that average gradients in every step, and average with each other every H steps.

    island 0: ranks 0, 1, 2, 3 ──┐ rank 0
                                 ├── outer steps over the slow links, every H inner steps
    island 1: ranks 4, 5, 6, 7 ──┘ rank 4

The first rank of each island, its leader, exchanges messages with the other leaders and broadcasts their mean inside
its island, so a message crosses a link between islands once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain, zip_longest
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.compression import low_precision
from paceline.core import consensus
from paceline.core.flat_views import split_like
from paceline.core.missing_ranks import called_by_all, failed, named_ranks, reason_of
from paceline.core.spans import OUTER_STEP, recorder
from paceline.core.unwrapping import unwrap
from paceline.errors import CommunicationError, ReplicaMismatch, UsageError

logger = logging.getLogger(__name__)
Compression = Literal["fp16", "int8"]
Lost = Literal["raise", "continue"]


@dataclass
class Message:
    """A message to the other islands, and the exchange that delivers it."""

    payload: Tensor
    """The encoded numbers; empty on ranks that do not lead their island."""
    received: list[Tensor] = field(default_factory=list)
    """On a leader, once the exchange has begun: the sum of all payloads, or each payload."""
    work: Any = None


class Islands:
    """All islands of a job, including this rank's. Create it on all ranks.

    Args:
        model: a wrapper, whose process group is an island, or a plain module, which makes each rank an island. All
            ranks get the parameters and buffers of rank 0.
        compress: format of messages; None for float32.
        on_lost_island: what to do if an exchange fails: raise an error, or continue without the other islands.
        timeout: timeout of an exchange, in seconds; by default, the timeout of the job.
        settings: settings that must be equal on all ranks.

    Raises:
        UsageError: if the islands have different sizes or overlap, if all ranks of a larger job are one island, or if
            settings differ.
        ReplicaMismatch: if the models have different parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        compress: Compression | None,
        on_lost_island: Lost,
        timeout: float | None,
        settings: Mapping[str, Any],
    ) -> None:
        world = self._world = consensus.here()
        group = getattr(model, "process_group", None)
        ranks = [world.rank] if group is None else dist.get_process_group_ranks(group)
        layout = [f"{name!r}, {tuple(value.shape)}, {value.dtype}" for name, value in _replicated(model).items()]
        with called_by_all("the constructor of the optimizer"):
            reports = consensus.gather(world, {"ranks": ranks, "settings": dict(settings), "layout": layout})
        _check_settings(reports)
        self.members = _islands(reports)
        """Ranks of each island."""
        self.number = next(number for number, island in enumerate(self.members) if world.rank in island)
        self.is_leader = self.members[self.number][0] == world.rank
        self.bytes_on_wire = 0
        """Bytes that this rank has sent to other islands, assuming collectives that move as little as possible."""
        self.goes_on = on_lost_island == "continue"
        """Whether this island continues alone if an exchange fails."""
        self.exposed_seconds = 0.0
        """Time that this rank has spent waiting for messages from other islands."""
        self._inside = group if len(ranks) > 1 else None
        self._compress = compress
        self._between: dist.ProcessGroup | None = None
        self._leaders = [island[0] for island in self.members]
        if len(self.members) > 1:
            limit = None if timeout is None else timedelta(seconds=timeout)
            self._between = dist.new_group(self._leaders, timeout=limit)
            self._begin_equal(_replicated(model).values())

    def encode(self, numbers: Tensor) -> Tensor:
        """Return flat `numbers` in the format of messages."""
        if self._compress == "fp16":
            return numbers.half()
        if self._compress == "int8":
            scales, codes = low_precision.encode(low_precision.shards_of(numbers, 1))
            return torch.cat([scales.view(-1), codes.view(-1)])
        return numbers

    def decode(self, payload: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the `count` numbers that were encoded."""
        if payload.dtype != torch.uint8:
            return payload.to(dtype)
        _, chunks, chunk = low_precision.shards_of(payload.new_empty(count), 1).shape
        codes = low_precision.split(payload[None], torch.Size([1, chunks, chunk]))
        return low_precision.decode(*codes, dtype).view(-1)[:count]

    def send(self, message: Message) -> None:
        """Begin to exchange `message`, in the background. Narrow dtypes are collected, so that sums are in float32."""
        if self._between is None or not self.is_leader:
            return
        size, payload = len(self.members), message.payload
        if payload.dtype in (torch.float32, torch.float64):
            message.received = [payload.clone()]
            message.work = dist.all_reduce(message.received[0], group=self._between, async_op=True)
            self.bytes_on_wire += 2 * (size - 1) * payload.nbytes // size
        else:
            message.received = [torch.empty_like(payload) for _ in range(size)]
            message.work = dist.all_gather(message.received, payload, group=self._between, async_op=True)
            self.bytes_on_wire += (size - 1) * payload.nbytes

    def receive(self, message: Message, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Wait for the exchange, and return the mean of `count` numbers over the islands; if it fails, this island's.

        Raises:
            CommunicationError: on every rank of the island, if the exchange has failed and the island must not
                continue alone.
        """
        mean, problem, began = None, None, time.perf_counter()
        with recorder.span(OUTER_STEP, group=OUTER_STEP):
            if self.is_leader:
                try:
                    mean = self._mean(message, count, dtype)
                except (RuntimeError, CommunicationError) as error:
                    problem = error
            if self._inside is not None:
                leader = self._leaders[self.number]
                has_failed = torch.tensor([problem is not None], dtype=torch.float32, device=device)
                dist.broadcast(has_failed, leader, group=self._inside)
                if not has_failed.item():
                    mean = torch.empty(count, dtype=dtype, device=device) if mean is None else mean
                    dist.broadcast(mean, leader, group=self._inside)
        self.exposed_seconds += time.perf_counter() - began
        if mean is None:
            self._lose(problem)
            message.work = None
            return self.receive(message, count, dtype, device)
        return mean

    def _mean(self, message: Message, count: int, dtype: torch.dtype) -> Tensor:
        if message.work is None:
            return self.decode(message.payload, count, dtype)
        message.work.wait()
        # In rank order, so that all islands get the same bits.
        mean = self.decode(message.received[0], count, dtype)
        for payload in message.received[1:]:
            mean += self.decode(payload, count, dtype)
        return mean.div_(len(self.members))

    def _lose(self, problem: BaseException | None) -> None:
        """Continue without the other islands, or raise an error that names the lost islands."""
        mine, others = self.number, [number for number in range(len(self.members)) if number != self.number]
        reason = "its leader reports it" if problem is None else reason_of(problem)
        if len(others) > 1 and problem is not None:  # the store knows which leaders have joined the exchange
            blamed = failed("outer step", self._leaders, self._world.rank, problem).blamed or ()
            others = [number for number in others if self._leaders[number] in blamed] or others
        lost = " and ".join(f"island {number} ({named_ranks(self.members[number])})" for number in others)
        ranks = list(chain.from_iterable(self.members[number] for number in others))
        what = f"rank {self._world.rank}: the outer step of island {mine} with {lost} failed ({reason})"
        if not self.goes_on:
            raise CommunicationError(
                f"{what}; see the errors of that island, and check the link to it; if the link is only slow, increase "
                "timeout=…, or let each island continue alone with on_lost_island='continue'"
            ).because_of(ranks)
        self._between = None
        logger.warning("%s; island %d continues alone", what, mine)

    def mean_of(self, tensors: Iterable[Tensor]) -> None:
        """Replace floating-point `tensors` with their means over the islands, without compression."""
        for flat, parts in _flattened(tensors):
            message = Message(flat)
            self.send(message)
            _write(self.receive(message, flat.numel(), flat.dtype, flat.device), parts)

    def _begin_equal(self, tensors: Iterable[Tensor]) -> None:
        with called_by_all("the constructor of the optimizer"):
            for flat, parts in _flattened(tensors):
                if self.is_leader:
                    dist.broadcast(flat, self._leaders[0], group=self._between)
                if self._inside is not None:
                    dist.broadcast(flat, self._leaders[self.number], group=self._inside)
                _write(flat, parts)


def _replicated(model: nn.Module) -> dict[str, Tensor]:
    module = unwrap(model)
    return {name: value.detach() for name, value in chain(module.named_parameters(), module.named_buffers())}


def _flattened(tensors: Iterable[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """Return one flat copy per dtype and device, and the tensors in it."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return [(torch.cat([part.reshape(-1) for part in parts]), parts) for parts in kinds.values()]


def _write(flat: Tensor, parts: Sequence[Tensor]) -> None:
    for part, values in zip(parts, split_like(flat, parts), strict=True):
        part.copy_(values)


def _check_settings(reports: Sequence[Mapping[str, Any]]) -> None:
    first = reports[0]
    for rank, report in enumerate(reports):
        for name, value in first["settings"].items():
            if (other := report["settings"].get(name)) != value:
                raise UsageError(
                    f"rank {rank} has {name}={other!r}, but rank 0 has {name}={value!r}; give the same value"
                )
        for mine, theirs in zip_longest(report["layout"], first["layout"]):
            if mine != theirs:
                raise ReplicaMismatch(
                    f"rank {rank} has the parameter or buffer {mine}, but rank 0 has {theirs}; build the same model on "
                    "every rank"
                )


def _islands(reports: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the ranks of each island, ordered by first rank."""
    islands = [list(ranks) for ranks in sorted({tuple(report["ranks"]) for report in reports})]
    if len({rank for island in islands for rank in island}) != sum(map(len, islands)):
        raise UsageError(f"the islands {islands} overlap; give the wrapper of each rank one dimension of the same mesh")
    if len(set(map(len, islands))) > 1:
        raise UsageError(f"the islands {islands} have different sizes; give each island the same number of ranks")
    if len(islands) == 1 and len(reports) > 1:
        raise UsageError(
            f"the model averages over all {len(reports)} ranks in every step, which leaves no ranks for another "
            "island; wrap the model over an island, DistributedDataParallel(net, device_mesh=mesh['inside']), or pass "
            "the plain module to make each rank an island"
        )
    return islands
