"""Unused parameters: those without a gradient on some rank. Allowed always; said once, or refused, if asked for.

The control block tells every rank how many ranks had a gradient of each parameter. Which ones had none is asked for
only when a parameter is found for the first time. A rank that has no gradient at all, as it had no data, does not
count, nor does a parameter that was frozen.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

from paceline.core.processes.missing_ranks import named_ranks
from paceline.ddp.options.config import UnusedParameters as UnusedParameterMode
from paceline.ddp.reducer.backward import Backward
from paceline.ddp.reducer.extension import Exchanged, Extension
from paceline.ddp.reducer.reducer import Reducer
from paceline.ddp.transport.channel import Pausing
from paceline.ddp.transport.gathering import gather_numbers
from paceline.errors import UnusedParameterWarning, UsageError


class UnusedParameters(Extension):
    """Finds unused parameters and says so: in a warning of rank 0, once for each, or in an error on every rank."""

    def __init__(self, mode: UnusedParameterMode, reducer: Reducer) -> None:
        self._mode, self._trained, self._channel = mode, reducer.trained, reducer.channel
        self._reducer = reducer
        self.renew()

    def renew(self) -> None:
        """Forget those that were found."""
        everything = range(len(self._trained.names))
        self._known = self._reducer.known_absent = set(everything if self._mode == "allow" else ())

    def after_averages(self, backward: Backward, exchanged: Exchanged) -> Pausing[None]:
        """Ask all ranks which of them lack the parameters that are missing somewhere and not known."""
        missing = exchanged.control.missing_somewhere(exchanged.statuses)
        asked = [index for index in missing if index not in self._known]
        if not asked or self._mode == "allow":
            return
        if self._mode == "warn":
            self._known.update(asked)
        names, parameters = self._trained.names, self._trained.parameters
        idle = len(backward.absent) == len(names)
        lacking = set() if idle else set(backward.absent)
        lacks = [int(index in lacking and parameters[index].requires_grad) for index in asked]
        without = yield from gather_numbers(self._channel, lacks, "exchange of unused parameters")
        message = unused_message([names[index] for index in asked], list(zip(*without, strict=True)))
        if message is not None:
            backward.find(partial(self._report, message))

    def _report(self, message: str) -> None:
        """Warn, or raise.

        Raises:
            UsageError: if unused parameters are an error.
        """
        if self._mode == "error":
            raise UsageError(f"{message}; use every parameter in every step, or pass unused_parameters='allow'")
        if self._channel.rank == 0:
            message += "; where missing they count as zero, pass unused_parameters='allow' if that is meant"
            warnings.warn(message, UnusedParameterWarning, stacklevel=2)


def unused_message(names: Sequence[str], without: Sequence[Sequence[int]]) -> str | None:
    """One sentence on which of the parameters `names` lacked a gradient where; None if none did.

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
