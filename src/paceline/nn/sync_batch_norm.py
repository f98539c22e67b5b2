"""``SyncBatchNorm``: batch normalization over the whole global batch, on CPUs and GPUs.

Ioffe and Szegedy, "Batch Normalization", ICML 2015, with joint statistics of all ranks. Outputs, gradients and running
statistics match a single process that has the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.lazy import LazyModuleMixin

from paceline.core.missing_ranks import collective
from paceline.core.stacks import warn
from paceline.core.torch_distributed import AnyBatchNorm, get_default_group
from paceline.core.torch_internals import leaves_graph
from paceline.errors import ReplicaMismatch, UsageError

_DTYPES = (torch.float32, torch.float64)
_COMPARE = 2  # bit of a collective's code that marks the comparison; the other bits are dtype and number of elements
_HALF = (torch.float16, torch.bfloat16)
HEAD = 4
"""Number of header elements before the C means and C sums: the count (two elements), dimensions and channels."""
PART = 2**20  # counts are sent as quotient and remainder, because float32 is exact only up to 2**24


class SyncBatchNorm(nn.SyncBatchNorm):
    """Batch normalization of inputs of shape (N, C, …), with joint statistics of all ranks.

    A drop-in replacement for ``torch.nn.SyncBatchNorm`` with the same arguments, and a subclass of it, so that code
    that checks for that class recognizes it. It also runs on the CPU; ranks may have batches of different sizes, or
    none. Statistics are kept in float64 for float64 inputs, otherwise in float32. Gradients of weight and bias cover
    only this rank's values; :class:`paceline.DistributedDataParallel` averages them like all others.

    In training mode, forward runs one all-gather of 2C + 4 elements per rank (the first forward also compares the
    layers), and backward one all-reduce of 2C elements, on `process_group`; with ``create_graph=True`` backward runs
    three all-reduces and can be differentiated again. All ranks must therefore run their layers in the same order, even
    under ``torch.no_grad()``. In eval mode, and in a world of one, it is ``torch.nn.functional.batch_norm``.

    Raises:
        ReplicaMismatch: on every rank, if ranks differ in the number of channels or the dtype of statistics.
        UsageError: on every rank, if ranks differ in the input's dimensions, an input does not have `num_features`
            channels, or all ranks together have one value per channel; on this rank, if the weight's dtype does not
            fit the input's.
    """

    announce: Callable[[int], object] | None = None
    """Function called before each collective with the code to pass to :meth:`shadow`; see ``Communicates``."""
    process_group: Any
    _is_compared = False
    """Whether the ranks have compared their layers, which they do in the first forward."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input`; in training mode together with all ranks."""
        # A group of one rank also announces its collectives, because the layer's group on another rank may be larger.
        if not self.training or (self._ranks() == 1 and self.announce is None):
            return AnyBatchNorm.forward(self, input)
        return self._synchronized(input)

    # -- the collectives ----------------------------------------------------------------------------------------

    def _ranks(self) -> int:
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self._group)

    @property
    def _group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self.process_group or get_default_group()
        return group

    @leaves_graph  # a compiled graph could reorder collectives, but these need the same order on all ranks
    def _synchronized(self, x: Tensor) -> Tensor:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                f"rank {dist.get_rank()}: a CUDA graph cannot capture SyncBatchNorm in training mode, which reads "
                "every rank's number of values on the host; leave it out of the graph, or use model.eval()"
            )
        if self.weight is not None and not _fits(x.dtype, self.weight.dtype):
            raise UsageError(
                f"rank {dist.get_rank()}: SyncBatchNorm got a {x.dtype} input but its weight is {self.weight.dtype}; "
                "the weight must have the input's dtype, or float32 for float16 and bfloat16 inputs"
            )
        normalized: Tensor = Normalize.apply(x, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return normalized

    def gather_moments(self, x: Tensor) -> Moments:
        """Return the moments over all ranks, and update the running statistics. Collective."""
        if not self._is_compared:
            self._announce(_COMPARE | _code(x.dtype))
            self._compare(wide(x.dtype), x.device)
        self._announce(_code(x.dtype))
        return self._combine(pack(x, self.num_features))

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks, in place. Collective."""
        self._announce(tensor.numel() << 2 | _code(tensor.dtype))
        return self._sum(tensor)

    def _sum(self, tensor: Tensor) -> Tensor:
        with collective("sum of SyncBatchNorm's gradients", self._group):
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def ranks(self) -> list[int]:
        """Return the world ranks whose statistics are combined."""
        return dist.get_process_group_ranks(self._group)

    def shadow(self, code: int, device: torch.device) -> None:
        """Take part, without values, in the collective that another rank has announced with `code`."""
        numel, dtype = code >> 2, _DTYPES[code & 1]
        if code & _COMPARE:
            self._compare(dtype, device)
        elif numel:
            self._sum(torch.zeros(numel, dtype=dtype, device=device))
        else:
            self._combine(empty_message(self.num_features, dtype, device))

    def _announce(self, code: int) -> None:
        if self.announce is not None:
            self.announce(code)

    def _compare(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compare the layers before messages of their size are exchanged, because Gloo and NCCL do not check sizes."""
        own_layer = torch.tensor([self.num_features, _code(dtype)], device=device)
        rows = own_layer.new_empty(self._ranks(), 2)
        with collective("comparison of SyncBatchNorm's channels", self._group):
            dist.all_gather(list(rows.unbind()), own_layer, group=self._group)
        ranks = self.ranks()
        (first_width, first_code), *others = rows.tolist()
        for rank, (width, code) in zip(ranks[1:], others, strict=True):
            if width != first_width:
                raise ReplicaMismatch(
                    f"a SyncBatchNorm has {first_width} channels on rank {ranks[0]} but {width} on rank {rank}; build "
                    "the same model on every rank, and run its layers in the same order"
                )
            if code != first_code:
                raise ReplicaMismatch(
                    f"a SyncBatchNorm's statistics are {_DTYPES[first_code]} on rank {ranks[0]} but {_DTYPES[code]} on "
                    f"rank {rank}; give inputs of the same type on every rank"
                )
        self._is_compared = True

    def _combine(self, message: Tensor) -> Moments:
        rows = message.new_empty(self._ranks(), message.numel())
        with collective("exchange of SyncBatchNorm's moments", self._group):
            dist.all_gather(list(rows.unbind()), message, group=self._group)
        rank_reports = reports(rows)
        _check_reports(rank_reports, self.num_features, self.ranks())
        moments = combine(rows, sum(report.count for report in rank_reports))
        self._track(moments)
        return moments

    @torch.no_grad()
    def _track(self, moments: Moments) -> None:
        """Update the running statistics with the unbiased variance. Without values, update only the count."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        factor: float | Tensor = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = self.num_batches_tracked.double().reciprocal()  # a tensor, so that the host does not wait
        if moments.count:
            unbiased = moments.variance * (moments.count / (moments.count - 1))
            for running, value in ((self.running_mean, moments.mean), (self.running_var, unbiased)):
                running.copy_(running.to(value.dtype).mul(1 - factor).add_(value * factor))

    # -- conversion ---------------------------------------------------------------------------------------------

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> Any:
        """Replace every BatchNorm in `module`, including torch's SyncBatchNorm, with this class.

        Parameters, buffers, hooks, training mode and all other attributes of the layers are kept as the same objects.

        Args:
            module: converted in place; if it is a BatchNorm itself, the new layer is returned.
            process_group: the ranks whose statistics are combined; by default all.

        Raises:
            UsageError: if `module` has a lazy BatchNorm, whose number of channels is unknown before its first forward.
        """
        return _convert(cls, module, process_group, {})


def _convert(cls: type[SyncBatchNorm], module: nn.Module, group: Any, converted: dict[int, nn.Module]) -> nn.Module:
    if (existing := converted.get(id(module))) is not None:
        return existing
    result = converted[id(module)] = _converted(cls, module, group) if isinstance(module, AnyBatchNorm) else module
    for name, child in module._modules.items():
        if child is not None:
            result._modules[name] = _convert(cls, child, group, converted)
    return result


def _converted(cls: type[SyncBatchNorm], module: AnyBatchNorm, group: Any) -> SyncBatchNorm:
    old_class = type(module)
    if isinstance(module, LazyModuleMixin):
        raise UsageError(
            f"{old_class.__name__} does not know its channels before its first forward; run one, then convert the model"
        )
    if old_class.forward not in (AnyBatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward):
        warn(
            f"{old_class.__name__} has its own forward, which is lost when the layer becomes a SyncBatchNorm; if it "
            "does more than normalize, move the rest into a separate layer"
        )
    converted = cls.__new__(cls)
    # Copies the module's whole state, including its containers. Without __init__, which would create new parameters.
    state = {key: value.copy() if isinstance(value, dict) else value for key, value in vars(module).items()}
    vars(converted).update(state, process_group=group, _is_compared=False)
    return converted


def _code(dtype: torch.dtype) -> int:
    return _DTYPES.index(wide(dtype))


def _fits(dtype: torch.dtype, weight: torch.dtype) -> bool:
    return weight is dtype or (weight is torch.float32 and dtype in _HALF)


class Normalize(Function):
    """``apply(x, weight, bias, layer)``: x of shape (N, C, …); weight and bias of shape (C,) or None.

    μ and σ² are the moments over n values per channel on all ranks, x̂ = (x - μ)/σ, and dy the gradient of y = w·x̂ + b::

        dx = w/σ · (dy - Σdy/n - x̂·Σ(dy·x̂)/n)        sums over all ranks: one all-reduce of 2C elements
        dw = Σ dy·x̂,  db = Σ dy                       sums over this rank; the wrapper averages them like others
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: SyncBatchNorm) -> Tensor:
        """Gather the moments of all ranks and normalize. Collective."""
        moments = layer.gather_moments(x)
        ctx.layer, ctx.count = layer, moments.count
        ctx.save_for_backward(x, weight, moments.mean, moments.variance)
        dtype = wide(x.dtype)
        scale, shift = (None if parameter is None else parameter.to(dtype) for parameter in (weight, bias))
        return torch.native_batch_norm(x, scale, shift, moments.mean, moments.variance, False, 0.0, layer.eps)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Compute the gradients. Collective, unless the input needs no gradient."""
        x, weight, mean, variance = ctx.saved_tensors
        gradients: tuple[Tensor | None, Tensor, Tensor]
        if torch.is_grad_enabled():  # create_graph=True
            gradients = _differentiable(x, weight, dy, ctx.count, ctx.layer)
        else:
            gradients = _gradients(x, weight, dy, mean, variance, ctx.count, ctx.layer, ctx.needs_input_grad[0])
        dx, dw, db = (
            gradient if needed else None for gradient, needed in zip(gradients, ctx.needs_input_grad, strict=False)
        )
        return dx, _like(weight, dw), _like(weight, db), None


def _like(weight: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None or weight is None else gradient.to(weight.dtype)


def _gradients(
    x: Tensor,
    weight: Tensor | None,
    dy: Tensor,
    mean: Tensor,
    variance: Tensor,
    count: int,
    layer: SyncBatchNorm,
    input_needs: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    if x.numel():
        # The needed sums are the weight and bias gradients of a normalization with given statistics. The CUDA kernel
        # requires tensors for all arguments: `mean` stands in for the weight, which does not affect the sums. Empty
        # tensors stand in for the values saved by forward, which saves none with given statistics.
        saved = mean.new_empty(0)
        _, dw, db = torch.ops.aten.native_batch_norm_backward(
            dy, x, mean, mean, variance, saved, saved, False, layer.eps, [False, True, True]
        )
    else:
        dw, db = torch.zeros_like(mean), torch.zeros_like(mean)
    if not input_needs:
        return None, dw, db
    sums = layer.sum_over_ranks(torch.cat([db, dw])) / max(count, 1)
    inverse = (variance + layer.eps).rsqrt()
    scale = inverse if weight is None else inverse * weight
    shape = _over_channels(x)
    sum_dy, sum_dy_x = sums.chunk(2)
    # Computed from x - μ, because x would lose precision if the mean is large compared with the deviation.
    dx = x - mean.view(shape)
    torch.addcmul((-scale * sum_dy).view(shape), dx, (-scale * inverse * sum_dy_x).view(shape), out=dx)
    return dx.addcmul_(dy, scale.view(shape)).to(x.dtype), dw, db


def _differentiable(
    x: Tensor, weight: Tensor | None, dy: Tensor, count: int, layer: SyncBatchNorm
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same gradients with differentiable operations; this takes three all-reduces instead of one."""
    shape, dtype = _over_channels(x), wide(x.dtype)
    values, dy_wide = x.to(dtype), dy.to(dtype)
    dims = [0, *range(2, x.dim())]
    n = max(count, 1)
    mean = _differentiable_sum(values.sum(dims), layer) / n
    centered = values - mean.view(shape)
    inverse = (_differentiable_sum(centered.square().sum(dims), layer) / n + layer.eps).rsqrt()
    unit = centered * inverse.view(shape)
    dw, db = (dy_wide * unit).sum(dims), dy_wide.sum(dims)
    sum_dy, sum_dy_x = (_differentiable_sum(torch.cat([db, dw]), layer) / n).chunk(2)
    scale = inverse if weight is None else inverse * weight
    dx = scale.view(shape) * (dy_wide - sum_dy.view(shape) - unit * sum_dy_x.view(shape))
    return dx.to(x.dtype), dw, db


