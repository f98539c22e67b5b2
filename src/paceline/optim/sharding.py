"""The sharding of an optimizer's parameters: this rank's pieces, and the segments that all ranks gather.

All ranks compute the same plan, which depends only on values that are equal on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.failpoints import strike
from paceline.core.flat_views import flattened
from paceline.core.torch_internals import copy_each, count_uses
from paceline.ddp.buckets import CAPACITY, assign
from paceline.ddp.channel import Channel, Launched, SharedChannel, open_channel
from paceline.errors import UsageError
from paceline.optim.arguments import Subject

ALIGN = 128
"""Parameters are cut at multiples of this number of elements. If the last elements of a tensor do not fill a vector
register, CPU kernels use different instructions for them, which may round differently."""
STAGED = 4
"""Number of segments that are gathered at the same time: enough to keep a network busy, with small buffers."""
HALVES = (torch.bfloat16, torch.float16)
"""Dtypes of parameters that can have a master copy."""
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
                local = [replace(piece, parameter=number[piece.parameter]) for piece in shared]
                self._segments.append(Segment(self.channel, [parameters[index] for index in members], local))
            pieces += shared
        for piece in sorted(pieces, key=lambda piece: (piece.parameter, piece.start)):
            if piece.owner == self._subject.rank:
                parameter = parameters[piece.parameter]
                part = None if piece.numel == parameter.numel() else (piece.start, piece.stop)
                dtype = self._master_dtype if parameter.dtype in HALVES else None
                self.owned.append(Owned(parameter, first + piece.parameter, part, dtype))
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


def _place(parameter: nn.Parameter) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype]:
    # The address alone is not enough: freed memory may be used again.
    return parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype


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
    """Return segments of neighbors of the same kind: the indices of their parameters, and the pieces that ranks own.

    Args:
        parameters: the parameters, whose values are not read.
        replicated: indices of parameters that every rank updates.
        by: ``"element"`` or ``"tensor"``.
        loads: number of elements in whole parameters that each rank owns; updated in place.
    """
    sizes, ranks = [parameter.numel() for parameter in parameters], len(loads)
    nbytes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    # Frozen parameters are separate, because a segment without any gradient is not gathered.
    kinds: list[Hashable] = [(param.dtype, param.device, param.requires_grad) for param in parameters]
    left_out = set(replicated)
    inside = [index for index in range(len(parameters)) if index not in left_out and nbytes[index]]
    return [
        (members, deal_out(sizes, members, ranks, loads) if by == "tensor" else cut_evenly(sizes, members, ranks))
        for members in assign(nbytes, kinds, inside, [CAPACITY])
    ]


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of a flattened parameter, and the rank that owns them."""

    parameter: int
    start: int
    stop: int
    owner: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def cut_evenly(sizes: Sequence[int], members: Sequence[int], ranks: int, align: int = ALIGN) -> list[Piece]:
    """Cut a bucket into one contiguous shard for each rank, all of about the same size.

    Args:
        sizes: number of elements of every parameter.
        members: indices of the bucket's parameters, in order.
        ranks: number of ranks.
        align: parameters are cut at multiples of this number of elements, or at their end.

    Returns:
        The pieces, in bucket order, without empty ones.
    """
    total = sum(sizes[index] for index in members)
    pieces, offset, owner = [], 0, 0
    for index in members:
        start, size = 0, sizes[index]
        while start < size:
            end = size
            # Find the first rank whose shard extends beyond `start`. Rounding may leave a rank's shard empty.
            while owner < ranks - 1:
                cut = _rounded(total * (owner + 1) // ranks - offset, size, align)
                if cut > start:
                    end = cut
                    break
                owner += 1
            pieces.append(Piece(index, start, end, owner))
            start = end
        offset += size
    return pieces


def _rounded(cut: int, size: int, align: int) -> int:
    """Return the aligned position nearest to `cut` in a parameter of `size` elements."""
    if cut >= size:
        return size
    return min(size, (cut + align // 2) // align * align)


def deal_out(sizes: Sequence[int], members: Sequence[int], ranks: int, loads: list[int]) -> list[Piece]:
    """Assign whole parameters, the largest first, each to the rank with the fewest elements.

    `loads` has the number of elements of each rank, and is updated in place.
    """
    pieces = []
    for index in sorted(members, key=lambda index: -sizes[index]):
        owner = min(range(ranks), key=loads.__getitem__)
        loads[owner] += sizes[index]
        pieces.append(Piece(index, 0, sizes[index], owner))
    return sorted(pieces, key=lambda piece: members.index(piece.parameter))


@dataclass
class Owned:
    """A piece of a parameter that this rank updates.

    Args:
        parameter: the user's parameter.
        index: number of the parameter in the optimizer.
        piece: start and stop of the elements; None for the whole parameter, in its own shape.
        master_dtype: dtype of a copy that is trained instead of the parameter; None to train the parameter itself.
    """

    parameter: nn.Parameter
    index: int
    piece: tuple[int, int] | None
    master_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        self._view = self._current_view()
        values = self._view if self.master_dtype is None else self._view.to(self.master_dtype, copy=True)
        # Groups may also contain integer parameters, and torch refuses requires_grad for integers.
        self.trained = nn.Parameter(values, requires_grad=self.parameter.is_floating_point() or self._view.is_complex())
        """The tensor that the inner optimizer trains: the piece itself, or its master copy."""
        vars(self.trained).update(vars(self.parameter))  # attributes that optimizers read, such as p.lr_scale

    def _current_view(self) -> Tensor:
        if self.piece is None:
            return self.parameter.detach()
        return flat_view(self.parameter)[slice(*self.piece)]

    def values(self) -> Tensor:
        """Return a view of the parameter's elements in this piece."""
        return self._view

    def refresh(self) -> None:
        """Refer to the parameter's current memory, after it has moved."""
        self._view = self._current_view()
        if self.master_dtype is None:
            self.trained.data = self._view

    def take_changes(self) -> None:
        """Update the master copy with the values that the user has written to the parameter since the last step."""
        if self.master_dtype is not None:
            master = self.trained.detach()
            # Compare values, because writes through p.data and NumPy do not increment a version counter. Elements that
            # have not changed keep the master's precision.
            is_same = master.to(self._view.dtype) == self._view
            torch.where(is_same, master, self._view.to(master.dtype), out=master)

    def take_gradient(self, gradient: Tensor | None) -> None:
        """Set the gradient of :attr:`trained` to this piece of the parameter's `gradient`."""
        if gradient is None:
            return
        if gradient.is_sparse:
            if self.piece is not None:
                raise UsageError(
                    f"the gradient of parameter {self.index} of the ShardedOptimizer is sparse and cannot be cut into "
                    "pieces; give the model itself, so that its sparse layers are found, or remove sparse=True"
                )
            self.trained.grad = gradient
            return
        if self.piece is not None:
            gradient = _laid_out(gradient, self.parameter)[slice(*self.piece)]
        self.trained.grad = gradient if gradient.dtype is self.trained.dtype else gradient.to(self.trained.dtype)

    def end_step(self) -> None:
        """Drop the gradient, and copy the new values of a master copy into the parameter."""
        if self.trained.grad is not None:
            self.trained.grad = None
            if self.master_dtype is not None:
                self._view.copy_(self.trained.detach())


def _laid_out(gradient: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return the elements of `gradient` in the memory order of the parameter."""
    if gradient.stride() == parameter.stride():
        return flattened(gradient)
    return flattened(torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient))


class Segment:
    """Neighboring parameters of one dtype on one device whose updated pieces are gathered together.

    Each rank copies its pieces into a buffer. Ranks that share memory read each other's buffers; other ranks use the
    backend's all-gather. Parameters keep their memory, so tensors that alias it stay valid. The `pieces` of all ranks
    refer to a parameter by its index in `parameters`.
    """

    def __init__(self, channel: Channel, parameters: Sequence[nn.Parameter], pieces: Sequence[Piece]) -> None:
        self.parameters = list(parameters)
        self._channel = channel
        self._pieces = [[piece for piece in pieces if piece.owner == owner] for owner in range(channel.size)]
        self._row = max(sum(piece.numel for piece in owned) for owned in self._pieces)  # an all-gather has equal shards
        self._places: list[list[tuple[Tensor, slice]]] = []
        """For each rank, its pieces as views of the parameters, and their positions in the rank's buffer."""
        self.find_pieces()

    def find_pieces(self) -> None:
        """Find the pieces in the parameters' current memory."""
        dtypes = sorted({str(parameter.dtype) for parameter in self.parameters})
        if len(dtypes) > 1:
            raise UsageError(
                "parameters that had the same dtype when the ShardedOptimizer was created now have "
                f"{' and '.join(dtypes)}; change dtypes before you create it"
            )
        views = [flat_view(parameter) for parameter in self.parameters]
        self._places = []
        for owned in self._pieces:
            offset, places = 0, []
            for piece in owned:
                view = views[piece.parameter][piece.start : piece.stop]
                places.append((view, slice(offset, offset + piece.numel)))
                offset += piece.numel
            self._places.append(places)

    def launch(self, buffers: Buffers, number: int) -> Launched:
        """Start gathering the other ranks' pieces through buffer `number`. All ranks call this."""
        rank, first = self._channel.rank, self.parameters[0]
        if isinstance(self._channel, SharedChannel):
            row = buffers.get(number, self._row, first.dtype)
            _copy([(row[part], view) for view, part in self._places[rank]])
            return self._channel.gather(row, self._places)
        # Allocate a new buffer each time, which is freed after the all-gather instead of being kept between steps.
        flat = torch.empty(self._channel.size * self._row, dtype=first.dtype, device=first.device)
        rows = list(flat.view(self._channel.size, self._row)) if self._row else []
        _copy([(rows[rank][part], view) for view, part in self._places[rank]])
        return _Staged(self._channel.all_gather(flat), rank, rows, self._places)


class Buffers:
    """Buffers in shared memory, kept between steps because allocating new pages is expensive."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._held = [torch.empty(0, dtype=torch.uint8, device="cpu")] * STAGED

    def get(self, number: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return buffer `number`, with `numel` elements."""
        size = numel * dtype.itemsize
        if self._held[number].numel() < size:
            self._channel.free(self._held[number])
            self._held[number] = self._channel.allocate(size, torch.uint8)
        return self._held[number][:size].view(dtype)


class _Staged:
    """A launched all-gather. wait() copies the other ranks' pieces into the parameters."""

    def __init__(
        self, launched: Launched, rank: int, rows: list[Tensor], places: list[list[tuple[Tensor, slice]]]
    ) -> None:
        self._launched, self._rank, self._rows, self._places = launched, rank, rows, places

    def wait(self) -> None:
        self._launched.wait()
        for owner, (row, places) in enumerate(zip(self._rows, self._places, strict=True)):
            if owner != self._rank:
                _copy([(view, row[part]) for view, part in places])


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        with torch.no_grad():
            copy_each([target for target, _ in pairs], [source for _, source in pairs])


def flat_view(parameter: nn.Parameter) -> Tensor:
    """Return a one-dimensional view of the elements of a dense `parameter`, in memory order.

    Writes to it do not raise the parameter's version counter, because parameters without a gradient are gathered with
    their neighbors, and autograd may still need them.
    """
    return flattened(parameter.data)


def make_dense(parameter: nn.Parameter, name: str) -> None:
    """Move a parameter to dense memory if its layout has gaps, or if some of its elements share memory."""
    expected = 1
    for stride, extent in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if extent != 1 and stride != expected:
            unshared = torch.empty(1, device=parameter.device)
            if count_uses(parameter.untyped_storage()) > count_uses(unshared.untyped_storage()):
                raise UsageError(
                    f"{name} of shape {tuple(parameter.shape)} has strides {parameter.stride()}, which leave gaps "
                    "or use an element twice, and another tensor refers to the same memory; make the parameter "
                    "contiguous, or use the optimizer without ShardedOptimizer"
                )
            parameter.data = parameter.data.contiguous()
            return
        expected *= extent
