"""The sharding of an optimizer's parameters on this rank: its own pieces, and the segments that it has in common."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.state.buckets import CAPACITY, assign
from paceline.core.telemetry.failpoints import strike
from paceline.ddp.transport.channel import Channel, Launched
from paceline.ddp.transport.opening import open_channel
from paceline.errors import UsageError
from paceline.optim.arguments import Subject
from paceline.optim.owned_shard import Owned, owned_by
from paceline.optim.segments import Segment, make_segment
from paceline.optim.sharding_plan import Piece, Shares, cut_evenly, deal_out

_look = attrgetter("shape", "dtype")
_GATHERING = "gathering of updated parameters"


class Sharding:
    """Who owns what; all ranks make it together.

    Args:
        subject: the parameters, and the ranks that train them.
        by: ``"element"`` or ``"tensor"``.
        master_dtype: of copies of half-precision parameters; None for none.
        description: of the groups, which has to be equal on all ranks.

    Raises:
        UsageError: if ranks give different groups.
    """

    def __init__(
        self, subject: Subject, by: str, master_dtype: torch.dtype | None, description: Callable[[], Any]
    ) -> None:
        self.owned: list[Owned] = []
        """The pieces of this rank, in the order of parameters."""
        self.channel: Channel | None = None
        """The way to the other ranks; None in a world of one."""
        self.shares = Shares()
        """The pieces of all ranks."""
        self._subject, self._by, self._master_dtype = subject, by, master_dtype
        self._segments: list[Segment] = []
        self._loads = [0] * subject.size
        self._count = 0
        """Parameters that were added."""
        self.parameters: list[nn.Parameter] = []
        """All of them, in the order in which states number them."""
        self.groups: list[list[nn.Parameter]] = []
        """The same by group, as they were added."""
        self._addresses: list[int] = []
        """Where they lay when they were last looked at."""
        self._looks: list[Any] = []
        """Their shapes and dtypes then; memory that was given back may be another's at once."""
        self.strides: list[tuple[int, ...]] = []
        """Strides of the parameters: pieces and their states follow that order in memory."""
        if subject.size > 1:
            assert subject.group is not None
            device = _device_of(subject)
            self.channel = open_channel(subject.group, device, caller="ShardedOptimizer(…)")
            self.check_equal(description())

    def check_equal(self, description: Any) -> None:
        """Compare the parameters that ranks are about to train.

        Raises:
            UsageError: names ranks that differ.
        """
        if self.channel is None:
            return
        found = self.channel.all_gather_object(description)
        for rank, theirs in enumerate(found):
            if theirs != found[0]:
                index = next(
                    (at for at, pair in enumerate(zip(theirs, found[0], strict=False)) if pair[0] != pair[1]), 0
                )
                what = "the optimizer" if index == 0 and len(theirs) == len(found[0]) else "parameter groups"
                what = f"parameter group {index - 1}" if index else what
                raise UsageError(
                    f"rank {self.channel.members[rank]} has given the ShardedOptimizer another {what} than rank "
                    f"{self.channel.members[0]}; give the same class, settings and groups on every rank"
                )

    def add(self, parameters: Sequence[nn.Parameter]) -> None:
        """Share out further `parameters`."""
        first, size = self._count, self._subject.size
        self._count += len(parameters)
        self.parameters += parameters
        self.groups.append(list(parameters))
        replicated = [index for index, each in enumerate(parameters) if size == 1 or id(each) in self._subject.sparse]
        pieces = [Piece(index, 0, parameters[index].numel(), self._subject.rank) for index in replicated]
        for members, shared in share_out(parameters, replicated, self._by, self._loads):
            if shared:
                assert self.channel is not None
                number = {index: place for place, index in enumerate(members)}
                local = [Piece(number[each.parameter], each.start, each.stop, each.owner) for each in shared]
                self._segments.append(make_segment(self.channel, [parameters[index] for index in members], local))
            pieces += shared
        cut: dict[int, list[Piece]] = {index: [] for index in set(range(len(parameters))).difference(replicated)}
        for piece in pieces:
            if piece.parameter in cut:
                cut[piece.parameter].append(piece)
        for index, own in cut.items():  # those without elements, too
            self.shares.add(parameters[index], own)
        pieces.sort(key=lambda piece: (piece.parameter, piece.start))
        self.owned += owned_by(self._subject.rank, pieces, parameters, first, self._master_dtype)
        self._note_places()

    def _note_places(self) -> None:
        self._addresses, self._looks = _addresses(self.parameters), list(map(_look, self.parameters))
        self.strides = list(map(Tensor.stride, self.parameters))

    def has_moved(self) -> bool:
        """Whether parameters were given other memory, or another form."""
        return _addresses(self.parameters) != self._addresses or list(map(_look, self.parameters)) != self._looks

    def follow(self) -> bool:
        """Take in parameters that were given other memory.

        Returns:
            Whether they lie in another order there, so that pieces are of other elements; the same on every rank.

        Raises:
            UsageError: for one that has another shape.
        """
        for parameter, (shape, _) in zip(self.parameters, self._looks, strict=True):
            if parameter.shape != shape:
                raise UsageError(
                    f"{self._subject.name_of(parameter)} has shape {tuple(parameter.shape)} now, but had "
                    f"{tuple(shape)} when the ShardedOptimizer was made; make another one after the change"
                )
        before = self.strides
        for owned in self.owned:
            owned.let_go()
        for segment in self._segments:
            segment.take()
        for owned in self.owned:
            owned.refresh()
        self._note_places()
        return self.strides != before

    def take_changes(self) -> None:
        """Take in values that were changed since the last step."""
        for owned in self.owned:
            owned.take_changes()

    def gather(self) -> None:
        """Make the parameters whole on every rank that were trained in this step."""
        if self.channel is None:
            return
        active = [each for each in self._segments if any(parameter.grad is not None for parameter in each.parameters)]
        launched: deque[Launched] = deque()
        for segment in active:
            if len(launched) == segment.most_launched:
                self.channel.meet(launched.popleft(), _GATHERING)
            launched.append(segment.launch())
        strike("gather")
        for work in launched:
            self.channel.meet(work, _GATHERING)


