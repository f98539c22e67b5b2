"""A rank's report to the others: a digest of its status in the last bucket, or a control block with all of it.

The functions in this module do not communicate; they work on plain values. Decisions 0002 and 0049 give the reasons.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf
from numbers import Real
from operator import attrgetter, is_
from struct import pack, unpack
from typing import Any, TypeAlias
from weakref import ref
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.data_position import Origin, difference, who_has
from paceline.core.missing_ranks import named_ranks
from paceline.core.stacks import warn
from paceline.ddp.weights import BY_SLICE, UNWEIGHTED, WEIGHTED
from paceline.errors import DesyncError, NonFiniteGradient

Allocate = Callable[..., Tensor]
"""``allocate(numel, dtype=…)``: a zeroed tensor on the CPU."""
Notes: TypeAlias = Sequence[tuple[float, float]]
"""Weight and weighting of every rank; see :attr:`Status.note`."""
NO_DATA = Origin()


@dataclass
class Status:
    """One rank's progress, and its requests.

    On CPU ranks, fields are exchanged only if digests differ or are missing. So a field that other ranks must see is
    part of :meth:`.Ledger.position`, or that method returns None when the field is set.
    """

    forwards: int = 0
    """Number of steps with a forward pass that broadcasts buffers (training mode, outside ``no_sync``), since the
    wrapper was created."""
    optimizer_steps: int = 0
    """Number of optimizer steps taken on this model's parameters."""
    weight: float = 0.0
    """Sum of ``model.weight(w)`` since the last synchronization."""
    weighting: int = 0
    """Bit flags. ``UNWEIGHTED`` and ``WEIGHTED`` record whether the backward passes since the last synchronization ran
    without or with weights; ``UNCOUNTED`` marks a rank that has no data and is left out of the mean."""
    non_finite: int = 0
    """Number of this rank's gradients that contain NaN or Inf, if the check is on."""
    aborted: bool = False
    """Whether an exception interrupted the backward pass on this rank."""
    idle: bool = False
    """Whether this rank has no gradients at all, for example because it has no data."""
    joined: bool = False
    """Whether this rank has run out of data inside ``join``; comparisons between ranks skip it."""
    has_new_parameters: bool = False
    """Whether this rank's module has parameters that are not averaged yet."""
    asks_to_stop: bool = False
    """Whether this rank has asked all ranks to stop training."""
    inputs: int = 0
    """Digest of the first forward's inputs, reported in the first synchronization; 0 otherwise."""
    compares: bool = False
    """Whether this rank requests a comparison of the replicas; used when ``check_replicas_every`` is not set."""
    settings: int = 0
    """Digest of the optimizers' settings; see :class:`OptimizerSettings`."""
    data: Origin = NO_DATA
    """The source of the batches since the last synchronization."""

    @property
    def row(self) -> tuple[float, ...]:
        return (*_plain_fields(self), *self.data)

    @property
    def note(self) -> tuple[float, float]:
        """Weight and weighting, which determine the scale of the gradients."""
        return self.weight, self.weighting


# One byte per element, because bfloat16 represents every whole number only up to 256.
_DIGEST = 1 + 8  # elements of a slot that precede the weight
_SLOT = _DIGEST + 8


def tail_width(size: int) -> int:
    """Return the number of elements in the tail for a group of `size` ranks."""
    return _SLOT * size


