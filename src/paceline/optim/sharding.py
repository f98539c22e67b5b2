"""The sharding of an optimizer's parameters on this rank: its own pieces, and the segments of all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

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
    """The owners of all pieces, and this rank's own; all ranks make it together.

    Args:
        subject: the parameters, and the ranks that train them.
        by: ``"element"`` or ``"tensor"``.
        master_dtype: dtype of copies of half-precision parameters; None for none.
        description: returns a description of the groups, which has to be equal on all ranks.
    """

    def __init__(
        self, subject: Subject, by: str, master_dtype: torch.dtype | None, description: Callable[[], Any]
    ) -> None:
        self.owned: list[Owned] = []
        """The pieces of this rank, in the order of parameters."""
        self.channel: Channel | None = None
        """The way to the other ranks; None in a world of one."""
        self._subject, self._by, self._master_dtype = subject, by, master_dtype
        self._segments: list[Segment] = []
        self._buffers: Buffers | None = None
        self._loads = [0] * subject.size
        self.parameters: list[nn.Parameter] = []
        """All parameters, in the order in which states number them."""
        self.groups: list[list[nn.Parameter]] = []
        """Parameters of each group when it was added."""
        self._looks: list[tuple[int, torch.Size, torch.dtype]] = []
        """Addresses, shapes and dtypes of the parameters when they were last looked at."""
        self.strides: list[tuple[int, ...]] = []
        """Strides of the parameters: pieces and their states follow that order in memory."""
        if subject.size > 1:
            assert subject.group is not None
            self.channel = open_channel(subject.group, subject.device, caller="ShardedOptimizer(…)")
            self._buffers = Buffers(self.channel)
            self.check_equal(description())

    def check_equal(self, description: Any) -> None:
        """Compare the parameters that ranks are about to train."""
        if self.channel is None:
            return
        found = self.channel.all_gather_object(description)
        for rank, theirs in enumerate(found):
            if theirs != found[0]:
                # The first entry describes the optimizer, the others one group each.
                pairs = enumerate(zip(theirs, found[0], strict=False))
                place = next((place for place, (one, other) in pairs if one != other), 0)
                difference = "the optimizer" if place == 0 and len(theirs) == len(found[0]) else "parameter groups"
                difference = f"parameter group {place - 1}" if place else difference
                raise UsageError(
                    f"rank {self.channel.members[rank]} has given the ShardedOptimizer another {difference} than rank "
                    f"{self.channel.members[0]}; give the same class, settings and groups on every rank"
                )

    def add(self, parameters: Sequence[nn.Parameter]) -> None:
        """Share out further `parameters`."""
        first, size = len(self.parameters), self._subject.size
        self.parameters += parameters
        self.groups.append(list(parameters))
        self._check_memory()
        replicated = [index for index, each in enumerate(parameters) if size == 1 or id(each) in self._subject.sparse]
        pieces = [Piece(index, 0, parameters[index].numel(), self._subject.rank) for index in replicated]
        for members, shared in share_out(parameters, replicated, self._by, self._loads):
            if shared:
                assert self.channel is not None
                number = {index: place for place, index in enumerate(members)}
                local = [Piece(number[each.parameter], each.start, each.stop, each.owner) for each in shared]
                self._segments.append(Segment(self.channel, [parameters[index] for index in members], local))
            pieces += shared
        pieces.sort(key=lambda piece: (piece.parameter, piece.start))
        self.owned += owned_by(self._subject.rank, pieces, parameters, first, self._master_dtype)
        self._note_places()

    def _note_places(self) -> None:
        self._looks = list(map(_look, self.parameters))
        self.strides = list(map(Tensor.stride, self.parameters))

    def has_moved(self) -> bool:
        """Return whether parameters were given other memory, or another form."""
        return list(map(_look, self.parameters)) != self._looks

    def follow(self) -> bool:
        """Follow parameters that were given other memory.

        Returns:
            Whether their elements lie in another order there, so that pieces consist of other elements; the same on
            every rank.
        """
        for parameter, (_, shape, _) in zip(self.parameters, self._looks, strict=True):
            if parameter.shape != shape:
                raise UsageError(
                    f"{self._subject.name_of(parameter)} has shape {tuple(parameter.shape)} now, but had "
                    f"{tuple(shape)} when the ShardedOptimizer was made; make another one after the change"
                )
        before = self.strides
        self._check_memory()
        for segment in self._segments:
            segment.take()
        for owned in self.owned:
            owned.refresh()
        self._note_places()
        return self.strides != before

    def take_changes(self) -> None:
        """Copy values that were changed since the last step into master copies."""
        for owned in self.owned:
            owned.take_changes()

    def _check_memory(self) -> None:
        """Refuse parameters with elements in common, and lay out those that are not dense."""
        for parameter, other in overlapping(self.parameters):
            raise UsageError(
                f"{self._subject.name_of(parameter)} and {self._subject.name_of(other)} share memory, and ranks would "
                "update one of them alone; give the modules the same Parameter, as in b.weight = a.weight, or use "
                "the optimizer itself"
            )
        if self.channel is not None:
            for parameter in self.parameters:
                if id(parameter) not in self._subject.sparse:
                    make_dense(parameter, self._subject.name_of(parameter))

    def gather(self, is_changed: Callable[[nn.Parameter], bool]) -> None:
        """Complete, on every rank, the parameters that were changed; all ranks call this with the same ones."""
        if self.channel is None:
            return
        assert self._buffers is not None
        active = [each for each in self._segments if any(map(is_changed, each.parameters))]
        launched: deque[Launched] = deque()
        for number, segment in enumerate(active):
            if len(launched) == STAGED:  # its buffer is in use
                self.channel.meet(launched.popleft(), _GATHERING)
            launched.append(segment.launch(self._buffers, number % STAGED))
        strike("gather")
        for work in launched:
            self.channel.meet(work, _GATHERING)


def overlapping(parameters: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Yield pairs of neighbors in memory that overlap."""
    spans = []
    for place, each in enumerate(parameters):
        if each.numel() and each.device.type != "meta":
            extent = 1 + sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True))
            spans.append((str(each.device), each.data_ptr(), each.data_ptr() + extent * each.element_size(), place))
    spans.sort()
    for (device, _, stop, place), (other_device, start, _, other) in pairwise(spans):
        if device == other_device and start < stop:
            yield parameters[min(place, other)], parameters[max(place, other)]


