"""The bytes that a rank needs for training with each data-parallel strategy."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.core.messages import counted
from paceline.core.option_rules import choice
from paceline.ddp.buckets import MIB, assign, default_capacities
from paceline.ddp.sparse import sparse_by_layer
from paceline.errors import UsageError
from paceline.nn.data_parallel import nested_tensors
from paceline.optim.arguments import is_elementwise
from paceline.optim.sharding import STAGED, share_out
from paceline.tools.hub import one_line
from paceline.tools.memory_estimate.activations import Activations
from paceline.tools.memory_estimate.heap import Block, Heap

EXTENTS = (11, 7, 5, 3, 2, 13, 17, 19)
"""Sizes of the tiny parameter's dimensions, all different so that a size in a state tensor identifies a dimension."""
DEFAULT_MOMENTUM = 0.9
"""Value of a numeric option."""
TORCH_DDP, DDP, SHARDED, FSDP2 = "torch DDP", "Paceline DDP", "sharded optimizer", "FSDP2"
DEVICES = ("cpu", "cuda")
STEPS = 4
"""Number of steps of a simulation and of a measured run. The heap still grows after the first steps."""
Part = tuple[nn.Parameter, tuple[int, ...]]
"""A trained parameter, and the shape of the part of it that a rank updates."""


class OptimizerState:
    """Computes the bytes of state of ``optimizer_class(…, **options)``."""

    def __init__(self, optimizer_class: type[Optimizer], options: Mapping[str, Any]) -> None:
        self.optimizer_class, self.options = optimizer_class, options
        self.title = "+".join([optimizer_class.__name__, *options])
        """The optimizer with its options: ``SGD+momentum``."""
        self._layouts = cache(self._layout)

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the bytes of state for a parameter of `shape` and `dtype` after a step."""
        return sum(self.sizes(shape, dtype))

    def sizes(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[int]:
        """Return the bytes of each state tensor."""
        return [
            itemsize * prod(shape[extent] if extent < 0 else extent for extent in extents)
            for extents, itemsize in self._layouts(len(shape), dtype)
        ]

    def _layout(self, dimensions: int, dtype: torch.dtype) -> list[tuple[tuple[int, ...], int]]:
        """Return extents and bytes per element of each state tensor.

        An extent is a number, or a negative index into the parameter's shape.
        """
        shape = EXTENTS[:dimensions]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as warnings about the tiny parameter
                parameter = nn.Parameter(torch.ones(shape, dtype=dtype, device="cpu"))
                parameter.grad = torch.ones_like(parameter)
                optimizer: Any = self.optimizer_class([parameter], **self.options)
                optimizer.step()
        except Exception as error:  # of the optimizer
            raise UsageError(
                f"{self.title} failed to update a parameter with {counted(dimensions, 'dimension')} in "
                f"{str(dtype).removeprefix('torch.')}: {one_line(error)}; choose another --optimizer or other options"
            ) from error
        index = {extent: place - dimensions for place, extent in enumerate(shape)}
        return [
            (tuple(index.get(extent, extent) for extent in tensor.shape), tensor.element_size())
            for tensor in nested_tensors(optimizer.state.get(parameter))
        ]


def parse_optimizer(text: str) -> OptimizerState:
    """Return the torch optimizer that `text` names: ``adamw``, ``sgd+momentum``, ``adamw+amsgrad``."""
    name, *options = (word.strip().lower() for word in text.split("+"))
    classes = {
        kind.__name__.lower(): kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    optimizer_class = classes[choice("--optimizer", name, tuple(sorted(classes)))]
    parameters = dict(inspect.signature(optimizer_class).parameters)
    del parameters["params"]
    # Only which options are set decides the size of the state, not their values.
    values: dict[str, Any] = {}
    for option in options:
        default = parameters[choice(f"an option of --optimizer {name}", option, tuple(parameters))].default
        values[option] = DEFAULT_MOMENTUM if type(default) in (int, float) else True
    return OptimizerState(optimizer_class, values)


@dataclass(frozen=True)
class Footprint:
    """Memory of the rank that needs the most, in bytes."""

    strategy: str
    weights: int
    """Bytes of parameters and buffers."""
    gradients: int
    state: int
    """Bytes of the optimizer's state."""
    communication: int
    """Bytes of buffers that are used to communicate weights and gradients."""

    def peak(self, device: str, ranks: int, beyond: int) -> int:
        """Return the estimated peak in bytes; `beyond` is what :meth:`Training.beyond` returns."""
        libraries, connections = (8, 0) if device == "cuda" else (22, 8 * (ranks > 1))  # in MiB (decision 52)
        parts = self.weights + self.gradients + self.state + self.communication
        return parts + beyond + (libraries + connections) * MIB


