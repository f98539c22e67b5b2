"""Takes in parameters that the module got after it was wrapped: all ranks agree on them, and average them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from paceline.core.state.digests import quick_digest
from paceline.core.torch_internals.distributed.dtensor import local_of
from paceline.ddp.agreement.control_block import non_finite
from paceline.ddp.consistency.initial_sync import first_difference
from paceline.ddp.consistency.module_changes import NON_FINITE, SPARSE, Change, ModuleWatch, OnChange
from paceline.ddp.extensions.out_of_bucket import launch_late, wait_for_late
from paceline.ddp.reducer.backward import Backward
from paceline.ddp.reducer.extension import Exchanged, Extension
from paceline.ddp.reducer.reducer import Reducer
from paceline.ddp.transport.channel import Channel, Pausing
from paceline.ddp.transport.finisher import AllReduce, Sums
from paceline.ddp.transport.sparse import as_dense, average_sparse
from paceline.errors import PacelineError, ReplicaMismatch, UsageError


class NewParameters(Extension):
    """New parameters of one wrapper's module, in the order of a synchronized backward.

    Args:
        reducer: averages the gradients.
        watch: looks at the module.
        found: called with the new parameters when the module has got some, or has none any more.
        on_change: called with all parameters to average, when new ones were found (``False``), and when they are
            averaged (``True``).
    """

    def __init__(
        self,
        reducer: Reducer,
        watch: ModuleWatch,
        found: Callable[[Sequence[nn.Parameter]], None],
        on_change: OnChange,
    ) -> None:
        self._reducer, self._watch = reducer, watch
        self._found, self._on_change = found, on_change
        self._change: Change | None = None

    def is_active(self) -> bool:
        """Return whether the module had parameters that are not averaged yet when it was last inspected."""
        return self._change is not None

    def inspect_module(self) -> None:
        """Notice that the module has changed, or is again as it was."""
        # A checkpoint recomputes forwards inside a backward, which has to end with the parameters of its beginning.
        if self._reducer.is_under_way:
            return
        before, self._change = self._change, self._watch.detect()
        if (change := self._change) is not None:
            change.begin()
        if change is before:
            return
        trained = self._reducer.trained
        self._found([] if change is None else [parameter for _, parameter in change.new])
        placeholders = {} if change is None else change.placeholders
        pairs = zip(trained.originals, trained.local, strict=True)
        self._reducer.use_placeholders([placeholders.get(id(given), local) for given, local in pairs])
        if change is not None:
            self._on_change(change.named, False)
        self.mark_stale()

    def has_report(self, backward: Backward) -> bool:
        backward.has_new_parameters = self._change is not None and self._change.has_gradient()
        return backward.has_new_parameters

    def abort(self, backward: Backward) -> None:
        """Drop the gradients that the backward has made."""
        if self._change is not None:
            self._change.restore()

    def after_averages(self, backward: Backward, exchanged: Exchanged) -> Pausing[None]:
        """Compare the ranks' changes if a rank has gradients of new parameters, and average these if all are equal."""
        statuses = exchanged.statuses
        if any(status.aborted for status in statuses) or not any(status.has_new_parameters for status in statuses):
            return
        # A rank that has noticed no change takes part, too, and learns here that it differs from the others.
        change, channel = self._change or self._watch.unchanged(), self._reducer.channel
        error = yield from _compare(change, channel)
        finisher = self._reducer.finisher
        if error is None and not isinstance(finisher, AllReduce):
            error = _beside_a_hook(change)
        if error is None:
            error = _unfit(change)
        averages: dict[int, Tensor] = {}
        if error is None:
            codes = change.codes(check_finite=self._reducer.checks_finite)
            rows = yield from channel.gather_numbers(codes, _WHAT)
            error = _not_finite(change, rows)
            if error is None:
                sums: Sums = channel
                if self._reducer.virtual_ranks and isinstance(finisher, AllReduce):
                    sums = finisher.sums
                averages = yield from _average(change, rows, exchanged.scale, channel, sums)
        backward.defer(partial(self._accept, change, averages, error))

    def _accept(self, change: Change, averages: Mapping[int, Tensor], error: PacelineError | None) -> None:
        """Show the averages, and average the module's present parameters from now on.

        Args:
            change: this rank's change.
            averages: by index of the new parameter; without parameters for which no rank has a gradient.
            error: raised on every rank, if the changes differ or cannot be taken in.
        """
        if error is not None:
            raise error
        change.show(averages)  # before adopt(), which remembers the gradients in p.grad as averages
        change.close()
        self._change = None
        self._watch.follow(change.named)
        self._on_change(change.named, True)
        self._reducer.adopt(change.named, self._watch.sparse([parameter for _, parameter in change.named]))
        self._found([])

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        if self._change is not None:
            self._change.close()