def share_out(
    parameters: Sequence[nn.Parameter], replicated: Sequence[int], by: str, loads: list[int]
) -> list[tuple[list[int], list[Piece]]]:
    """Return segments: the places of their `parameters`, with the pieces of these that ranks own.

    Args:
        parameters: the parameters, whose values are not read.
        replicated: places of parameters that every rank updates.
        by: ``"element"`` or ``"tensor"``.
        loads: for each rank, the elements that it has got as whole parameters before; the new ones are added.
    """
    sizes, ranks = [parameter.numel() for parameter in parameters], len(loads)
    return [
        (members, deal_out(sizes, members, ranks, loads) if by == "tensor" else cut_evenly(sizes, members, ranks))
        for members in _segments_of(parameters, replicated)
    ]


def _segments_of(parameters: Sequence[nn.Parameter], replicated: Sequence[int]) -> list[list[int]]:
    """Return the places of parameters that are gathered together: neighbours of one kind, frozen ones separately."""
    # Frozen ones separately, because a segment without any gradient is not gathered.
    kinds: list[Hashable] = [(each.dtype, each.device, each.requires_grad) for each in parameters]
    sizes = [each.numel() * each.element_size() for each in parameters]
    left_out = set(replicated)
    inside = [index for index in range(len(parameters)) if index not in left_out and sizes[index]]
    return assign(sizes, kinds, inside, [CAPACITY])


def _look(parameter: nn.Parameter) -> tuple[int, torch.Size, torch.dtype]:
    # An address alone may be the same by chance, in freed memory.
    return parameter.data_ptr(), parameter.shape, parameter.dtype