class StatusDigest:
    """A few bytes that show, without another collective, that ranks do not need control blocks.

    Each rank writes its weight and a digest of its status to its slot in the tail of the last bucket. A rank that needs
    to report anything else leaves its slot at zero. After the bucket is reduced, every rank reads the same tail: if all
    digests are present and equal, the step is over; otherwise all ranks exchange their control blocks. Each rank
    decides on its own, but because all read the same tail, they launch the same collectives::

        [ slot of rank 0 | slot of rank 1 | … ]   a slot: 1, 8 bytes of digest, 8 bytes of weight, one byte per element

    Only one rank writes to each slot, so sums are exact in every floating-point type, including bfloat16.

    Args:
        rank: this rank in its group.
        size: number of ranks in the group.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._bytes = bytearray(tail_width(size))
        self._slots = torch.frombuffer(self._bytes, dtype=torch.uint8)  # shares memory, so a step creates no tensor
        self._own = slice(rank * _SLOT, (rank + 1) * _SLOT)
        self._starts = range(0, tail_width(size), _SLOT)
        self._unweighted = [(0.0, UNWEIGHTED)] * size

    def write(self, tail: Tensor, numbers: tuple[int, ...] | None, weight: float) -> None:
        """Fill the `tail` of a bucket with the weight and a digest of `numbers`, which must be equal on every rank.

        If `numbers` is None, this rank has more to report, and the tail is filled with zeros.
        """
        if numbers is None:
            tail.zero_()
            return
        # The leading 1 distinguishes a digest of zeros from an empty slot.
        self._bytes[self._own] = pack("<Bqd", 1, hash(numbers), weight)
        tail.copy_(self._slots)

    def read(self, tail: Tensor, weighting: int) -> Notes | None:
        """Return each rank's weight, paired with `weighting`, if the digests agree; otherwise None."""
        slots = tail.tolist()
        first = slots[:_DIGEST]
        # Zeros mean that a rank has more to report; Inf or NaN means that the sum went wrong.
        if not 0 < first[0] < inf or any(slots[start : start + _DIGEST] != first for start in self._starts):
            return None
        if weighting == UNWEIGHTED:
            return self._unweighted
        weights = [bytes(map(int, slots[start + _DIGEST : start + _SLOT])) for start in self._starts]
        return [(unpack("<d", weight)[0], weighting) for weight in weights]


MORE = 0
"""The content of a report that only says that this rank has more to report."""
DIGEST, LEAST_DIGEST = 2**48 - 2, 2
"""Bits of a report that hold the digest, and the digest that stands for 0, which would mean :data:`MORE`."""
AWAITS = 1
"""Flag in a report: the rank reads the other ranks' reports before its backward pass ends."""


def content_of(numbers: tuple[int, ...] | None, *, awaits: bool = False) -> int:
    """Return the 48 bits that this rank posts on the board: a digest of `numbers`; :data:`MORE` if there are none."""
    flag = AWAITS if awaits else 0
    return flag if numbers is None else (hash(numbers) & DIGEST or LEAST_DIGEST) | flag


_EQUAL = {
    "forwards": (
        "steps with a forward pass in training mode",
        # Ranks must broadcast equally often. If none broadcasts, `forwards` stays 0 on all ranks.
        "each broadcasts the model's buffers, so run such a forward or, without data, model.sync_gradients() on "
        "every rank; forward_sync_buffers=False lets the numbers differ",
    ),
    "optimizer_steps": ("optimizer steps", "run backward() and optimizer.step() in the same steps on all ranks"),
}
_SECTIONS = 4  # presence, non-finite, late, sparse: each holds one number per parameter
_KINDS: dict[str, Any] = {field.name: type(field.default) for field in fields(Status) if field.name != "data"}
_NAMES = tuple(_KINDS)
_plain_fields = attrgetter(*_NAMES)
_WIDTH = len(_KINDS) + len(Origin._fields)
_NON_FINITE, _IDLE = _NAMES.index("non_finite"), _NAMES.index("idle")


