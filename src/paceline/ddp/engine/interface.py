"""The interface of engines, which average a wrapper's gradients: a reducer, a single rank, or a dormant copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from paceline.core.torch_internals.compile import class_never_compiled
from paceline.ddp.reducer.reducer import Reducer


@class_never_compiled
class WithoutPeers:
    """An engine that reaches no other rank, with empty methods for communication between peers."""

    sync_enabled: bool = True
    """False inside ``no_sync``: a backward that starts now stays local."""
    exposed_time = None
    """None, because no communication is waited for."""

    def hook_outputs(self, outputs: Sequence[Tensor], *, counts_if_averaged: bool) -> None:
        """Hook the outputs of a forward, so that its backward is noticed."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Average the gradients in ``p.grad`` now, without a backward; a missing gradient counts as zero."""
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
        """Take part in collectives that other ranks wait for since an exception ended this rank's backward."""

    def check_idle(self) -> None:
        """Refuse to go on while a backward has not ended."""

    def bucket_bytes(self) -> list[int]:
        """Return the size of each bucket, in the order of launch."""
        return []

    def named_layout(self) -> list[list[str]]:
        """Return the names of the parameters in each bucket, in the order of launch."""
        return []

    def restore_layout(self, layout: list[list[str]]) -> None:
        """Use a checkpoint's layout of buckets."""

    def local_gradient(self) -> str | None:
        """Return the name of a parameter whose gradient was not averaged, as far as that is known; else None."""
        return None

    def close(self) -> None:
        """Remove the hooks from the parameters."""


GradientEngine: TypeAlias = Reducer | WithoutPeers
"""An engine of any kind."""
