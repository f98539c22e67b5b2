"""The engine that averages a wrapper's gradients: a reducer, a single rank, or a copy that is not connected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from paceline.core.torch_internals.compile import class_never_compiled
from paceline.ddp.reducer.reducer import Reducer


@class_never_compiled
class WithoutPeers:
    """An engine that reaches no other rank: what a reducer does only for peers does nothing here."""

    sync_enabled: bool = True
    """False inside ``no_sync``: a backward that starts now stays local."""
    exposed_time = None
    """The time waited for communication at the end of backwards: none."""

    def hook_outputs(self, outputs: Sequence[Tensor], *, counts_if_averaged: bool) -> None:
        """Hook the outputs of a forward, so that its backward is noticed."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Average what ``p.grad`` holds now, without a backward; a parameter without gradient counts as zero."""
        raise NotImplementedError

    def check_finite(self, enabled: bool) -> None:
        """Look for NaN and Inf in gradients, or not, from the next backward on."""
        raise NotImplementedError

    def connected(self) -> Reducer:
        """Return the reducer with buckets that takes this engine's place; all ranks call this."""
        raise NotImplementedError

    def check_equal(self) -> None:
        """Refuse gradients that are not the same on every rank."""

    def read_late(self) -> None:
        """Read the other ranks' reports on the last backward, if that was left for later."""

    def resync_aborted(self) -> None:
        """Take part in what other ranks wait for since this rank's backward was ended by an exception."""

    def check_idle(self) -> None:
        """Refuse to go on where a backward has not come to its end."""

    def bucket_bytes(self) -> list[int]:
        """Size of each bucket, in the order of launch."""
        return []

    def named_layout(self) -> list[list[str]]:
        """Names of the parameters in each bucket, in the order of launch."""
        return []

    def restore_layout(self, layout: list[list[str]]) -> None:
        """Take over a checkpoint's layout of buckets."""

    def local_gradient(self) -> str | None:
        """Return the name of a parameter whose gradient was not averaged, as far as that is known; None without one."""
        return None

    def close(self) -> None:
        """Take the hooks off the parameters."""


GradientEngine: TypeAlias = Reducer | WithoutPeers
"""An engine of any kind."""
