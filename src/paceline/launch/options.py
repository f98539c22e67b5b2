"""Options of the launcher that ``paceline run`` and ``paceline train`` share, and their defaults.

``tools/run_options.py`` adds the options of ``paceline run`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from paceline.core.option_rules import flag_of
from paceline.errors import UsageError
from paceline.launch.verdict import LIMIT, Places

TIMEOUT_S = 600
"""Default timeout of collectives."""
GRACE_S = 30
"""Default time for ranks to end after a signal to the launcher."""
SHUTDOWN_HELP = (
    "Time for ranks to end after a signal to the launcher, and to save their last step if they use a Checkpointer; "
    f"then they are killed. Default {GRACE_S}."
)
REQUEUE_HELP = (
    "Exit code if a signal ended the job and its last step is saved, so that a batch system can requeue it. Default "
    "128 + the signal's number."
)
HANG_HELP = (
    "A rank that makes no progress for this time is named with its Python stacks and killed, as if it had failed. Give "
    "more than the longest work that one rank does alone. By default only the timeout of collectives applies."
)
MAX_RESTARTS_HELP = (
    "Maximum number of restarts after failures; a completed step resets the count. Default "
    f"{LIMIT} for ranks that mark their steps with a Checkpointer, and 0 for others."
)
REPORT_HELP = (
    "Write a report of the job as JSON: exit code, restarts, and for each failure the first rank with its error, step "
    "and phase, and the other ranks."
)
MIN_NPROC_HELP = (
    "If a rank fails twice in the same place, go on with fewer ranks, but at least N. With virtual ranks, the number "
    "of ranks divides theirs. By default all ranks are restarted. For one host."
)


class LauncherOption(NamedTuple):
    """A command-line option for a field of :class:`Supervision`."""

    name: str
    type: Any
    metavar: str
    help: str


OPTIONS = (
    LauncherOption("requeue_exit_code", int, "N", REQUEUE_HELP),
    LauncherOption("hang_timeout", float, "SECONDS", HANG_HELP),
    LauncherOption("min_nproc", int, "N", MIN_NPROC_HELP),
)


@dataclass(frozen=True)
class Supervision:
    """Settings of the launcher.

    Args:
        requeue_exit_code: exit code of a job that saved a step and ended after a signal; None for 128 + the signal.
        hang_timeout: seconds that a rank may go without progress before it counts as hanging; None disables the watch.
        min_nproc: minimum number of ranks; None for all.
    """

    requeue_exit_code: int | None = None
    hang_timeout: float | None = None
    min_nproc: int | None = None

    def __post_init__(self) -> None:
        code, seconds = self.requeue_exit_code, self.hang_timeout
        if code is not None and not 1 <= code <= 255:
            raise UsageError(f"--requeue-exit-code={code} is out of range; give a value from 1 to 255, such as 99")
        if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
            raise UsageError(f"--hang-timeout={seconds:g} is not positive and finite; give seconds, such as 120")

    def places(self, nproc: int) -> Places:
        """Return the places of a job of `nproc` ranks."""
        minimum = self.min_nproc
        if minimum is not None and not 1 <= minimum <= nproc:
            raise UsageError(f"--min-nproc={minimum} is out of range; give a value from 1 to {nproc} (--nproc)")
        return Places(nproc, minimum)


def add_options(group: Any) -> None:
    """Add the options to a group of an argument parser."""
    for name, kind, metavar, text in OPTIONS:
        group.add_argument(flag_of(name), type=kind, default=None, metavar=metavar, help=text)


def supervision_of(options: Mapping[str, Any]) -> Supervision:
    """Return the settings contained in the parsed `options`."""
    return Supervision(**{field.name: options[field.name] for field in fields(Supervision)})
