"""Settings of the launcher: how it watches its ranks, and its exit codes."""

from __future__ import annotations

import math
from argparse import SUPPRESS
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from paceline.core.option_rules import flag_of
from paceline.errors import UsageError
from paceline.launch.failures.places import Places
from paceline.launch.failures.verdict import LIMIT

TIMEOUT_S = 600
"""Default timeout of collectives."""
GRACE_HELP = (
    "How long ranks may take to end after a signal to the launcher, and to save their last step where a Checkpointer "
    "marks it; then they are killed. The same as torchrun's --shutdown-timeout. Default 30."
)
REQUEUE_HELP = (
    "Exit with this code if a signal ended the job and its last step is saved, so that a batch system starts it again; "
    "128 + the signal's number by default."
)
HANG_HELP = (
    "A rank that makes no progress for so long is named with its Python stacks and killed, as if it had failed. Must "
    "be longer than the longest thing that one rank does alone. By default only the timeout of collectives notices it."
)
MAX_RESTARTS_HELP = (
    "How often all ranks are started again after a failure, counted only while no step is completed. Default "
    f"{LIMIT} for ranks that mark their steps with a Checkpointer, and 0 for others."
)
REPORT_HELP = (
    "Write there as JSON how the job ended: exit code, restarts, and for each failure the first rank with its error, "
    "step and phase, and what the others did."
)
MIN_NPROC_HELP = (
    "If a rank fails twice in the same place, go on with fewer ranks, but at least N; with virtual ranks their number "
    "divides these. By default all ranks are started again, or none. For one host."
)
PIN_HELP = "Keep each rank to cores of its own, of one NUMA node where that is possible."
FORCE_HELP = "Start the ranks although they need more memory than is available."


class LauncherOption(NamedTuple):
    """An option that ``paceline run`` and ``paceline train`` both have, as fields of the classes below."""

    name: str
    """The field's name."""
    type: Any
    default: Any
    metavar: str
    help: str


OPTIONS = (
    LauncherOption("requeue_exit_code", int, None, "N", REQUEUE_HELP),
    LauncherOption("hang_timeout", float, None, "SECONDS", HANG_HELP),
    LauncherOption("min_nproc", int, None, "N", MIN_NPROC_HELP),
)


@dataclass(frozen=True)
class Supervision:
    """Settings of the launcher.

    Args:
        requeue_exit_code: the exit code of a job that was preempted and saved; None for 128 + the signal's number.
        hang_timeout: seconds without progress after which a rank hangs; None for no watch.
        min_nproc: the fewest ranks to go on with; None for all.
    """

    requeue_exit_code: int | None = None
    hang_timeout: float | None = None
    min_nproc: int | None = None

    def __post_init__(self) -> None:
        code, seconds = self.requeue_exit_code, self.hang_timeout
        if code is not None and not 1 <= code <= 255:
            raise UsageError(f"--requeue-exit-code={code} must be from 1 to 255; give one such as 99")
        if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
            raise UsageError(f"--hang-timeout={seconds:g} is no number of seconds above 0; give one such as 120")

    def places(self, nproc: int) -> Places:
        """Return the places of a job of `nproc` ranks."""
        least = self.min_nproc
        if least is not None and not 1 <= least <= nproc:
            raise UsageError(f"--min-nproc={least} must be from 1 to the {nproc} of --nproc; give such a number")
        return Places(nproc, least)


def add_options(group: Any) -> None:
    """Add the options to a group of an argument parser."""
    # SUPPRESS leaves the default to torchrun's option, which writes to the same place.
    group.add_argument(
        "--grace", dest="shutdown_timeout", type=int, default=SUPPRESS, metavar="SECONDS", help=GRACE_HELP
    )
    for name, kind, default, metavar, text in OPTIONS:
        group.add_argument(flag_of(name), type=kind, default=default, metavar=metavar, help=text)


def supervision_of(options: Mapping[str, Any]) -> Supervision:
    """Return the settings among parsed `options`."""
    return Supervision(**{field.name: options[field.name] for field in fields(Supervision)})