class ControlBlock:
    """One rank's block: filled during backward, summed over the ranks in a separate collective, then read.

    It is one float64 vector::

        [ presence × P | non-finite × P | late × P | sparse × P | status of rank 0 | status of rank 1 | … | order × P ]

    The first four sections count ranks for each parameter. Each rank fills in its own status, with the fields of
    :class:`Status`. The order section numbers rank 0's gradients from 1 as they arrive, and is omitted once the order
    is known. Float64 represents integers exactly up to 2**53.
    """

    def __init__(self, names: Sequence[str], rank: int, size: int, allocate: Allocate = torch.zeros) -> None:
        self.names = names
        self.rank, self.size, self.count = rank, size, len(names)
        self._end = _SECTIONS * self.count + size * _WIDTH  # start of the order, which is dropped once it is known
        self.vector = allocate(self._end + self.count, dtype=torch.float64)
        # The values that this rank contributes when it has every gradient. The tensor shares its memory with the array:
        # the status is written into the array, so a step needs one copy and creates no tensor.
        self._numbers = array("d", [1.0] * self.count + [0.0] * (len(self.vector) - self.count))
        self._usual = torch.frombuffer(self._numbers, dtype=torch.float64)
        # The summed counts (without the statuses) when every rank has every gradient.
        self._usual_counts = self._usual.new_tensor([float(size)] * self.count + [0.0] * (_SECTIONS - 1) * self.count)
        self._counts = self.vector[: _SECTIONS * self.count]
        # Whether the sums equal these counts; None until the first query.
        self._is_usual: bool | None = None
        # The last report of this rank, as numbers and as a status.
        self._own: tuple[list[float], Status] = [], Status()

    def fill(
        self,
        absent: Sequence[int],
        non_finite: Sequence[int],
        late: Sequence[int],
        status: Status,
        sparse: Sequence[int] = (),
        order: Sequence[int] = (),
    ) -> Tensor:
        """Write this rank's part; returns the vector to be summed over the ranks."""
        row = array("d", status.row)
        row[_NON_FINITE], row[_IDLE] = len(non_finite), len(absent) == self.count
        start = _SECTIONS * self.count + self.rank * _WIDTH
        self._numbers[start : start + _WIDTH] = row
        self._own, self._is_usual = (row.tolist(), status), None
        self.vector.copy_(self._usual)
        for section, indices, value in ((0, absent, 0.0), (1, non_finite, 1.0), (2, late, 1.0), (3, sparse, 1.0)):
            if indices:
                self.vector[[section * self.count + index for index in indices]] = value
        if order:
            self.vector[self._end :] = torch.tensor(order, dtype=torch.float64, device="cpu") + 1
        return self.vector

    def order(self) -> list[int]:
        """Return the parameters in rank 0's order of arrival; an empty list if it reported none."""
        order = self.vector[self._end :]  # counted from 1; all zeros if rank 0 reported no order
        return [int(place) - 1 for place in order.tolist()] if order.any() else []

    def forget_order(self) -> None:
        """Omit the order from now on; called on all ranks."""
        self.vector, self._usual = self.vector[: self._end], self._usual[: self._end]

    def is_usual(self) -> bool:
        """Return whether every rank had every gradient in its bucket and found only finite gradients.

        If so, the per-parameter counts contain no further information.
        """
        # Computed once per step, because every reader below asks this first.
        if self._is_usual is None:
            self._is_usual = torch.equal(self._counts, self._usual_counts)
        return self._is_usual

    def absent_everywhere(self) -> list[int]:
        if self.is_usual():
            return []
        return (self.vector[: self.count] == 0).nonzero().flatten().tolist()

    def second_pass(self) -> tuple[list[int], list[int]]:
        """Return the parameters to average outside the buckets, first the sparse ones and then the dense ones.

        A parameter is sparse if every rank's gradient is sparse. It is dense if some rank has a late delta, or if one
        rank has a sparse gradient and another a dense one.
        """
        if self.is_usual():
            return [], []
        presence, _, late, sparse = self.vector[: _SECTIONS * self.count].view(_SECTIONS, self.count)
        wholly = (sparse > 0) & (sparse == presence)
        dense = (late + sparse > 0) & ~wholly
        return wholly.nonzero().flatten().tolist(), dense.nonzero().flatten().tolist()

    def statuses(self) -> list[Status]:
        rows = self.vector[_SECTIONS * self.count : self._end].view(self.size, _WIDTH).tolist()
        numbers, status = self._own
        # The usual case: all ranks report the same status, so this rank's status object can stand for all of them.
        if self.is_usual() and all(row == numbers for row in rows):
            return [status] * self.size
        return [_status_of(row) for row in rows]

    def missing_somewhere(self, statuses: Sequence[Status]) -> list[int]:
        """Return the parameters that lack a gradient on at least one rank, ignoring ranks without any gradients.

        The list is empty if an exception interrupted a backward pass.
        """
        if self.is_usual() or any(status.aborted for status in statuses):
            return []
        working = self.size - sum(status.idle for status in statuses)
        return (self.vector[: self.count] < working).nonzero().flatten().tolist()

    def is_without_surprise(self, statuses: Sequence[Status]) -> bool:
        """Return whether all ranks ran the same kind of backward pass and need only the averages in the buckets."""
        plain = all(
            status.weighting == statuses[0].weighting
            and status.weighting & ~BY_SLICE in (UNWEIGHTED, WEIGHTED)
            and not (status.aborted or status.joined or status.has_new_parameters)
            for status in statuses
        )
        return plain and self.is_usual()

    def check(self, statuses: Sequence[Status]) -> None:
        """Raise on every rank if a gradient is not finite or if numbers that must be equal differ between ranks."""
        # A source of -1 means that the data comes from another loader, which may not split it over the ranks.
        if statuses[0].inputs and statuses[0].data.source == -1 and self.rank == 0:
            _warn_of_equal([status.inputs for status in statuses])
        if self.is_usual() and _agree(statuses):
            return
        # Check this first: an aborted rank has incomplete gradients, and its other numbers may differ as a consequence.
        if aborted := [rank for rank, status in enumerate(statuses) if status.aborted]:
            if self.rank not in aborted:
                raise DesyncError(
                    f"rank {self.rank}: backward was ended by an exception on {named_ranks(aborted)}, so the gradients "
                    "of this step are incomplete; see that rank's own error; to continue training, skip this step on "
                    "every rank"
                ).because_of(())  # so that the launcher names the rank that raised, not this one
            return
        for name, (noun, remedy) in _EQUAL.items():
            values = {rank: getattr(status, name) for rank, status in enumerate(statuses) if not status.joined}
            if len(set(values.values())) > 1:
                raise DesyncError(f"ranks differ: {who_has(values, noun)}; {remedy}")
        origins = {rank: status.data for rank, status in enumerate(statuses) if not status.joined}
        if len(set(origins.values())) > 1 and (text := difference(origins)):
            raise DesyncError(text)
        modes = [status.weighting for status in statuses]
        plain = UNWEIGHTED, WEIGHTED | UNWEIGHTED, WEIGHTED | BY_SLICE
        without = [rank for rank, mode in enumerate(modes) if mode in plain]
        if without and any(mode & WEIGHTED and not mode & BY_SLICE for mode in modes):
            raise DesyncError(
                f"ranks differ: {named_ranks(without)} averaged gradients computed outside model.weight(), the other "
                "ranks inside; use model.weight() for every micro-batch on every rank, or for none; without data, call "
                "optimizer.zero_grad() before model.sync_gradients()"
            )
        if bad := self.vector[self.count : 2 * self.count].nonzero().flatten().tolist():
            where = [rank for rank, status in enumerate(statuses) if status.non_finite]
            raise non_finite(where, [self.names[index] for index in bad], self.count)


