"""The engine that averages a wrapper's gradients: a reducer, a single rank, or a copy that is not connected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.core.torch_internals.compile import class_never_compiled

if TYPE_CHECKING:
    from paceline.ddp.engine.device.exposed_time import ExposedTime
    from paceline.ddp.engine.reducer import Reducer


@class_never_compiled
class GradientEngine:
    """Averages the gradients of one wrapper.

    The methods that do nothing here are right for an engine that has no peers, which the other two are.
    """

    sync_enabled: bool = True
    """False inside ``no_sync``: a backward that starts now stays local."""
    exposed_time: ExposedTime | None = None
    """The time waited for communication at the end of backwards; None where there is none."""

    def hook_outputs(self, outputs: Sequence[Tensor], on_local: Callable[[], None]) -> None:
        """Hook the outputs of a forward, so that its backward is noticed.

        `on_local` is called if that backward turns out to be local, inside ``no_sync``.
        """
        raise NotImplementedError

    def synchronize(self) -> None:
        """Average what ``p.grad`` holds now, without a backward; a parameter without gradient counts as zero."""
        raise NotImplementedError

    def check_finite(self, enabled: bool) -> None:
        """Look for NaN and Inf in gradients, or not, from the next backward on."""
        raise NotImplementedError

    def connected(self) -> Reducer:
        """Return the reducer with buckets, which takes this engine's place if it is another; all ranks call this."""
        raise NotImplementedError

    def check_equal(self) -> None:
        """Refuse gradients that are not the same on every rank.

        Raises:
            UsageError: names one that differs.
        """

    def read_late(self) -> None:
        """Read the other ranks' reports on the last backward, if that was left for later, and act on them.

        Called before gradients are used.

        Raises:
            PacelineError: the errors that the end of backward raises otherwise.
        """

    def resync_aborted(self) -> None:
        """Take part in what other ranks wait for since this rank's backward was ended by an exception.

        What they reported of one that was not is read, too, as :meth:`read_late` does.

        Raises:
            CommunicationError: if a collective has failed before, or fails now.
        """

    def check_idle(self) -> None:
        """Refuse to go on where a backward has not come to its end.

        Raises:
            UsageError: says where the backward is.
        """

    def bucket_bytes(self) -> list[int]:
        """Size of each bucket, in the order of launch."""
        return []

    def named_layout(self) -> list[list[str]]:
        """Names of the parameters in each bucket, in the order of launch."""
        return []

    def restore_layout(self, layout: list[list[str]]) -> None:
        """Take over a checkpoint's layout, by parameter names, instead of observing the order of arrival.

        Raises:
            CheckpointMismatch: if it does not fit this model.
        """

    def local_gradient(self) -> str | None:
        """Return the name of a parameter whose gradient was not averaged, as far as that is known; None without one."""
        return None

    def close(self) -> None:
        """Take the hooks off the parameters."""
