"""Options of the launcher that ``paceline run`` and ``paceline train`` share, and their defaults.

``tools/run_options.py`` adds the options of ``paceline run`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args, get_type_hints

from paceline.core.option_rules import flag_of
from paceline.errors import UsageError
from paceline.launch.verdict import LIMIT, Slots

TIMEOUT_S = 600
"""Default timeout of collectives."""
GRACE_S = 30
"""Default time for ranks to end after a signal to the launcher."""
SHUTDOWN_HELP = (
    "Time for ranks to end after a signal to the launcher, and to save their last step if they use a Checkpointer; "
    f"then they are killed. Default {GRACE_S}."
)
MAX_RESTARTS_HELP = (
    "Maximum number of restarts after failures; a completed step resets the count. Default "
    f"{LIMIT} for ranks that mark their steps with a Checkpointer, and 0 for others."
)
REPORT_HELP = (
    "Write a report of the job as JSON: exit code, restarts, and for each failure the first rank with its error, step "
    "and phase, and the other ranks."
)


def _option(default: Any, metavar: str, help: str) -> Any:
    return field(default=default, metadata={"metavar": metavar, "help": help})


@dataclass(frozen=True)
class Supervision:
    """Settings of the launcher: options of ``paceline run`` and ``paceline train``, with their defaults."""

    requeue_exit_code: int | None = _option(
        None,
        "N",
        "Exit code if a signal ended the job and its last step is saved, so that a batch system can requeue it. "
        "Default 128 + the signal's number.",
    )
    hang_timeout: float | None = _option(
        None,
        "SECONDS",
        "A rank that makes no progress for this time is named with its Python stacks and killed, as if it had failed. "
        "Give more than the longest work that one rank does alone. By default only the timeout of collectives applies.",
    )
    min_nproc: int | None = _option(
        None,
        "N",
        "If a rank fails twice in the same slot, continue with fewer ranks, but at least N; with virtual ranks, a "
        "divisor of their number. By default all ranks are restarted. For one host.",
    )

    def __post_init__(self) -> None:
        code, seconds = self.requeue_exit_code, self.hang_timeout
        if code is not None and not 1 <= code <= 255:
            raise UsageError(f"--requeue-exit-code={code} is out of range; give a value from 1 to 255, such as 99")
        if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
            raise UsageError(f"--hang-timeout={seconds:g} is not positive and finite; give seconds, such as 120")

    def slots(self, nproc: int) -> Slots:
        """Return the slots of a job of `nproc` ranks."""
        minimum = self.min_nproc
        if minimum is not None and not 1 <= minimum <= nproc:
            raise UsageError(f"--min-nproc={minimum} is out of range; give a value from 1 to {nproc} (--nproc)")
        return Slots(nproc, minimum)


TYPES = get_type_hints(Supervision)
"""Types of the fields, by name."""


def add_options(group: Any) -> None:
    """Add the options to a group of an argument parser."""
    for option in fields(Supervision):
        kind = get_args(TYPES[option.name])[0]  # not None
        group.add_argument(flag_of(option.name), type=kind, default=option.default, **option.metadata)


def supervision_of(options: Mapping[str, Any]) -> Supervision:
    """Return the settings contained in the parsed `options`."""
    return Supervision(**{option.name: options[option.name] for option in fields(Supervision)})
