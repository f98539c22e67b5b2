"""Unused parameters: parameters without a gradient on some rank. They are harmless, but can be reported or refused.

For each parameter, the control block contains the number of ranks that have a gradient. The ranks that lack it are
determined only the first time that the parameter is missing. A rank without any gradients had no data and does not
count. Frozen parameters do not count either.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from paceline.core.processes.missing_ranks import named_ranks
from paceline.core.telemetry.users_code import warn
from paceline.ddp.options.config import UnusedParameters as UnusedParameterMode
from paceline.ddp.reducer.backward import Backward
from paceline.ddp.reducer.extension import Exchanged, Extension
from paceline.ddp.reducer.reducer import Reducer
from paceline.ddp.transport.channel import Pausing
from paceline.errors import UnusedParameterWarning, UsageError


class UnusedParameters(Extension):
    """Reports each unused parameter once in a warning on rank 0, or every time in an error on every rank."""

    def __init__(self, mode: UnusedParameterMode, reducer: Reducer) -> None:
        self._mode, self._trained, self._channel = mode, reducer.trained, reducer.channel
        self._reducer = reducer
        self.parameters_changed()

    def parameters_changed(self) -> None:
        everything = range(len(self._trained.names))
        # One set is enough: once a parameter has been reported, a step without its gradient needs no control blocks.
        self._expected = self._reducer.expected_absent = set(everything if self._mode == "allow" else ())

    def after_averages(self, backward: Backward, exchanged: Exchanged) -> Pausing[None]:
        """Find out which ranks lack gradients for parameters that are missing somewhere and not yet reported."""
        missing = exchanged.control.missing_somewhere(exchanged.statuses)
        unexpected = [index for index in missing if index not in self._expected]
        if not unexpected or self._mode == "allow":
            return
        if self._mode == "warn":  # errors are raised every time
            self._expected.update(unexpected)
        names, parameters = self._trained.names, self._trained.parameters
        is_idle = len(backward.absent) == len(names)  # this rank has no data, so all parameters are absent
        lacking = set() if is_idle else set(backward.absent)
        lacks = [int(index in lacking and parameters[index].requires_grad) for index in unexpected]
        without = yield from self._channel.gather_numbers(lacks, "exchange of unused parameters")
        message = unused_message([names[index] for index in unexpected], list(zip(*without, strict=True)))
        if message is not None:
            backward.defer(partial(self._report, message))

    def _report(self, message: str) -> None:
        if self._mode == "error":
            raise UsageError(f"{message}; use every parameter in every step, or pass unused_parameters='allow'")
        if self._channel.rank == 0:
            message += "; missing gradients count as zero; pass unused_parameters='allow' if that is intended"
            warn(message, UnusedParameterWarning)


def unused_message(names: Sequence[str], without: Sequence[Sequence[int]]) -> str | None:
    """Return a sentence that lists the unused parameters and the ranks without a gradient; None if there are none.

    ``without[i][rank]`` is 1 if that rank had no gradient for parameter i.
    """
    groups: dict[str, list[str]] = {}
    for name, marks in zip(names, without, strict=True):
        if ranks := [rank for rank, mark in enumerate(marks) if mark]:
            where = "every rank" if len(ranks) == len(marks) else named_ranks(ranks)
            groups.setdefault(where, []).append(name)
    if not groups:
        return None
    parts = [f"{', '.join(map(repr, group))} on {where}" for where, group in groups.items()]
    count = sum(map(len, groups.values()))
    return f"{count} parameter{'s' * (count > 1)} had no gradient in a synchronized backward: {'; '.join(parts)}"
