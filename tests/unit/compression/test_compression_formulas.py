"""Every compressor matches a naive reference that sees the gradients of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from insides import CHUNK, Bucket, GradBucket, orthonormal, product
from paceline import World
from paceline.compression import Cast, Compressor, Int8, PowerSGD, TopK, hook
from paceline.errors import CheckpointMismatch, UsageError
from twins import Pools

Array = Any
STEPS = 4


class Net(nn.Module):
    """Matrices, a vector, and a convolution in channels-last memory."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(20, 31, dtype=dtype))
        self.vector = nn.Parameter(torch.zeros(7, dtype=dtype))
        conv = torch.zeros(9, 8, 3, 3, dtype=dtype)
        self.conv = nn.Parameter(conv.to(memory_format=torch.channels_last))
        self.long = nn.Parameter(torch.zeros(1500, 2, dtype=dtype))


LAYOUTS = [[3, 1], [2, 0]], [[0, 1, 2, 3]]
"""Parameters of each bucket, before they are rebuilt and after."""


def gradient_of(rank: int, step: int, index: int, shape: torch.Size) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + index)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** (index - 1)


def reduce_all(net: Net, state: Compressor, rank: int, step: int, layout: list[list[int]]) -> list[Tensor]:
    """Return the hook's result for each parameter, in the parameter's shape."""
    parameters = list(net.parameters())
    buckets = [Bucket.allocate(indices, parameters) for indices in layout]
    futures = []
    for at, bucket in enumerate(buckets):
        for index, view in zip(bucket.indices, bucket.views, strict=True):
            view.copy_(gradient_of(rank, step, index, view.shape))
        futures.append(hook(state, GradBucket.of(bucket, parameters, at, last=at == len(buckets) - 1)))
    results: list[Tensor] = [torch.empty(0)] * len(parameters)
    for bucket, future in zip(buckets, futures, strict=True):
        assert future.wait().data_ptr() == bucket.flat.data_ptr()
        for index, view in zip(bucket.indices, bucket.views, strict=True):
            results[index] = view
    return results


class Reference:
    """A model of all ranks: ``reduce`` takes a step's gradients, flat in memory order, by rank and parameter."""

    def __init__(self, net: Net, size: int) -> None:
        self.size = size
        self.parameters = list(net.parameters())
        self.residuals = [[numpy.zeros(p.numel()) for p in self.parameters] for _ in range(size)]

    def reduce(self, gradients: list[list[Array]], layout: list[list[int]], step: int) -> list[Array]:
        results: list[Array] = [None] * len(self.parameters)
        for indices in layout:
            ends = numpy.cumsum([len(gradients[0][i]) for i in indices])[:-1]
            whole = [
                numpy.concatenate([own[i] + left[i] for i in indices])
                for own, left in zip(gradients, self.residuals, strict=True)
            ]
            mean, left = self.bucket(whole, indices)
            for i, part in zip(indices, numpy.split(mean, ends), strict=True):
                results[i] = part
            for r in range(self.size):
                for i, part in zip(indices, numpy.split(left[r], ends), strict=True):
                    self.residuals[r][i] = part
        return results

    def bucket(self, whole: list[Array], indices: list[int]) -> tuple[Array, list[Array]]:
        raise NotImplementedError


class TopKReference(Reference):
    def bucket(self, whole: list[Array], indices: list[int]) -> tuple[Array, list[Array]]:
        count = math.ceil(0.1 * len(whole[0]))
        mean, left = numpy.zeros_like(whole[0]), [rank.copy() for rank in whole]
        for rank, own in enumerate(whole):
            for place in sorted(range(len(own)), key=lambda place: -abs(own[place]))[:count]:
                mean[place] += own[place] / self.size
                left[rank][place] = 0
        return mean, left


class CastReference(Reference):
    def bucket(self, whole: list[Array], indices: list[int]) -> tuple[Array, list[Array]]:
        total = sum((torch.tensor(own) / self.size).to(torch.bfloat16) for own in whole)
        return total.double().numpy(), [numpy.zeros_like(own) for own in whole]


