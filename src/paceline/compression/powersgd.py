"""Communication hook that sends gradients as matrices of low rank.

Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.compression.compressor import Compressor
from paceline.compression.pipeline import Gradients, Stages
from paceline.core.device_streams import keep, may_hold
from paceline.errors import UsageError

BLOCK = 1024
"""Number of elements of a column that are summed as one block; see :func:`_dots`."""

CACHED = 2**17
"""Number of elements of a product that are computed at a time; see :func:`product`."""


class PowerSGD(Compressor):
    """Compresses an n × m gradient M to P = M Q and, after orthonormalizing P, Q = Mᵀ P: (n + m) r numbers, not n m.

    Each training step performs one power iteration, starting from the previous step's Q (warm start). Each rank adds
    the residual M − P Qᵀ to its next gradient (error feedback). Tensors with more than two dimensions are reshaped to
    shape[0] rows. Vectors, complex parameters and matrices with (n + m) r >= n m are averaged uncompressed.

    Args:
        rank: r, at least 1; usually 1 to 4.

    Raises:
        UsageError: if `rank` is less than 1.
    """

    collectives = 2

    def __init__(self, model: nn.Module, rank: int = 2) -> None:
        super().__init__(model)
        if rank < 1:
            raise UsageError(f"PowerSGD(rank={rank}): give a rank of at least 1")
        self.matrix_rank = rank
        self._bases: dict[str, Tensor] = {}

    def reduce(self, gradients: Gradients) -> Stages:
        """Sum every P and the uncompressed gradients, then every Q."""
        self._residuals.add_to(gradients)
        matrices, plain = self._divide(gradients)
        parts = [*(matrix.p for matrix in matrices), *plain]
        sums = torch.cat([part.reshape(-1) for part in parts])
        yield self._all_reduce(sums)
        sums.div_(self.size)
        means = sums.split([part.numel() for part in parts])
        for matrix, mean in zip(matrices, means, strict=False):
            matrix.p = orthonormal(mean.view_as(matrix.p))
            matrix.q = matrix.m.t() @ matrix.p
            matrix.view.sub_((matrix.p @ matrix.q.t()).view(matrix.view.shape))  # the residual
        for view in plain:
            view.zero_()
        bases = torch.cat([sums.new_empty(0), *(matrix.q.reshape(-1) for matrix in matrices)])
        yield self._all_reduce(bases)
        parts = bases.div_(self.size).split([matrix.q.numel() for matrix in matrices])
        for matrix, part in zip(matrices, parts, strict=True):
            matrix.q = part.view_as(matrix.q)
        mean = self._product(gradients, {matrix.name: matrix for matrix in matrices}, means[len(matrices) :])
        self._keep_bases(matrices, torch.isfinite(mean.sum()))
        return self._finish(gradients, mean)

    def _divide(self, gradients: Gradients) -> tuple[list[Matrix], list[Tensor]]:
        """Return the gradients to compress, each with its P, and the others."""
        matrices, plain = [], []
        for name, view in zip(gradients.names, gradients.views, strict=True):
            if (shape := self._matrix_shape(name)) is None:
                plain.append(view)
                continue
            matrix = view.reshape(shape)
            basis = self.basis(name, matrix)
            matrices.append(Matrix(name, view, matrix, matrix @ basis, basis))
        return matrices, plain

    def _product(self, gradients: Gradients, compressed: dict[str, Matrix], plain: Sequence[Tensor]) -> Tensor:
        """Return the flat mean: P Qᵀ for the compressed gradients, and the means of the others."""
        rest = iter(plain)
        mean = torch.empty_like(gradients.flat)
        for name, target in zip(gradients.names, gradients.views_of(mean), strict=True):
            matrix = compressed.get(name)
            part = next(rest) if matrix is None else product(matrix.p, matrix.q)
            target.copy_(part.view(target.shape))
        return mean

    def _keep_bases(self, matrices: Sequence[Matrix], finite: Tensor) -> None:
        """Keep every Q for the next step if the mean is `finite`; else keep the last step's Q, or zeros if none."""
        for matrix in matrices:
            previous = self._bases.get(matrix.name)
            if previous is None:
                previous = torch.zeros_like(matrix.q)
            keep(previous)  # a loaded Q was allocated on another stream
            self._bases[matrix.name] = torch.where(finite, matrix.q, previous)

    def _matrix_shape(self, name: str) -> tuple[int, int] | None:
        """Return rows and columns of the parameter as a matrix; None if it is not compressed."""
        parameter = self._parameters[name]
        if parameter.ndim < 2 or parameter.is_complex() or not parameter.numel():
            return None
        rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
        return (rows, columns) if (rows + columns) * self.matrix_rank < rows * columns else None

    def basis(self, name: str, matrix: Tensor) -> Tensor:
        """Return the last step's Q. Zero columns, as after a step without a gradient, are replaced by random ones."""
        basis = self._bases.get(name)
        if basis is None:
            return self._fresh_basis(name, matrix)
        dead = (basis == 0).all(0)
        return torch.where(dead, self._fresh_basis(name, matrix), basis) if may_hold(dead.any()) else basis

    def _fresh_basis(self, name: str, matrix: Tensor) -> Tensor:
        """Draw a random Q, the same on every rank."""
        # Seeded by name and step, so that the ranks agree without communication, whatever their buckets are.
        digest = hashlib.sha256(f"0 {name} {self.steps}".encode()).digest()
        generator = torch.Generator(matrix.device).manual_seed(int.from_bytes(digest[:7], "big"))
        shape = (matrix.shape[1], self.matrix_rank)
        return torch.randn(shape, generator=generator, dtype=torch.float64, device=matrix.device).to(matrix.dtype)

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
    """The gradient's view of the flat gradients."""
    m: Tensor
    """The gradient as a matrix."""
    p: Tensor
    q: Tensor


