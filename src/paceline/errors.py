"""The tree of all errors that Paceline raises, and its warnings.

    PacelineError                       anything raised on purpose by Paceline
    ├── UsageError         ValueError   a mistake that the caller can fix; commands print one line, exit code 2
    │   ├── WrapError      RuntimeError a model or a group of ranks that cannot be wrapped
    │   ├── WorldError                  the launcher's environment is incomplete or contradicts the call
    │   ├── ReplicaMismatch             the models differ between ranks
    │   ├── HookError      TypeError    a communication hook raised, or does not follow torch's contract
    │   ├── MissingExtra   ImportError  an optional dependency is not installed; shows the pip command
    │   └── CheckpointMismatch          the checkpoint belongs to a different model, dataset or configuration
    ├── CheckpointError    RuntimeError a checkpoint cannot be written, read or trusted
    │   └── NoCheckpoint   UsageError   no valid checkpoint was found
    ├── DataError          RuntimeError a sample or batch could not be loaded; names rank, worker and sample
    ├── DesyncError        RuntimeError ranks differ in something that must be equal everywhere
    ├── CommunicationError RuntimeError a collective failed: a peer ended, or did not arrive in time
    ├── NonFiniteGradient  ArithmeticError  a gradient holds NaN or Inf; names ranks and parameters
    └── CallbackError      RuntimeError a callback of the Trainer raised an error; names its class and rank

    Preempted              SystemExit   the job was asked to end by a signal, and the last step is saved

    CheckpointWarning      UserWarning  a damaged checkpoint was skipped, or a folder is not locked
    UnusedParameterWarning UserWarning  a parameter had no gradient on some rank

A message is one sentence: what happened, with values and rank; then the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

_Error = TypeVar("_Error", bound="PacelineError")


class PacelineError(Exception):
    """Base of every error that Paceline raises on purpose."""

    blamed: tuple[int, ...] | None = None
    """World ranks whose failure caused this error, empty if unknown; None if the cause is not a rank's failure."""

    def because_of(self: _Error, ranks: Iterable[int]) -> _Error:
        """Record for the launcher that the failure of these world ranks caused this error; return the error."""
        self.blamed = tuple(ranks)
        return self


class UsageError(PacelineError, ValueError):
    """A mistake that the caller can fix. Commands print it as one line and exit with code 2."""


class WorldError(UsageError):
    """The launcher's environment is incomplete, or contradicts the call."""


class WrapError(UsageError, RuntimeError):
    """A model or a group of ranks that cannot be wrapped. Also a RuntimeError, because torch's class raises one."""


class ReplicaMismatch(UsageError):
    """The models differ between ranks: names, shapes, dtypes, or values under ``init_sync="verify"``."""


class HookError(UsageError, TypeError):
    """A communication hook raised, or does not follow torch's contract."""


class MissingExtra(UsageError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}, which is not installed; {installing(extra)}")


def installing(extra: str) -> str:
    """Return instructions to install the optional packages of `extra`, depending on how Paceline was installed.

    For a clone or a file, the name ``paceline`` alone is not enough for pip to find it.
    """
    import json  # imported here, like the next two, because few programs need this message
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    try:
        origin = json.loads(distribution("paceline").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    if origin.get("dir_info", {}).get("editable"):
        return f"in {unquote(urlsplit(origin['url']).path)} run: pip install -e '.[{extra}]'"
    if not origin:  # installed from a package index
        return f"run: pip install 'paceline[{extra}]'"
    kind = f"{origin['vcs_info']['vcs']}+" if "vcs_info" in origin else ""
    return f"run: pip install 'paceline[{extra}] @ {kind}{origin['url']}'"


class CheckpointMismatch(UsageError):
    """The checkpoint belongs to a different model, dataset or configuration."""


class CheckpointError(PacelineError, RuntimeError):
    """A checkpoint cannot be written, read or trusted."""


class NoCheckpoint(CheckpointError, UsageError):
    """No valid checkpoint was found."""


class DataError(PacelineError, RuntimeError):
    """A sample or a batch could not be loaded, or a DataLoader worker died."""


class DesyncError(PacelineError, RuntimeError):
    """Ranks differ in something that must be equal everywhere, such as the number of optimizer steps."""


class CommunicationError(PacelineError, RuntimeError):
    """A collective failed: a peer ended, or did not arrive in time."""

    blamed = ()


class NonFiniteGradient(PacelineError, ArithmeticError):
    """A gradient holds NaN or Inf on at least one rank."""


class CallbackError(PacelineError, RuntimeError):
    """A callback of the Trainer raised an error, which is the ``__cause__`` on the rank that raised it."""


class Preempted(SystemExit):
    """The job was asked to end by a signal, and the last step is saved; the exit code is 128 + the signal's number."""


class CheckpointWarning(UserWarning):
    """A checkpoint needs attention: a damaged one was skipped, or a folder is not locked."""


class UnusedParameterWarning(UserWarning):
    """A parameter had no gradient on some rank. This is allowed, but may be a mistake."""
