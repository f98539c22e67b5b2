"""The control block: what ranks tell each other in every synchronized backward besides the gradients.

One float64 vector, summed over the ranks in one collective of its own:

    [ presence × P | non-finite × P | late × P | sparse × P | status of rank 0 | status of rank 1 | … | order × P ]

Per parameter, a count of ranks; per rank, the fields of :class:`Status`, each rank filling only its own part. The order
in which gradients arrived, counted from 1, is rank 0's part, and is there only until it is known.
Float64 holds whole numbers exactly up to 2**53. Everything here is a function of plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from paceline.ddp.agreement.weighting import UNWEIGHTED, WEIGHTED
from paceline.errors import DesyncError, NonFiniteGradient
from paceline.rollcall import named_ranks
from paceline.sources import Origin, difference, who_has

Allocate = Callable[..., Tensor]
"""``allocate(numel, dtype=…)``: a zeroed tensor on the CPU."""
NO_DATA = Origin()


@dataclass
class Status:
    """One rank's report of itself."""

    forwards: int = 0
    """Forwards that broadcast buffers (training mode, outside ``no_sync``), since the wrapper was made."""
    optimizer_steps: int = 0
    """Optimizer steps over this model's parameters."""
    epoch: int = -1
    """The watched sampler's epoch; -1 without one."""
    position: int = -1
    """The watched sampler's position in the epoch."""
    weight: float = 0.0
    """Sum of ``model.weight(w)`` since the last synchronization."""
    weighting: int = 0
    """Bits ``UNWEIGHTED``, ``WEIGHTED``: how backwards ran since the last synchronization; ``UNCOUNTED``: the rank has
    no data and is left out of the mean."""
    non_finite: int = 0
    """How many of this rank's own gradients hold NaN or Inf, where that is looked for."""
    aborted: bool = False
    """Whether an exception ended this rank's backward before its end."""
    idle: bool = False
    """Whether this rank has no gradient at all, as one without data."""
    joined: bool = False
    """Whether this rank has run out of data inside ``join``; what must be equal then leaves it out."""
    hook_failed: bool = False
    """Whether a communication hook raised on this rank, or returned no future."""
    changed: bool = False
    """Whether this rank has a gradient of a parameter that came into the module after it was wrapped."""
    data: Origin = NO_DATA
    """Where the batches since the last synchronization came from."""

    @property
    def row(self) -> tuple[float, ...]:
        """The status as numbers."""
        return (*(getattr(self, name) for name in _NAMES), *self.data)

    @property
    def note(self) -> tuple[float, float]:
        """Return weight and weighting, on which the scale of the gradients depends."""
        return self.weight, self.weighting


_EQUAL = {
    "forwards": (
        "forward passes in training mode",
        "each broadcasts the model's buffers, so run every forward on all ranks, evaluate under model.eval() or "
        "torch.no_grad(), and call model.sync_gradients() on a rank that has no data; forward_sync_buffers=False lets "
        "the numbers differ",
    ),
    "optimizer_steps": ("optimizer steps", "call optimizer.step() on all ranks in the same steps"),
    "epoch": ("as the sampler's epoch", "call set_epoch() alike on all ranks"),
    "position": ("as the sampler's position", "consume the same number of batches on all ranks"),
}
_SECTIONS = 4
_KINDS: dict[str, Any] = {field.name: type(field.default) for field in fields(Status) if field.name != "data"}
_NAMES = tuple(_KINDS)
_WIDTH = len(_KINDS) + len(Origin._fields)