class Int8Reference(Reference):
    def bucket(self, whole: list[Array], indices: list[int]) -> tuple[Array, list[Array]]:
        count = len(whole[0])
        length = -(-count // self.size)
        chunk = min(CHUNK, length)
        length = -(-length // chunk) * chunk
        mean, left = numpy.zeros(count), [own.copy() for own in whole]
        for owner in range(self.size):
            for start in range(owner * length, min((owner + 1) * length, count), chunk):
                piece = slice(start, min(start + chunk, count))
                sent = [eight_bits(own[piece]) for own in whole]
                exact = sum(sent) / self.size
                mean[piece] = eight_bits(exact)
                for rank in range(self.size):
                    left[rank][piece] -= sent[rank]
                left[owner][piece] += self.size * (exact - mean[piece])
        return mean, left


def eight_bits(values: Array) -> Array:
    scale = float(numpy.float32(abs(values).max() / 127))
    return numpy.rint(values / scale) * scale


class PowerReference(Reference):
    """Works without stored bases: projects M onto the columns of the sum of M Q over the ranks."""

    def __init__(self, net: Net, size: int) -> None:
        super().__init__(net, size)
        self.q: dict[int, Array] = {}
        self.state = PowerSGD(net, rank=3)

    def bucket(self, whole: list[Array], indices: list[int]) -> tuple[Array, list[Array]]:
        ends = numpy.cumsum([self.parameters[i].numel() for i in indices])[:-1]
        means, lefts = [], [[] for _ in whole]
        for i, own in zip(indices, zip(*(numpy.split(rank, ends) for rank in whole), strict=True), strict=True):
            name = ["wide", "vector", "conv", "long"][i]
            if name in ("vector", "long"):  # (1500 + 2) × 3 is more than 1500 × 2
                means.append(sum(own) / self.size)
                for left, part in zip(lefts, own, strict=True):
                    left.append(numpy.zeros_like(part))
                continue
            rows = self.parameters[i].shape[0]
            matrices = [self.matrix(i, part).reshape(rows, -1) for part in own]
            q = self.q.get(i)
            if q is None:
                q = self.state.basis(name, torch.tensor(matrices[0])).numpy()  # the same first draw
            p, _ = numpy.linalg.qr(sum(matrix @ q for matrix in matrices) / self.size)
            self.q[i] = sum(matrix.T @ p for matrix in matrices) / self.size
            means.append(self.flat(i, p @ self.q[i].T))
            for left, matrix in zip(lefts, matrices, strict=True):
                left.append(self.flat(i, matrix - p @ (p.T @ matrix)))
        return numpy.concatenate(means), [numpy.concatenate(left) for left in lefts]

    def matrix(self, index: int, flat: Array) -> Array:
        """Convert memory order to a matrix of the parameter's shape."""
        shape = self.parameters[index].shape
        if index == 2:
            o, i, h, w = shape
            return flat.reshape(o, h, w, i).transpose(0, 3, 1, 2)
        return flat.reshape(shape)

    def flat(self, index: int, matrix: Array) -> Array:
        whole = matrix.reshape(self.parameters[index].shape)
        return (whole.transpose(0, 2, 3, 1) if index == 2 else whole).reshape(-1)


KINDS: dict[str, tuple[Callable[[nn.Module], Compressor], type[Reference], float]] = {
    "cast": (lambda net: Cast(net, torch.bfloat16), CastReference, 2e-2),
    "topk": (lambda net: TopK(net, 0.1), TopKReference, 1e-12),
    "int8": (Int8, Int8Reference, 1e-12),
    "powersgd": (lambda net: PowerSGD(net, rank=3), PowerReference, 1e-8),
}


def in_memory_order(tensor: Tensor) -> Tensor:
    if tensor.ndim == 4:
        return tensor.permute(0, 2, 3, 1).reshape(-1)
    return tensor.reshape(-1)


def follow(world: World, kind: str) -> list[bytes]:
    make, make_reference, rtol = KINDS[kind]
    torch.manual_seed(world.rank)  # compressors must not use this generator
    net = Net()
    state, reference = make(net), make_reference(net, world.size)
    bits = []
    for step in range(STEPS):
        layout = LAYOUTS[step >= STEPS // 2]
        found = [in_memory_order(one) for one in reduce_all(net, state, world.rank, step, layout)]
        shapes = [p.shape for p in net.parameters()]
        gradients = [
            [in_memory_order(gradient_of(rank, step, i, shape)).numpy() for i, shape in enumerate(shapes)]
            for rank in range(world.size)
        ]
        wanted = reference.reduce(gradients, layout, step)
        for mine, other in zip(found, wanted, strict=True):
            scale = abs(other).max()
            numpy.testing.assert_allclose(mine.numpy(), other, rtol=0, atol=rtol * scale, err_msg=f"step {step}")
        residuals = state.state_dict()["residuals"]
        for (name, _), other in zip(net.named_parameters(), reference.residuals[world.rank], strict=True):
            if residuals:
                mine = in_memory_order(residuals[name]).numpy()
                numpy.testing.assert_allclose(mine, other, rtol=0, atol=10 * rtol * max(abs(other).max(), 1))
        bits.append(torch.cat(found).numpy().tobytes())
    return bits


@pytest.mark.parametrize(("size", "kind"), [(1, "int8"), *((3, kind) for kind in KINDS)])
def test_a_compressor_equals_its_naive_reference(pools: Pools, size: int, kind: str) -> None:
    runs = pools.run(size, follow, kind)
    assert all(run == runs[0] for run in runs)  # to the bit


def skips(world: World) -> None:
    """A NaN on one rank gives NaN on all ranks, but does not affect later steps."""
    net = Net()
    parameters = list(net.parameters())
    for make, *_ in KINDS.values():
        state, undisturbed = make(net), make(net)
        for step in range(2):
            if step == 1:
                bucket = Bucket.allocate([0, 1, 2, 3], parameters)
                bucket.flat.normal_()
                if world.rank == 1:
                    bucket.views[0].view(-1)[3] = float("nan")
                before = {name: one.clone() for name, one in state.state_dict()["residuals"].items()}
                hook(state, GradBucket.of(bucket, parameters, 0, last=True)).wait()
                assert not bucket.views[0].isfinite().all()
                after = state.state_dict()["residuals"]
                assert all(torch.equal(one, after[name]) for name, one in before.items())
            mine = reduce_all(net, state, world.rank, step, LAYOUTS[0])
            others = reduce_all(net, undisturbed, world.rank, step, LAYOUTS[0])
            assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


def test_a_nonfinite_gradient_reaches_all_ranks_but_no_residual(pools: Pools) -> None:
    pools.run(3, skips)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.complex64]


def any_dtype(world: World, kind: str) -> list[bytes]:
    torch.set_num_threads(world.rank + 1)  # more threads split sums differently
    lossless = {"topk": lambda net: TopK(net, 1.0), "powersgd": lambda net: PowerSGD(net, 100)}
    make = lossless.get(kind, KINDS[kind][0])
    found = []
    for dtype in DTYPES:
        net = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((300, 200), (3, 5), (4,))])
        state = make(net)
        bucket = Bucket.allocate([0, 1, 2], list(net))
        parts = []
        for rank in range(world.size):
            generator = torch.Generator().manual_seed(rank)
            parts.append(torch.randn(bucket.flat.numel(), generator=generator, dtype=torch.float64).to(dtype))
        bucket.flat.copy_(parts[world.rank])
        value = hook(state, GradBucket.of(bucket, list(net), 0, last=True)).wait()
        assert value.dtype == dtype
        wide = torch.complex128 if dtype.is_complex else torch.float64
        mean = torch.stack([part.to(wide) for part in parts]).mean(0)
        rough = 1.0 if isinstance(state, PowerSGD) else 0.03  # noise has no low rank
        assert float((value.to(wide) - mean).abs().max()) < rough * float(mean.abs().max())
        found.append(torch.view_as_real(value) if dtype.is_complex else value)
    torch.set_num_threads(1)
    return [one.view(torch.uint8).numpy().tobytes() for one in found]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_with_different_thread_counts_get_the_same_bits(pools: Pools, kind: str) -> None:
    first, *others = pools.run(3, any_dtype, kind)
    assert all(other == first for other in others)