def non_finite(ranks: Sequence[int], names: Sequence[str], count: int) -> NonFiniteGradient:
    """Return the error for gradients that are not finite on `ranks`, for parameters `names` out of `count`."""
    shown = ", ".join(map(repr, names[:5])) + (", …" if len(names) > 5 else "")
    return NonFiniteGradient(
        f"the gradient holds NaN or Inf on {named_ranks(ranks)}, in {shown} ({len(names)} of {count} parameters); no "
        "optimizer step was taken; check this batch's loss and the learning rate"
    )


def _agree(statuses: Sequence[Status]) -> bool:
    """Return whether all ranks report the same status, without errors; true in most steps."""
    first = statuses[0]
    if first.aborted or (first.weighting & UNWEIGHTED and first.weighting & WEIGHTED):
        return False
    # Comparing by identity is enough: if all ranks report the same numbers, statuses() repeats one object.
    return all(status is first for status in statuses)


def _status_of(row: Sequence[float]) -> Status:
    plain = {name: kind(value) for (name, kind), value in zip(_KINDS.items(), row[: len(_KINDS)], strict=True)}
    return Status(**plain, data=Origin(*map(int, row[len(_KINDS) :])))


def _warn_of_equal(digests: list[int]) -> None:
    if digests[0] and len(set(digests)) == 1 < len(digests):
        warn(
            f"the inputs of the first forward are the same on all {len(digests)} ranks, so they all train on the same "
            "samples; let paceline.data.DataLoader split the data, or pass sampler=DistributedSampler(dataset) to "
            "torch's DataLoader instead of shuffle=True; if this is intended, ignore this warning"
        )