def _compare(change: Change, channel: Channel) -> Pausing[PacelineError | None]:
    """Return the error if changes differ between ranks, or the values of the new parameters do."""
    text = json.dumps(change.described()).encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)
    rows = yield from channel.gather_numbers([number, len(text)], _WHAT)
    # The texts themselves travel only to find the difference for the message.
    if len({row[0] for row in rows}) > 1:
        padding = [0] * (max(row[1] for row in rows) - len(text))
        texts = yield from channel.gather_numbers([*text, *padding], _WHAT)
        return _differing([json.loads(bytes(each[: row[1]])) for each, row in zip(texts, rows, strict=True)])
    digests = [int(quick_digest(local_of(parameter.detach()))) for _, parameter in change.new]
    rows = yield from channel.gather_numbers(digests, _WHAT)
    for index, (name, _) in enumerate(change.new):
        values = [row[index] for row in rows]
        if len(set(values)) > 1:
            return _other_values(name, next(rank for rank, value in enumerate(values) if value != values[0]))
    return None


def _average(
    change: Change, codes: list[list[int]], scale: float, channel: Channel, sums: Sums
) -> Pausing[dict[int, Tensor]]:
    """Return the averages of new parameters' gradients by index, given every rank's codes for its own.

    `sums` adds up dense ones over the ranks.
    """
    present = [index for index in range(len(change.new)) if any(row[index] for row in codes)]
    sparse = [index for index in present if all(row[index] in (0, SPARSE) for row in codes)]
    gradients = change.gradients()
    targets = change.targets([index for index in present if index not in sparse])
    dense = {index: as_dense(gradient) for index, gradient in gradients.items() if index in targets}
    launched = launch_late(dense, targets, sums)
    yield True
    wait_for_late(launched, targets, scale, channel)
    if sparse:
        names, parameters = zip(*change.new, strict=True)
        targets |= yield from average_sparse(sparse, gradients, parameters, names, scale, channel)
    return targets


_WHAT = "comparison of parameters that were added after wrapping"
_CHANGED = "parameters of the module were added or replaced after it was wrapped"


def _differing(everyone: list[list[list[str]]]) -> ReplicaMismatch:
    described = [[(name, form) for name, form in theirs] for theirs in everyone]
    rank = next(rank for rank, theirs in enumerate(described) if theirs != described[0])
    difference = first_difference(described[0], described[rank], rank, "change the module alike on every rank")
    return ReplicaMismatch(f"{_CHANGED}, and not alike on all ranks: {difference}, or wrap it again")


def _other_values(name: str, rank: int) -> ReplicaMismatch:
    return ReplicaMismatch(
        f"{_CHANGED}, and {name!r} has other values on rank {rank} than on rank 0; wrap the module again, which "
        "broadcasts rank 0's, or make it with the same seed or checkpoint on every rank"
    )


def _beside_a_hook(change: Change) -> UsageError:
    return UsageError(
        f"{_CHANGED}, such as {change.new[0][0]!r}, of which the communication hook that was registered knows nothing; "
        "wrap the module again and register the hook with the new wrapper"
    )


def _unfit(change: Change) -> UsageError | None:
    """Return the error for new parameters that cannot be averaged together with the others."""
    before = [*change.placeholders.values(), *(parameter for _, parameter in change.named)]
    devices = sorted({str(parameter.device) for parameter in before})
    if len(devices) == 1:
        return None
    return UsageError(
        f"{_CHANGED}, or moved from one device to another ({', '.join(devices)}); move the whole module to one device "
        "and wrap it again"
    )


def _not_finite(change: Change, codes: list[list[int]]) -> PacelineError | None:
    named = enumerate(name for name, _ in change.new)
    bad = [name for index, name in named if any(row[index] & NON_FINITE for row in codes)]
    if not bad:
        return None
    where = [rank for rank, row in enumerate(codes) if any(code & NON_FINITE for code in row)]
    return non_finite(where, bad, len(change.named))
