"""The pieces of parameters that one rank owns and trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.core.state.flat_views import flattened
from paceline.errors import UsageError
from paceline.optim.segments import flat_view
from paceline.optim.sharding_plan import Piece

HALVES = (torch.bfloat16, torch.float16)
"""Dtypes of parameters that can have a master copy."""


@dataclass
class Owned:
    """A piece of a parameter that this rank updates.

    Args:
        parameter: the user's parameter.
        index: number of the parameter in the optimizer.
        piece: start and stop of the elements; None for the whole parameter, in its own shape.
        master_dtype: dtype of a copy that is trained instead of the parameter; None to train the parameter itself.
    """

    parameter: nn.Parameter
    index: int
    piece: tuple[int, int] | None
    master_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        self._view = self._current_view()
        values = self._view if self.master_dtype is None else self._view.to(self.master_dtype, copy=True)
        # Groups may also contain integer parameters, and torch refuses requires_grad for integers.
        self.trained = nn.Parameter(values, requires_grad=self.parameter.is_floating_point() or self._view.is_complex())
        """The tensor that the inner optimizer trains: the piece itself, or its master copy."""
        vars(self.trained).update(vars(self.parameter))  # attributes that optimizers read, such as p.lr_scale

    def _current_view(self) -> Tensor:
        if self.piece is None:
            return self.parameter.detach()
        return flat_view(self.parameter)[slice(*self.piece)]

    def values(self) -> Tensor:
        """Return a view of the parameter's elements in this piece."""
        return self._view

    def refresh(self) -> None:
        """Refer to the parameter's current memory, after it has moved."""
        self._view = self._current_view()
        if self.master_dtype is None:
            self.trained.data = self._view

    def take_changes(self) -> None:
        """Update the master copy with the values that the user has written to the parameter since the last step."""
        if self.master_dtype is not None:
            master = self.trained.detach()
            # Compare values, because writes through p.data and NumPy do not increment a version counter. Elements that
            # have not changed keep the master's precision.
            is_same = master.to(self._view.dtype) == self._view
            torch.where(is_same, master, self._view.to(master.dtype), out=master)

    def take_gradient(self, gradient: Tensor | None) -> None:
        """Set the gradient of :attr:`trained` to this piece of the parameter's `gradient`."""
        if gradient is None:
            return
        if gradient.is_sparse:
            if self.piece is not None:
                raise UsageError(
                    f"the gradient of parameter {self.index} of the ShardedOptimizer is sparse and cannot be cut into "
                    "pieces; give the model itself, so that its sparse layers are found, or remove sparse=True"
                )
            self.trained.grad = gradient
            return
        if self.piece is not None:
            gradient = _laid_out(gradient, self.parameter)[slice(*self.piece)]
        self.trained.grad = gradient if gradient.dtype is self.trained.dtype else gradient.to(self.trained.dtype)

    def end_step(self) -> None:
        """Drop the gradient, and copy the new values of a master copy into the parameter."""
        if self.trained.grad is not None:
            self.trained.grad = None
            if self.master_dtype is not None:
                self._view.copy_(self.trained.detach())


def _laid_out(gradient: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return the elements of `gradient` in the memory order of the parameter."""
    if gradient.stride() == parameter.stride():
        return flattened(gradient)
    return flattened(torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient))


def owned_by(
    rank: int,
    pieces: Sequence[Piece],
    parameters: Sequence[nn.Parameter],
    first: int,
    master_dtype: torch.dtype | None,
) -> list[Owned]:
    """Return the pieces that `rank` owns. The optimizer's number for the first of `parameters` is `first`."""
    owned = []
    for piece in pieces:
        if piece.owner == rank:
            parameter = parameters[piece.parameter]
            part = None if piece.numel == parameter.numel() else (piece.start, piece.stop)
            dtype = master_dtype if parameter.dtype in HALVES else None
            owned.append(Owned(parameter, first + piece.parameter, part, dtype))
    return owned