def _over_channels(x: Tensor) -> list[int]:
    return [1, -1] + [1] * (x.dim() - 2)


class _SumOverRanks(Function):
    """A sum over ranks. It is its own adjoint: the gradient of an input is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, layer: SyncBatchNorm) -> Tensor:
        ctx.layer = layer
        # Cloned, because the sum is computed in place and the input belongs to the graph.
        return layer.sum_over_ranks(tensor.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _differentiable_sum(gradient, ctx.layer), None


def _differentiable_sum(tensor: Tensor, layer: SyncBatchNorm) -> Tensor:
    summed: Tensor = _SumOverRanks.apply(tensor, layer)  # type: ignore[no-untyped-call]
    return summed


@dataclass(frozen=True)
class Report:
    """What one rank reports to the others about the shape of its input."""

    count: int
    """Number of values per channel."""
    dims: int
    """Number of dimensions of the input; 0 for a rank without input."""
    channels: int


@dataclass(frozen=True)
class Moments:
    """Moments of the whole batch: number of values per channel, and their mean and biased variance, of shape (C,).

    They are combined from each rank's count, mean and squared deviations, after Chan, Golub and LeVeque, "Updating
    Formulae and a Pairwise Algorithm for Computing Sample Variances" (Stanford STAN-CS-79-773, 1979): deviations are
    taken from a mean, never as E[x²] - E[x]², which cancels if the mean is large.
    """

    count: int
    mean: Tensor
    variance: Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics for inputs of `dtype`."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def pack(x: Tensor, features: int) -> Tensor:
    """Return a rank's message of HEAD + 2C elements; only the head is filled if the number of channels is wrong."""
    dtype = wide(x.dtype)
    channels = x.size(1) if x.dim() > 1 else 0
    count = x.numel() // features
    head = [count // PART, count % PART, x.dim(), channels]
    message = empty_message(features, dtype, x.device)
    for place, number in enumerate(head):
        if number:
            message[place].fill_(number)  # a copy from the host would wait for the device
    if channels == features and count:
        # Computed by BatchNorm's own kernel, which returns results in the dtype of the running statistics.
        running_mean, running_var = torch.zeros(2, features, dtype=dtype, device=x.device)
        mean, variance = torch.batch_norm_update_stats(x, running_mean, running_var, 0.0)
        message[HEAD : HEAD + features] = mean
        message[HEAD + features :] = variance * count
    return message


def empty_message(features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the message of a rank that has no input."""
    return torch.zeros(HEAD + 2 * features, dtype=dtype, device=device)


def reports(rows: Tensor) -> list[Report]:
    """Return every rank's report from messages of shape (ranks, HEAD + 2C). Only this function waits for a GPU."""
    heads = rows[:, :HEAD].tolist()
    return [Report(int(high) * PART + int(low), int(dims), int(channels)) for high, low, dims, channels in heads]


def combine(rows: Tensor, total: int) -> Moments:
    """Return the moments of all ranks' `total` values, or zeros if there are none; bit-identical on every rank."""
    means, squares = rows[:, HEAD:].chunk(2, dim=1)
    weights = rows[:, 0:1] * PART + rows[:, 1:2]
    mean = (means * (weights / max(total, 1))).sum(0)
    between = (means - mean).square() * weights
    return Moments(total, mean, (squares + between).sum(0) / max(total, 1))


def _check_reports(rank_reports: list[Report], features: int, ranks: list[int]) -> None:
    """Raise a UsageError on all ranks if their inputs do not fit together."""
    inputs = [(rank, report) for rank, report in zip(ranks, rank_reports, strict=True) if report.dims]
    for rank, report in inputs:
        if report.channels != features:
            raise UsageError(
                f"SyncBatchNorm of {features} channels got an input of {report.dims} dimensions with {report.channels} "
                f"channels on rank {rank}; inputs have shape (N, {features}, …) on every rank"
            )
        if report.dims != inputs[0][1].dims:
            raise UsageError(
                f"SyncBatchNorm got an input of {inputs[0][1].dims} dimensions on rank {inputs[0][0]} but of "
                f"{report.dims} on rank {rank}; give all ranks inputs of the same kind"
            )
    if sum(report.count for _, report in inputs) == 1:
        raise UsageError(
            f"SyncBatchNorm got one value per channel on all {len(ranks)} ranks together, which has no variance; use "
            "a larger batch, or model.eval()"
        )