ByParameter: TypeAlias = Mapping[int, tuple[str, Mapping[str, Any]]]
"""For each averaged parameter, by index: its group in words, and the group's settings."""
_PLAIN = {float, int, bool, type(None)}


class OptimizerSettings:
    """The settings of one wrapper's optimizers on this rank, in groups with parameters that the wrapper averages.

    Only settings that the optimizer itself defines count. A tensor on a GPU is left out, because reading it would wait.
    Settings are read at the end of the backward pass, from the optimizers that have stepped since the last one. So a
    difference is found before a step is taken with it, unless settings change between backward and step.
    """

    comparisons_left = 0
    """How many more times digests may differ although the settings of each parameter agree, because ranks group the
    parameters differently; at 0, ranks stop comparing. The same on every rank."""

    def __init__(self) -> None:
        self.averaged: Mapping[int, int] = {}
        """Index of each averaged parameter, by id."""
        self.stepped: list[ref[Optimizer]] = []
        """The optimizers that stepped last, each once; cleared when one of them steps again."""
        self._values, self._digest = list[Any](), 0

    def digest(self) -> int:
        """Return a number that is equal on all ranks if the settings are; 0 if they are not compared."""
        if not self.comparisons_left:
            return 0
        values: list[Any] = []
        for reference in self.stepped:
            if (optimizer := reference()) is not None:
                for group in optimizer.param_groups:
                    values.extend(group.values())
        if len(values) != len(self._values) or not all(map(is_, values, self._values)):
            settings = [
                [value if type(value) in _PLAIN else _number(value) for value in map(group.get, optimizer.defaults)]
                for optimizer, _, group in self._groups()
                if not self.averaged.keys().isdisjoint(map(id, group["params"]))
            ]
            self._digest = crc32(repr(settings).encode())
            # The content of a tensor may change.
            self._values = [] if Tensor in map(type, values) else values
        return self._digest

    def by_parameter(self) -> ByParameter:
        return {
            self.averaged[id(parameter)]: (f"in group {number} of {type(optimizer).__name__}", settings)
            for optimizer, number, group in self._groups()
            for settings in [{name: _number(group.get(name)) for name in optimizer.defaults}]
            for parameter in group["params"]
            if id(parameter) in self.averaged
        }

    def _groups(self) -> list[tuple[Optimizer, int, dict[str, Any]]]:
        optimizers = [optimizer for reference in [*self.stepped] if (optimizer := reference()) is not None]
        return [(optimizer, *numbered) for optimizer in optimizers for numbered in enumerate(optimizer.param_groups)]


def _number(value: Any) -> Any:
    """Return a number, or a tuple of numbers, that does not depend on the type of `value`; None for other values."""
    if isinstance(value, Tensor):
        return value.item() if value.is_cpu and value.numel() == 1 else None
    if isinstance(value, tuple):
        return tuple(map(_number, value))
    return value if type(value) in _PLAIN else float(value) if isinstance(value, Real) else None


def find_difference(ranks: Sequence[ByParameter]) -> str | None:
    """Describe the first setting that differs between ranks for the same parameter; None if there is none."""
    for index in sorted(set().union(*ranks)):
        held = {rank: found[index] for rank, found in enumerate(ranks) if index in found}
        place, settings = next(iter(held.values()))
        for name in settings:
            values = {rank: found[name] for rank, (_, found) in held.items() if name in found}
            if len(set(values.values())) > 1:
                remedy = "use equal settings on all ranks; step ReduceLROnPlateau with paceline.mean_over_ranks(loss)"
                return f"ranks differ: {who_has(values, f'as {name} {place}')}; {remedy}"
    return None