def product(p: Tensor, q: Tensor) -> Tensor:
    """Return P Qᵀ; on a CPU, the bits do not depend on the number of threads, which may differ between ranks.

    The rounding in a matrix library depends on how threads divide the matrix. So on a CPU, columns are multiplied and
    added in order, with each operation rounded separately, for as many rows at a time as fit in the cache.
    """
    if p.device.type != "cpu":
        return p @ q.t()
    if p.dtype.itemsize < 4:
        p, q = p.float(), q.float()  # narrow dtypes are rounded once, at the end
    result = p.new_zeros(len(p), len(q))
    rows = max(1, CACHED // len(q))
    term = p.new_empty(min(rows, len(p)), len(q))
    for some, of_them in zip(p.split(rows), result.split(rows), strict=True):
        for left, right in zip(some.t(), q.t(), strict=True):
            of_them.add_(torch.mul(left[:, None], right, out=term[: len(some)]))
    return result


def orthonormal(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns by modified Gram-Schmidt in float64; dependent columns become zero.

    The bits do not depend on the number of threads, which may differ between ranks.
    """
    rows, rank = matrix.shape
    columns = torch.zeros(-(-rows // BLOCK) * BLOCK, rank, dtype=torch.float64, device=matrix.device)
    columns[:rows] = matrix
    norms = _dots(columns, columns).sqrt()
    for index in range(rank):
        column = columns[:, index : index + 1]
        norm = _dots(column, column).sqrt()
        column.mul_(torch.where(norm <= 1e-10 * norms[index], 0.0, 1 / norm))
        if index + 1 < rank:
            rest = columns[:, index + 1 :]
            rest.sub_(column * _dots(column, rest))
    return columns[:rows].to(matrix.dtype)


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """Return dot products of columns, summed in blocks, because torch's order of summation depends on its threads."""
    product = a * b
    return product.view(-1, BLOCK, product.shape[1]).sum(1).sum(0)
