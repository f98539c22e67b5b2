"""The control block: a report that ranks exchange alongside the gradients when digests do not suffice.

One float64 vector, summed over the ranks in a separate collective:

    [ presence × P | non-finite × P | late × P | sparse × P | status of rank 0 | status of rank 1 | … | order × P ]

The first four sections count ranks for each parameter. Each rank fills in its own status, with the fields of
:class:`Status`. The order section numbers rank 0's gradients from 1 as they arrive, and is omitted once the order is
known. Float64 represents integers exactly up to 2**53. The functions in this module do not communicate; they work on
plain values.

Decision 0002 says why.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from paceline.core.data_position import Origin, difference, who_has
from paceline.core.missing_ranks import named_ranks
from paceline.core.stacks import warn
from paceline.ddp.weights import BY_SLICE, UNWEIGHTED, WEIGHTED
from paceline.errors import DesyncError, NonFiniteGradient

Allocate = Callable[..., Tensor]
"""``allocate(numel, dtype=…)``: a zeroed tensor on the CPU."""
NO_DATA = Origin()


@dataclass
class Status:
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
    """Digest of the optimizers' settings; see :mod:`.optimizer_settings`."""
    data: Origin = NO_DATA
    """The source of the batches since the last synchronization."""

    @property
    def row(self) -> tuple[float, ...]:
        return (*_plain_fields(self), *self.data)

    @property
    def note(self) -> tuple[float, float]:
        """Weight and weighting, which determine the scale of the gradients."""
        return self.weight, self.weighting


_EQUAL = {
    "forwards": (
        "steps with a forward pass in training mode",
        # Ranks must broadcast equally often. If none broadcasts, `forwards` stays 0 on all ranks.
        "each broadcasts the model's buffers, so run such a forward or, without data, model.sync_gradients() on "
        "every rank; forward_sync_buffers=False lets the numbers differ",
    ),
    "optimizer_steps": ("optimizer steps", "call optimizer.step() on all ranks in the same steps"),
}
_SECTIONS = 4  # presence, non-finite, late, sparse: each holds one number per parameter
_KINDS: dict[str, Any] = {field.name: type(field.default) for field in fields(Status) if field.name != "data"}
_NAMES = tuple(_KINDS)
_plain_fields = attrgetter(*_NAMES)
_WIDTH = len(_KINDS) + len(Origin._fields)
_NON_FINITE, _IDLE = _NAMES.index("non_finite"), _NAMES.index("idle")


class ControlBlock:
    """One rank's block: filled during backward, summed, then read."""

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
        """Return whether all ranks ran an unweighted backward pass and need only the averages in the buckets."""
        plain = all(
            status.weighting == UNWEIGHTED and not (status.aborted or status.joined or status.has_new_parameters)
            for status in statuses
        )
        return plain and self.is_usual()

    def is_settled(self, statuses: Sequence[Status]) -> bool:
        """Return whether :meth:`is_without_surprise` holds, all reports are equal, and no rank has a request."""
        asks = statuses[0].asks_to_stop or statuses[0].compares
        return _agree(statuses) and not asks and self.is_without_surprise(statuses[:1])

    def _marked(self, section: int) -> list[int]:
        marks = self.vector[section * self.count : (section + 1) * self.count]
        return marks.nonzero().flatten().tolist()

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
        if bad := self._marked(1):
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