class Training:
    """A model and its optimizer. Only the shapes and dtypes of the module's tensors are used.

    The optimizer has the parameters that require gradients.
    """

    def __init__(self, module: nn.Module, optimizer: OptimizerState) -> None:
        if sparse_by_layer(module):
            raise UsageError(
                "the model has layers with sparse gradients, whose size depends on the data; build it with sparse=False"
            )
        self.parameters = list(module.parameters())
        self.optimizer = optimizer
        self.trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        self.gradient_bytes = sum(parameter.nbytes for parameter in self.trained)
        self.buffers = list(module.buffers())
        self.buffer_bytes = sum(buffer.nbytes for buffer in self.buffers)
        uses = Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
        self.replaced = [parameter.nbytes for parameter, count in uses.items() for _ in range(count - 1)]
        """Bytes of each weight that was built, and then replaced by one that it shares (tied weights)."""
        self.layers: list[list[nn.Parameter]] = []
        """The parameters in each layer that FSDP2 gathers as a unit."""
        gathered: set[nn.Parameter] = set()
        for layer in _layers_of(module):
            self.layers.append([parameter for parameter in layer.parameters() if parameter not in gathered])
            gathered.update(layer.parameters())
        self._root = [parameter for parameter in self.parameters if parameter not in gathered]

    def footprints(self, ranks: int) -> list[Footprint]:
        """Return the footprint of each strategy on `ranks` ranks."""
        weights = sum(parameter.nbytes for parameter in self.parameters) + self.buffer_bytes
        gradients = self.gradient_bytes
        reduction = self._reduction_bytes() if ranks > 1 else 0
        whole = [(parameter, tuple(parameter.shape)) for parameter in self.trained]
        held, staging = self.sharded_parts(ranks) if ranks > 1 else ([whole], 0)
        return [
            self._footprint(TORCH_DDP, weights, gradients, gradients, whole),
            self._footprint(DDP, weights, gradients, reduction, whole),
            self._footprint(SHARDED, weights, gradients, reduction + staging, max(held, key=self.state_bytes)),
            self._fsdp2(ranks),
        ]

    def beyond(self, device: str, ranks: int, footprints: Sequence[Footprint], activations: Activations) -> int:
        """Return the bytes of a peak besides the columns for weights, gradients, state and communication.

        On a CPU, the rest of the heap in training with the wrapper; negative if these columns do not reach their maxima
        at the same time. Elsewhere, the activations and an allowance for the optimizer's temporaries.
        """
        if device == "cuda" or not activations.trace:
            largest = max((parameter.nbytes for parameter in self.trained), default=0)
            return int(activations.total + 2.5 * largest)
        row = next(row for row in footprints if row.strategy == DDP)
        parts = row.weights + row.gradients + row.state + row.communication
        return self._heap_peak(activations, has_buckets=ranks > 1) - parts

    @cache  # noqa: B019  (lives as long as the command)
    def _heap_peak(self, activations: Activations, has_buckets: bool) -> int:
        """Return the peak of the heap in the first steps of training."""
        heap, outputs = Heap(), list[Block]()
        for tensor in (*self.parameters, *self.buffers):
            heap.allocate(tensor.nbytes)
        for size in self.replaced:
            heap.free(heap.allocate(size))
        if has_buckets:  # which hold the gradients
            for parameter in self.trained:
                heap.allocate(parameter.nbytes)
        for step in range(STEPS):
            blocks: dict[int, Block] = {}
            for place, (number, size) in enumerate(activations.trace):
                if place == activations.forward:  # the new outputs replace those of the previous step
                    heap.free(*outputs)
                if number > 0:
                    blocks[number] = heap.allocate(size)
                elif has_buckets or -number not in activations.gradients:
                    heap.free(blocks.pop(-number))
            for parameter in self.trained:
                heap.drop_small_objects()
                if step == 0:
                    for size in self.optimizer.sizes(tuple(parameter.shape), parameter.dtype):
                        heap.allocate(size)
                heap.free(heap.allocate(parameter.nbytes), heap.allocate(parameter.nbytes))  # of the optimizer
            heap.free(*(blocks.pop(number) for number in activations.gradients if number in blocks))
            outputs = list(blocks.values())
        return heap.peak

    def state_bytes(self, parts: Iterable[Part]) -> int:
        """Return the bytes of state of a rank that updates `parts`."""
        return sum(self.optimizer.nbytes(shape, parameter.dtype) for parameter, shape in parts)

    def sharded_parts(self, ranks: int) -> tuple[list[list[Part]], int]:
        """Return the parts that each rank of a sharded optimizer updates, and the bytes to exchange updated parts."""
        by = "element" if is_elementwise(self.optimizer.optimizer_class) else "tensor"
        held: list[list[Part]] = [[] for _ in range(ranks)]
        staged = []
        for members, pieces in share_out(self.trained, (), by, [0] * ranks):
            loads = [0] * ranks
            for piece in pieces:
                parameter = self.trained[piece.parameter]
                is_whole = piece.numel == parameter.numel()
                held[piece.owner].append((parameter, tuple(parameter.shape) if is_whole else (piece.numel,)))
                loads[piece.owner] += piece.numel
            staged.append(ranks * max(loads) * self.trained[members[0]].element_size())
        return held, max((sum(staged[at : at + STAGED]) for at in range(len(staged))), default=0)

    def _footprint(
        self, strategy: str, weights: int, gradients: int, communication: int, parts: Sequence[Part]
    ) -> Footprint:
        return Footprint(strategy, weights, gradients, self.state_bytes(parts), communication)

    def _fsdp2(self, ranks: int) -> Footprint:
        """Return the footprint of FSDP2: a rank holds part of each parameter, and at most two gathered layers."""

        def part(parameter: nn.Parameter) -> Part:
            # fully_shard pads all parts to the size of the largest.
            return parameter, (-(-parameter.shape[0] // ranks), *parameter.shape[1:]) if parameter.dim() else ()

        def whole(parameters: Iterable[nn.Parameter]) -> int:
            return sum(parameter.nbytes * (1 + parameter.requires_grad) for parameter in parameters)

        weights = self.buffer_bytes + sum(_nbytes(part(parameter)) for parameter in self.parameters)
        parts = [part(parameter) for parameter in self.trained]
        gathered = whole(self._root) + sum(sorted(map(whole, self.layers))[-2:]) if ranks > 1 else 0
        return self._footprint(FSDP2, weights, sum(map(_nbytes, parts)), gathered, parts)

    def _reduction_bytes(self) -> int:
        """Return the bytes of gradients that wait to be copied into a bucket, plus the copies of buffers."""
        sizes = [parameter.nbytes for parameter in self.trained]
        kinds = [parameter.dtype for parameter in self.trained]
        buckets = assign(sizes, kinds, range(len(sizes))[::-1], default_capacities(sum(sizes)))
        return max(sum(sizes[place] for place in bucket) for bucket in buckets) + self.buffer_bytes


def _nbytes(part: Part) -> int:
    return prod(part[1]) * part[0].element_size()


def _layers_of(module: nn.Module) -> list[nn.Module]:
    """Return the usual units of fully_shard: the children of the outermost lists of layers."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return list(module.children())
    return [layer for child in module.children() for layer in _layers_of(child)]
