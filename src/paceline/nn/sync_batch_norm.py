"""``SyncBatchNorm``: batch normalization over the whole global batch, on CPUs and GPUs.

Ioffe and Szegedy, "Batch Normalization", ICML 2015, with joint statistics of all ranks. Outputs, gradients and running
statistics match a single process that has the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from paceline.core.missing_ranks import collective
from paceline.core.stacks import warn
from paceline.core.torch_distributed import AnyBatchNorm, get_default_group
from paceline.core.torch_internals import leaves_graph
from paceline.errors import ReplicaMismatch, UsageError
from paceline.nn.normalize import Moments, Normalize, Report, combine, empty_message, pack, reports, wide

_DTYPES = (torch.float32, torch.float64)
_COMPARE = 2  # bit of a collective's code that marks the comparison; the other bits are dtype and number of elements
_HALF = (torch.float16, torch.bfloat16)


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
        _check(rank_reports, self.num_features, self.ranks())
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
            "does more than normalize, move the rest into a separate layer",
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


def _check(rank_reports: list[Report], features: int, ranks: list[int]) -> None:
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
