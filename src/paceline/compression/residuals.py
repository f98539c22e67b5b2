"""Error feedback: the part of a rank's gradients that it has not sent yet and adds to the next gradients.

See Seide et al., "1-bit stochastic gradient descent", Interspeech 2014, and Karimireddy et al., "Error feedback fixes
SignSGD", ICML 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.compression.gradients import Gradients
from paceline.core.state.device_streams import keep


class Residuals:
    """This rank's residuals, kept by parameter, so that they stay correct when buckets are rebuilt."""

    by_name: dict[str, Tensor]
    """Residual of each parameter: a view of its bucket's residuals, or a loaded one; see :meth:`forget_buckets`."""

    def __init__(self) -> None:
        self.by_name = {}
        self._flat: dict[tuple[str, ...], Tensor] = {}
        """Residuals of each bucket, flat like its gradients; the keys are the names of its parameters."""

    def add_to(self, gradients: Gradients) -> None:
        """Add the residuals of a bucket to its gradients."""
        names = tuple(gradients.names)
        if names not in self._flat:
            self._gather(gradients)
        gradients.flat.add_(self._flat[names])

    def replace(self, gradients: Gradients, finite: Tensor) -> None:
        """Keep what remains in ``gradients.flat`` if `finite` is true; the host does not wait for its value."""
        flat = self._flat.get(tuple(gradients.names))
        if flat is not None:
            torch.where(finite, gradients.flat, flat, out=flat)

    def _gather(self, gradients: Gradients) -> None:
        """Collect the residuals for a new bucket in one tensor."""
        names = tuple(gradients.names)
        flat = torch.zeros_like(gradients.flat)
        for name, view in zip(names, gradients.views_of(flat), strict=True):
            if (previous := self.by_name.get(name)) is not None:
                view.copy_(previous)
                keep(previous)
            self.by_name[name] = view
        # Buckets that share a parameter with this one are gone: the wrapper has rebuilt its buckets.
        self._flat = {others: buffer for others, buffer in self._flat.items() if not set(others) & set(names)}
        self._flat[names] = flat

    def forget_buckets(self) -> None:
        """Use the residuals in :attr:`by_name` from now on, because they were changed from outside."""
        self._flat.clear()