# -- pure --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_summed_in_column_order(dtype: torch.dtype) -> None:
    # Replicas diverged when ranks had different thread counts, because the matrix library splits its work by thread.
    torch.manual_seed(5)
    p, q = (torch.randn(size, 37).to(dtype) for size in (500, 301))
    expected = torch.zeros(500, 301)
    for left, right in zip(p.float().t(), q.float().t(), strict=True):
        expected += left[:, None] * right
    assert torch.equal(product(p, q), expected)


def test_columns_become_orthonormal_and_keep_their_span() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(3000, 4, dtype=torch.float64)
    matrix[:, 1] = matrix[:, 0] + 1e-6 * matrix[:, 1]  # nearly dependent
    basis = orthonormal(matrix)
    torch.testing.assert_close(basis.t() @ basis, torch.eye(4, dtype=torch.float64), atol=1e-8, rtol=0)
    torch.testing.assert_close(basis @ (basis.t() @ matrix), matrix, atol=1e-7, rtol=0)
    matrix[:, 2] = 2 * matrix[:, 3]
    basis = orthonormal(torch.cat([matrix[:, 2:], torch.zeros(3000, 1, dtype=torch.float64)], dim=1))
    assert [round(float(norm), 9) for norm in basis.norm(dim=0)] == [1, 0, 0]


