"""The replica check: compares the replicas bit by bit after step 1, 3, 7, 15, …, or every k steps.

The check also runs in the step after a backward pass that the wrapper did not see (:meth:`.Ledger.backward_began`), and
in the first synchronized backward pass after ``local_steps`` (:meth:`ReplicaCheck.request`).

Replicas can drift apart, unnoticed by any other check, because of a backward pass that bypasses the wrapper, a forward
or a hook that writes to weights, a flipped bit, or optimizers that differ between ranks. Each rank computes a 64-bit
digest of each parameter, and combines the digests into one number. A small collective gathers these numbers during a
synchronized backward pass, when all ranks are at the same step. Only if the numbers differ are all digests gathered, to
find the parameter.

The digest of optimizer settings in the ranks' status is compared in every step; here a difference gets its name.
Optimizer state is not compared: a difference is found once it has changed a parameter. Nor are buffers: a broadcast
makes them equal in every step, and with ``broadcast_buffers=False`` they may differ, as BatchNorm's statistics do.

Decision 0058 says why.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.core.digests import quick_digest
from paceline.core.missing_ranks import named_ranks
from paceline.core.torch_distributed import local_of
from paceline.ddp.backward import Backward
from paceline.ddp.channel import Channel, Pausing
from paceline.ddp.control_block import Status, find_difference
from paceline.ddp.extension_points import Exchanged, Extension
from paceline.ddp.ledger import Ledger
from paceline.ddp.options import check_synchronized
from paceline.errors import ReplicaMismatch

_WHAT = "comparison of replicas"


class ReplicaCheck(Extension):
    """Compares the parameters of the ranks of `channel` every `every` optimizer steps, or at doubling intervals if 0.

    ``named_parameters()`` returns the current parameters, because a module's parameters may change after wrapping.
    """

    def __init__(
        self,
        every: int,
        named_parameters: Callable[[], Sequence[tuple[str, nn.Parameter]]],
        ledger: Ledger,
        channel: Channel,
    ) -> None:
        self._every, self._ledger, self._channel = every, ledger, channel
        self._named_parameters = named_parameters
        self._checked_at = 0
        # Digests of the parameters, and the number of synchronizations at the time they were computed.
        self._noted: dict[str, Tensor] = {}
        self._noted_at = -1

    def is_active(self) -> bool:
        """Return whether checks run at regular intervals; others are requested through :attr:`.Ledger.compare_at`."""
        return self._every > 0

    def begin_capture(self) -> bool:
        """Turn off default comparisons when a CUDA graph begins; returns whether regular checks prevent the capture."""
        self._ledger.compare_at = inf
        return self.is_active()

    def request(self) -> None:
        """Request a comparison in the next synchronized backward pass, unless the replicas are never compared."""
        if self.is_active() or self._ledger.compare_at < inf:
            self._ledger.compare_at, self._ledger.compares_out_of_turn = self._ledger.synchronizations, True

    def note(self) -> None:
        """Digest the parameters before a forward pass of a step that ends with a comparison.

        This is done only at the first forward pass of a step, because SAM may perturb the weights locally after it.
        """
        if self._noted_at != self._ledger.synchronizations:
            self._noted_at, self._noted = self._ledger.synchronizations, self._parameters()

    def has_report(self, backward: Backward) -> bool:
        """Return whether a check is due, based on the number of steps that this rank has taken."""
        return self._is_due(self._ledger.status.optimizer_steps)

    def _is_due(self, steps: int) -> bool:
        return self._every > 0 and steps >= self._checked_at + self._every

    def after_averages(self, backward: Backward, exchanged: Exchanged) -> Pausing[None]:
        message = yield from self._compare(exchanged.statuses)
        if message is not None:
            backward.defer_error(ReplicaMismatch(message))

    def _compare(self, statuses: Sequence[Status]) -> Pausing[str | None]:
        """Compare replicas if a check is due on all ranks; returns a sentence about the first difference, or None."""
        # The decision is based on the statuses, which are the same on every rank, rather than on this rank's own count.
        steps, ledger = statuses[0].optimizer_steps, self._ledger
        # A rank that has run out of data inside join() takes no steps; it receives the final model when join() ends.
        stands_apart = any(report.aborted or report.joined or report.optimizer_steps != steps for report in statuses)
        is_asked = all(status.compares for status in statuses)
        if any(status.compares for status in statuses) or ledger.synchronizations >= ledger.compare_at:
            # The interval doubles, so the cost becomes negligible. If only some ranks made a request out of turn, the
            # other ranks have not digested their parameters before the forward pass, so all ranks compare in the next
            # step instead.
            is_postponed = not (is_asked or stands_apart)
            doubled = inf if self._every else 2 * ledger.synchronizations + 1
            ledger.compare_at = ledger.synchronizations + 1 if is_postponed else doubled
            ledger.compares_out_of_turn = False
        if len({status.settings for status in statuses}) > 1 and not stands_apart:
            difference = find_difference(self._channel.all_gather_object(ledger.settings.by_parameter()))
            if difference is not None:
                return difference
            ledger.settings.comparisons_left -= 1
        if stands_apart or not (is_asked or self._is_due(steps)):
            return None
        self._checked_at = steps
        local = self._digests()
        rows = yield from self._channel.gather_numbers([_number(str(local)), len(local)], _WHAT)
        if len({row[0] for row in rows}) == 1:
            return None
        numbers = [number for name, digest in local.items() for number in (_number(name), digest)]
        padding = [0] * (2 * max(row[1] for row in rows) - len(numbers))
        rows = yield from self._channel.gather_numbers(numbers + padding, _WHAT)
        held = [dict(zip(row[::2], row[1::2], strict=True)) for row in rows]
        # Ranks may hold different parameters, for example frozen ones that only some ranks added; compare the others.
        common = [name for name in local if all(_number(name) in digests for digests in held)]
        digests_of_ranks = [[digests[_number(name)] for name in common] for digests in held]
        return drift(common, digests_of_ranks, ledger.steps_of_job)

    def _parameters(self) -> dict[str, Tensor]:
        named = [(name, parameter) for name, parameter in self._named_parameters() if not is_lazy(parameter)]
        check_synchronized(named)
        return {name: quick_digest(local_of(parameter)) for name, parameter in named}

    def _digests(self) -> dict[str, int]:
        # Digests may be left over from an earlier step, for instance if this rank was inside join() then.
        is_current = self._noted_at == self._ledger.synchronizations
        digests = self._noted if is_current else self._parameters()
        self._noted = {}
        return _on_host(dict(sorted(digests.items())))


def drift(names: Sequence[str], rows: Sequence[Sequence[int]], steps: int) -> str | None:
    """Describe in one sentence the first parameter that differs, given every rank's digests; None if all are equal.

    The value held by most ranks counts as correct; in a tie, rank 0's value does.
    """
    columns = {name: [row[place] for row in rows] for place, name in enumerate(names)}
    differing = [name for name, column in columns.items() if len(set(column)) > 1]
    if not differing:
        return None
    name = differing[0]
    column = columns[name]
    counts = Counter(column)
    usual = max(counts, key=lambda value: (counts[value], value == column[0]))
    odd = [rank for rank, value in enumerate(column) if value != usual]
    others = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    return (
        f"after optimizer step {steps}, parameter {name!r}{others} has different bits on {named_ranks(odd)} than on "
        f"rank {column.index(usual)}, so the replicas have drifted apart; start again from the last checkpoint; look "
        "for a backward pass that bypasses the wrapper, an update from gradients under no_sync() (in SAM, synchronize "
        "the first backward pass too), local_steps() whose parameters were not averaged before this step, a hook or a "
        "forward that changes weights based on one rank's samples, or faulty memory; list parameters that may differ "
        "in module._ddp_params_and_buffers_to_ignore"
    )


def _on_host(digests: Mapping[str, Tensor]) -> dict[str, int]:
    """Read `digests`, each a single number, waiting only once per device."""
    read: dict[str, int] = {}
    for device in {digest.device for digest in digests.values()}:
        names = [name for name, digest in digests.items() if digest.device == device]
        read.update(zip(names, torch.stack([digests[name] for name in names]).tolist(), strict=True))
    return {name: read[name] for name in digests}


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
