"""The sharding of an optimizer's parameters: this rank's pieces, and the segments that all ranks gather."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from paceline.core.telemetry.failpoints import strike
from paceline.ddp.options.buckets import CAPACITY, assign
from paceline.ddp.transport.channel import Channel, Launched
from paceline.ddp.transport.opening import open_channel
from paceline.errors import UsageError
from paceline.optim.arguments import Subject
from paceline.optim.owned_shard import Owned, owned_by
from paceline.optim.segments import STAGED, Buffers, Segment, make_dense
from paceline.optim.sharding_plan import Piece, cut_evenly, deal_out

_GATHERING = "gathering of updated parameters"


class Sharding:
    """The owners of all pieces, and this rank's pieces. All ranks create it together.

    Args:
        subject: the parameters, and the ranks that train them.
        by: ``"element"`` or ``"tensor"``.
        master_dtype: dtype of copies of half-precision parameters; None for no copies.
        description: a description of the optimizer and its groups, which must be equal on all ranks.
    """

    def __init__(self, subject: Subject, by: str, master_dtype: torch.dtype | None, description: Any) -> None:
        self.owned: list[Owned] = []
        """The pieces of this rank, in parameter order."""
        self.channel: Channel | None = None
        """Connects to the other ranks; None with a single rank."""
        self.groups: list[list[nn.Parameter]] = []
        """Parameters of each group when it was added."""
        self._subject, self._by, self._master_dtype = subject, by, master_dtype
        self._segments: list[Segment] = []
        self._buffers: Buffers | None = None
        self._loads = [0] * subject.size
        self._places: list[tuple[int, torch.Size, tuple[int, ...], torch.dtype]] = []
        """Addresses and layouts of the parameters when they were last checked."""
        if subject.size > 1:
            assert subject.group is not None
            self.channel = open_channel(subject.group, subject.device, caller="ShardedOptimizer(…)")
            self._buffers = Buffers(self.channel)
            self.check_equal(description)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters. A parameter's index in this list is its number in states."""
        return [parameter for group in self.groups for parameter in group]

    @property
    def strides(self) -> list[tuple[int, ...]]:
        """Strides of the parameters when they were cut."""
        return [stride for _, _, stride, _ in self._places]

    def check_equal(self, description: Any) -> None:
        """Compare the optimizers and parameter groups of all ranks."""
        if self.channel is None:
            return
        descriptions = self.channel.all_gather_object(description)
        first = descriptions[0]
        for rank, other in enumerate(descriptions):
            if other != first:
                # The first entry describes the optimizer, and each further entry describes one group.
                places = [place for place, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1]]
                difference = "number of parameter groups" if not places else f"parameter group {places[0] - 1}"
                raise UsageError(
                    f"rank {self.channel.members[rank]} created the ShardedOptimizer with a different "
                    f"{'optimizer' if places[:1] == [0] else difference} than rank {self.channel.members[0]}; "
                    "give the same class, settings and groups on every rank"
                )

    def add(self, parameters: Sequence[nn.Parameter]) -> None:
        """Distribute another group of `parameters` among the ranks."""
        first, size = len(self.parameters), self._subject.size
        self.groups.append(list(parameters))
        self._check_memory()
        replicated = [index for index, param in enumerate(parameters) if size == 1 or id(param) in self._subject.sparse]
        pieces = [Piece(index, 0, parameters[index].numel(), self._subject.rank) for index in replicated]
        for members, shared in share_out(parameters, replicated, self._by, self._loads):
            if shared:
                assert self.channel is not None
                number = {index: place for place, index in enumerate(members)}
                local = [Piece(number[part.parameter], part.start, part.stop, part.owner) for part in shared]
                self._segments.append(Segment(self.channel, [parameters[index] for index in members], local))
            pieces += shared
        pieces.sort(key=lambda piece: (piece.parameter, piece.start))
        self.owned += owned_by(self._subject.rank, pieces, parameters, first, self._master_dtype)
        self._places = list(map(_place, self.parameters))

    def follow(self) -> None:
        """Adapt to parameters that have moved to other memory, or that have all changed to another dtype."""
        places = list(map(_place, self.parameters))
        if places == self._places:
            return
        for parameter, (_, shape, stride, _) in zip(self.parameters, self._places, strict=True):
            if parameter.shape != shape or parameter.stride() != stride:
                raise UsageError(
                    f"{self._subject.name_of(parameter)} has shape {tuple(parameter.shape)} and strides "
                    f"{parameter.stride()}, but had {tuple(shape)} and {stride} when the ShardedOptimizer was created; "
                    "create a new one after the change, and load the full_state_dict() of this one"
                )
        self._check_memory()
        for segment in self._segments:
            segment.find_pieces()
        for owned in self.owned:
            owned.refresh()
        self._places = list(map(_place, self.parameters))

    def _check_memory(self) -> None:
        """Refuse parameters that overlap in memory, and close gaps in their layouts."""
        for parameter, other in overlapping(self.parameters):
            raise UsageError(
                f"{self._subject.name_of(parameter)} and {self._subject.name_of(other)} share memory, and different "
                "ranks would update them; tie modules with the same Parameter, as in b.weight = a.weight, or use the "
                "optimizer without ShardedOptimizer"
            )
        if self.channel is not None:
            for parameter in self.parameters:
                if id(parameter) not in self._subject.sparse:
                    make_dense(parameter, self._subject.name_of(parameter))

    def gather(self) -> None:
        """Gather the updated parameters on every rank; skips those without gradients. All ranks call this."""
        if self.channel is None:
            return
        assert self._buffers is not None
        # All ranks have the same gradients, so they gather the same segments.
        active = [
            segment for segment in self._segments if any(parameter.grad is not None for parameter in segment.parameters)
        ]
        launched: deque[Launched] = deque()
        for number, segment in enumerate(active):
            if len(launched) == STAGED:  # its buffer is still in use
                self.channel.meet(launched.popleft(), _GATHERING)
            launched.append(segment.launch(self._buffers, number % STAGED))
        strike("gather")
        for work in launched:
            self.channel.meet(work, _GATHERING)