# -- arguments and states ----------------------------------------------------------------------------------------------


def refusals(world: World) -> None:
    net, other = Net(), Net()
    for make, message in [
        (lambda: TopK(net, 0.0), "greater than 0 and at most 1"),
        (lambda: TopK(net, 1.5), "greater than 0 and at most 1"),
        (lambda: PowerSGD(net, rank=0), "a rank of at least 1"),
        (lambda: Cast(net, torch.float64), r"give torch\.bfloat16 or torch\.float16"),
        (lambda: reduce_all(other, TopK(net), world.rank, 0, LAYOUTS[0]), "a parameter that its state does not know"),
    ]:
        with pytest.raises(UsageError, match=message):
            make()
    state = PowerSGD(net)
    reduce_all(net, state, world.rank, 0, LAYOUTS[0])
    with pytest.raises(CheckpointMismatch, match="belongs to the compressor 'PowerSGD', not to 'TopK'"):
        TopK(net).load_state_dict(state.state_dict())
    with pytest.raises(CheckpointMismatch, match=r"the saved bases of 'conv' have shape \(72, 2\), this model has"):
        PowerSGD(net, rank=3).load_state_dict(state.state_dict())
    with pytest.raises(CheckpointMismatch, match=r"the saved residuals of .* no such parameter"):
        PowerSGD(nn.Linear(3, 3)).load_state_dict(state.state_dict())


def test_wrong_arguments_and_states_are_named(pools: Pools) -> None:
    pools.run(3, refusals)


COUNT = 512 * 258 + 1536
"""A third of it is a multiple of a chunk of 512."""


def bytes_sent(world: World) -> dict[str, float]:
    net = nn.ParameterList([nn.Parameter(torch.zeros(512, 258)), nn.Parameter(torch.zeros(1536))])
    ratios = {}
    states = {"cast": Cast(net), "int8": Int8(net), "topk": TopK(net, 0.01), "powersgd": PowerSGD(net, rank=2)}
    for name, state in states.items():
        assert state.ratio == 1.0
        bucket = Bucket.allocate([0, 1], list(net))
        hook(state, GradBucket.of(bucket, list(net), 0, last=True)).wait()
        assert state.bytes_uncompressed == 2 * (world.size - 1) * 4 * COUNT // world.size
        ratios[name] = state.ratio
    return ratios


def test_bytes_sent_match_the_formats(pools: Pools) -> None:
    for ratios in pools.run(3, bytes_sent):
        assert ratios["cast"] == 0.5
        assert ratios["int8"] == pytest.approx(0.25 * (1 + 4 / 512), rel=0.001)
        assert ratios["topk"] == pytest.approx(0.01 * 3, rel=0.001)
        assert ratios["powersgd"] == pytest.approx(((512 + 258) * 2 + 1536) / COUNT, rel=0.001)