class ControlBlock:
    """One rank's block: filled during backward, summed, then read."""

    def __init__(self, names: Sequence[str], rank: int, size: int, allocate: Allocate = torch.zeros) -> None:
        self.names = names
        self.rank, self.size, self.count = rank, size, len(names)
        self._end = _SECTIONS * self.count + size * _WIDTH  # of the part that stays
        self.vector = allocate(self._end + self.count, dtype=torch.float64)
        self._everywhere = torch.full((self.count,), float(size), dtype=torch.float64)
        # Counts of ranks in a step in which every rank has every gradient, in its bucket and finite.
        self._usual_counts = torch.cat([self._everywhere, torch.zeros((_SECTIONS - 1) * self.count).double()])

    def fill(
        self,
        absent: list[int],
        non_finite: list[int],
        late: list[int],
        status: Status,
        sparse: Sequence[int] = (),
        order: Sequence[int] = (),
    ) -> Tensor:
        """Write this rank's part; returns the vector to be summed over the ranks."""
        status = replace(status, non_finite=len(non_finite), idle=len(absent) == self.count)
        self.vector.zero_()
        self.vector[: self.count] = 1
        for section, indices, value in ((0, absent, 0.0), (1, non_finite, 1.0), (2, late, 1.0), (3, sparse, 1.0)):
            if indices:
                self.vector[[section * self.count + index for index in indices]] = value
        start = _SECTIONS * self.count + self.rank * _WIDTH
        self.vector[start : start + _WIDTH] = torch.tensor(status.row, dtype=torch.float64)
        if order:
            self.vector[self._end :] = torch.tensor(order, dtype=torch.float64) + 1
        return self.vector

    def order(self) -> list[int]:
        """Parameters in rank 0's order of arrival; empty if it told none."""
        told = self.vector[self._end :]
        return [int(place) - 1 for place in told.tolist()] if told.any() else []

    def forget_order(self) -> None:
        """Leave the order out from now on; on all ranks alike."""
        self.vector = self.vector[: self._end]

    def absent_everywhere(self) -> list[int]:
        """Parameters for which no rank had a gradient."""
        presence = self.vector[: self.count]
        if torch.equal(presence, self._everywhere):
            return []
        return (presence == 0).nonzero().flatten().tolist()

    def second_pass(self) -> tuple[list[int], list[int]]:
        """Parameters to be averaged apart from the buckets: as sparse gradients, and as dense ones.

        Sparse, if every gradient that any rank has of it is sparse. Dense, if a rank has a late delta, or a sparse
        gradient where another's is dense.
        """
        if not self.vector[2 * self.count : _SECTIONS * self.count].any():
            return [], []
        presence, _, late, sparse = self.vector[: _SECTIONS * self.count].view(_SECTIONS, self.count)
        wholly = (sparse > 0) & (sparse == presence)
        dense = (late + sparse > 0) & ~wholly
        return wholly.nonzero().flatten().tolist(), dense.nonzero().flatten().tolist()

    def statuses(self) -> list[Status]:
        """Return every rank's report, in the order of ranks."""
        rows = self.vector[_SECTIONS * self.count : self._end].view(self.size, _WIDTH).tolist()
        return [_status_of(row) for row in rows]

    def missing_somewhere(self, statuses: Sequence[Status]) -> list[int]:
        """Parameters without a gradient on a rank that has others.

        None are named where a backward was ended by an exception, nor where the module has other parameters now.
        """
        if any(status.aborted or status.changed for status in statuses):
            return []
        working = self.size - sum(status.idle for status in statuses)
        return (self.vector[: self.count] < working).nonzero().flatten().tolist()

    def is_without_surprise(self, statuses: Sequence[Status]) -> bool:
        """Whether all ranks have run an unweighted backward that asks for nothing but the averages in its buckets."""
        plain = all(
            status.weighting == UNWEIGHTED
            and not (status.aborted or status.joined or status.hook_failed or status.changed)
            for status in statuses
        )
        return plain and torch.equal(self.vector[: _SECTIONS * self.count], self._usual_counts)

    def _marked(self, section: int) -> list[int]:
        marks = self.vector[section * self.count : (section + 1) * self.count]
        return marks.nonzero().flatten().tolist()

    def check(self, statuses: Sequence[Status]) -> None:
        """Raise, on every rank alike, if ranks differ in what must be equal or a gradient is not finite.

        Raises:
            DesyncError: ranks differ; names what, the values and the ranks.
            NonFiniteGradient: NaN or Inf in a gradient; names parameters.
        """
        if aborted := [rank for rank, status in enumerate(statuses) if status.aborted]:
            if self.rank not in aborted:
                raise DesyncError(
                    f"rank {self.rank}: backward was ended by an exception on {named_ranks(aborted)}, so the gradients "
                    "of this step are not whole; see that rank's own error, and leave this step out on every rank "
                    "if training is to go on"
                ).because_of(())  # that rank itself tells why
            return
        for name, (noun, remedy) in _EQUAL.items():
            values = {rank: getattr(status, name) for rank, status in enumerate(statuses) if not status.joined}
            if len(set(values.values())) > 1:
                raise DesyncError(f"ranks differ: {who_has(values, noun)}; {remedy}")
        origins = {rank: status.data for rank, status in enumerate(statuses) if not status.joined}
        if len(set(origins.values())) > 1 and (found := difference(origins)):
            raise DesyncError(found)
        modes = [status.weighting for status in statuses]
        if any(mode & UNWEIGHTED for mode in modes) and any(mode & WEIGHTED for mode in modes):
            without = [rank for rank, mode in enumerate(modes) if mode & UNWEIGHTED]
            raise DesyncError(
                f"ranks differ: {named_ranks(without)} ran backward outside model.weight(), the others inside; "
                "weigh every micro-batch on every rank, or none"
            )
        if bad := self._marked(1):
            where = [rank for rank, status in enumerate(statuses) if status.non_finite]
            raise non_finite(where, [self.names[index] for index in bad], self.count)


def non_finite(ranks: Sequence[int], names: Sequence[str], count: int) -> NonFiniteGradient:
    """The error of gradients that are not finite: on which ranks, of which of `count` parameters."""
    shown = ", ".join(map(repr, names[:5])) + (", …" if len(names) > 5 else "")
    return NonFiniteGradient(
        f"the gradient holds NaN or Inf on {named_ranks(ranks)}, in {shown} ({len(names)} of {count} parameters); no "
        "optimizer step was taken, look at this batch's loss and at the learning rate"
    )


def _status_of(row: Sequence[float]) -> Status:
    kinds = _KINDS.values()
    plain = [kind(value) for kind, value in zip(kinds, row[: len(_KINDS)], strict=True)]
    return replace(Status(*plain), data=Origin(*map(int, row[len(_KINDS) :])))