def overlapping(parameters: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Yield pairs of parameters that overlap in memory."""
    spans = []
    for place, param in enumerate(parameters):
        if param.numel() and param.device.type != "meta":
            extent = 1 + sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
            spans.append((str(param.device), param.data_ptr(), param.data_ptr() + extent * param.element_size(), place))
    spans.sort()
    for (device, _, stop, place), (other_device, start, _, other) in pairwise(spans):
        if device == other_device and start < stop:
            yield parameters[min(place, other)], parameters[max(place, other)]


def share_out(
    parameters: Sequence[nn.Parameter], replicated: Sequence[int], by: str, loads: list[int]
) -> list[tuple[list[int], list[Piece]]]:
    """Return segments: the indices of their parameters, and the pieces that ranks own.

    Args:
        parameters: the parameters, whose values are not read.
        replicated: indices of parameters that every rank updates.
        by: ``"element"`` or ``"tensor"``.
        loads: number of elements in whole parameters that each rank owns; updated in place.
    """
    sizes, ranks = [parameter.numel() for parameter in parameters], len(loads)
    return [
        (members, deal_out(sizes, members, ranks, loads) if by == "tensor" else cut_evenly(sizes, members, ranks))
        for members in _segments_of(parameters, replicated)
    ]


def _segments_of(parameters: Sequence[nn.Parameter], replicated: Sequence[int]) -> list[list[int]]:
    """Return the indices of parameters that are gathered together: neighbors of the same kind."""
    # Frozen parameters are separate, because a segment without any gradient is not gathered.
    kinds: list[Hashable] = [(param.dtype, param.device, param.requires_grad) for param in parameters]
    sizes = [param.numel() * param.element_size() for param in parameters]
    left_out = set(replicated)
    inside = [index for index in range(len(parameters)) if index not in left_out and sizes[index]]
    return assign(sizes, kinds, inside, [CAPACITY])


def _place(parameter: nn.Parameter) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype]:
    # The address alone is not enough: freed memory may be used again.
    return parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype
