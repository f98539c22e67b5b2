"""Gradients of low rank: Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.compression.gradients import Gradients
from paceline.compression.two_stage import Second, TwoStage
from paceline.errors import UsageError

BLOCK = 1024
"""Elements of a column that are summed by one thread; see :func:`_dots`."""


class PowerSGD(TwoStage):
    """Sends a matrix M (n × m) as P = M Q and, with P made orthonormal, Q = Mᵀ P: (n + m) r numbers for n m.

    One step of power iteration in each training step; Q is kept for the next (warm start), as is M − P Qᵀ on each rank
    (error feedback). A tensor of more dimensions is a matrix of shape[0] rows. Vectors, complex parameters and matrices
    for which (n + m) r >= n m are averaged as they are.

    Args:
        rank: r, >= 1; 1 to 4 are usual.
        seed: of the first Q; the same on every rank.

    Raises:
        UsageError: for a rank below 1.
    """

    def __init__(self, model: nn.Module, rank: int = 2, seed: int = 0, process_group: Any = None) -> None:
        super().__init__(model, process_group)
        if rank < 1:
            raise UsageError(f"PowerSGD(rank={rank}): give a rank of at least 1")
        self.matrix_rank, self._seed = rank, seed
        self._bases: dict[str, Tensor] = {}

    def first(self, gradients: Gradients) -> tuple[Any, Second]:
        """Launch the sum of every P, and of what is not compressed."""
        self._add_residuals(gradients)
        matrices, plain = [], []
        for name, view in zip(gradients.names, gradients.views, strict=True):
            if (shape := self._matrix_shape(name)) is None:
                plain.append(view)
                continue
            matrix = view.reshape(shape)
            basis = self._basis(name, matrix)
            matrices.append(Matrix(name, view, matrix, matrix @ basis, basis))
        parts = [matrix.p for matrix in matrices] + plain
        message = torch.cat([part.reshape(-1) for part in parts])
        work = self._all_reduce(message)
        return work, lambda: self._second(gradients, matrices, plain, message)

    def _second(
        self, gradients: Gradients, matrices: list[Matrix], plain: list[Tensor], sums: Tensor
    ) -> tuple[Any, Callable[[], Tensor]]:
        sums.div_(self.size)
        means = sums.split([matrix.p.numel() for matrix in matrices] + [view.numel() for view in plain])
        for matrix, mean in zip(matrices, means, strict=False):
            matrix.p = orthonormal(mean.view_as(matrix.p))
            matrix.q = matrix.m.t() @ matrix.p
            matrix.view.sub_((matrix.p @ matrix.q.t()).view(matrix.view.shape))  # what is left for the next step
        for view in plain:
            view.zero_()
        message = torch.cat([sums.new_empty(0), *(matrix.q.reshape(-1) for matrix in matrices)])
        work = self._all_reduce(message)

        def finish() -> Tensor:
            message.div_(self.size)
            parts = iter(message.split([matrix.q.numel() for matrix in matrices]))
            rest = iter(means[len(matrices) :])
            compressed = {matrix.name: matrix for matrix in matrices}
            mean = torch.empty_like(gradients.flat)
            for name, view in zip(gradients.names, gradients.views, strict=True):
                target = mean.as_strided(
                    view.shape, view.stride(), view.storage_offset() - gradients.flat.storage_offset()
                )
                if name in compressed:
                    matrix = compressed[name]
                    matrix.q = next(parts).view_as(matrix.q)
                    target.copy_((matrix.p @ matrix.q.t()).view(view.shape))
                else:
                    target.copy_(next(rest).view(view.shape))
            if bool(torch.isfinite(mean.sum())):
                self._bases.update({name: matrix.q.clone() for name, matrix in compressed.items()})
            return self._finish(gradients, mean)

        return work, finish

    def _matrix_shape(self, name: str) -> tuple[int, int] | None:
        """Return rows and columns of the matrix as which the parameter is compressed; None if it is not compressed."""
        parameter = self._parameters[name]
        if parameter.ndim < 2 or parameter.is_complex() or not parameter.numel():
            return None
        rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
        return (rows, columns) if (rows + columns) * self.matrix_rank < rows * columns else None

    def _basis(self, name: str, matrix: Tensor) -> Tensor:
        """Return the last step's Q; columns that are zero, as after a step without gradient, are drawn anew."""
        basis = self._bases.get(name)
        if basis is not None and not bool((dead := (basis == 0).all(0)).any()):
            return basis
        digest = hashlib.sha256(f"{self._seed} {name} {self.steps}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        fresh = torch.randn(matrix.shape[1], self.matrix_rank, generator=generator, dtype=torch.float64).to(matrix)
        return fresh if basis is None else torch.where(dead, fresh, basis)

    def _kept(self) -> dict[str, dict[str, Tensor]]:
        return {**super()._kept(), "bases": self._bases}

    def _shape(self, role: str, name: str) -> torch.Size | None:
        if role != "bases" or name not in self._parameters:
            return super()._shape(role, name)
        shape = self._matrix_shape(name)
        return None if shape is None else torch.Size((shape[1], self.matrix_rank))


@dataclass
class Matrix:
    """The gradient of one parameter between the two collectives."""

    name: str
    view: Tensor
    """Position in the flat gradients."""
    m: Tensor
    """The gradient as a matrix."""
    p: Tensor
    q: Tensor


def orthonormal(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns, by modified Gram-Schmidt in float64; a dependent column becomes zero.

    The bits are the same for any number of threads, because ranks may have different numbers.
    """
    rows, rank = matrix.shape
    columns = torch.zeros(-(-rows // BLOCK) * BLOCK, rank, dtype=torch.float64, device=matrix.device)
    columns[:rows] = matrix
    whole = _dots(columns, columns).sqrt()
    for index in range(rank):
        column = columns[:, index : index + 1]
        norm = _dots(column, column).sqrt()
        column.mul_(torch.where(norm <= 1e-10 * whole[index], 0.0, 1 / norm))
        if index + 1 < rank:
            rest = columns[:, index + 1 :]
            rest.sub_(column * _dots(column, rest))
    return columns[:rows].to(matrix.dtype)


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """Return dot products of columns, which torch would sum in another order if it had more threads."""
    product = a * b
    return product.view(-1, BLOCK, product.shape[1]).sum(1).sum(0)