def share_out(
    parameters: Sequence[nn.Parameter], replicated: Sequence[int], by: str, loads: list[int]
) -> list[tuple[list[int], list[Piece]]]:
    """Return which of the `parameters` make a segment, with the pieces that ranks own of them.

    Args:
        parameters: their values are not read.
        replicated: places of those that every rank updates.
        by: ``"element"`` or ``"tensor"``.
        loads: for each rank, elements that it has got as whole parameters before; its new ones are added.
    """
    sizes, ranks = [parameter.numel() for parameter in parameters], len(loads)
    return [
        (members, deal_out(sizes, members, ranks, loads) if by == "tensor" else cut_evenly(sizes, members, ranks))
        for members in _segments_of(parameters, replicated)
    ]


def _segments_of(parameters: Sequence[nn.Parameter], apart: Sequence[int]) -> list[list[int]]:
    """Return which parameters are gathered together: neighbours of one kind, frozen ones by themselves."""
    kinds: list[Hashable] = [(each.dtype, each.device, each.requires_grad) for each in parameters]
    sizes = [each.numel() * each.element_size() for each in parameters]
    left_out = set(apart)
    inside = [index for index in range(len(parameters)) if index not in left_out and sizes[index]]
    return assign(sizes, kinds, inside, [CAPACITY])


def _addresses(parameters: Sequence[nn.Parameter]) -> list[int]:
    return [parameter.data_ptr() for parameter in parameters]


def _device_of(subject: Subject) -> torch.device:
    for entry in subject.groups:
        tensors = entry["params"] if isinstance(entry, dict) else [entry[-1] if isinstance(entry, tuple) else entry]
        for tensor in tensors:
            return (tensor[-1] if isinstance(tensor, tuple) else tensor).device  # type: ignore[no-any-return]
    return torch.device("cpu")
