"""The bytes that a rank needs for training with each data-parallel strategy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from torch import nn

from paceline.ddp.options.buckets import CAPACITY, FIRST_CAPACITY, MIB, assign
from paceline.ddp.transport.sparse import sparse_by_layer
from paceline.errors import UsageError
from paceline.optim.segments import STAGED
from paceline.optim.separable import is_elementwise
from paceline.optim.sharding import share_out
from paceline.tools.memory_estimate.activations import Activations
from paceline.tools.memory_estimate.optimizer_state import OptimizerState

TORCH_DDP, DDP, SHARDED, FSDP2 = "torch DDP", "Paceline DDP", "sharded optimizer", "FSDP2"
DEVICES = ("cpu", "cuda")


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
    largest: int
    """Bytes of the largest piece that the optimizer updates at once."""

    def peak(self, device: str, ranks: int, activations: Activations) -> int:
        """Return the estimated peak in bytes; the constants are fitted to measured peaks (decision 52)."""
        held = self.weights + self.gradients + self.state + self.communication + activations.total
        temporaries = 0.1 * activations.total + 2.5 * self.largest
        if device == "cuda":
            return int(held + temporaries + 8 * MIB)
        libraries, connections = 34 * MIB, (8 * MIB if ranks > 1 else 0)
        return int(held + temporaries + 0.7 * activations.small + libraries + connections)


Part = tuple[nn.Parameter, tuple[int, ...]]
"""A trained parameter, and the shape of the part of it that a rank updates."""


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
        self.buffer_bytes = sum(buffer.nbytes for buffer in module.buffers())
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
        largest = max(map(_nbytes, parts), default=0)
        return Footprint(strategy, weights, gradients, self.state_bytes(parts), communication, largest)

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
        buckets = assign(sizes, kinds, range(len(sizes))[::-1], (FIRST_CAPACITY, CAPACITY))
        return max(sum(sizes[place] for place in bucket) for bucket in buckets) + self.buffer_bytes


def _nbytes(part: Part) -> int:
    return prod(part[1]) * part[0].element_size()


def _layers_of(module: nn.Module) -> list[nn.Module]:
    """Return the usual units of fully_shard: the children of the outermost lists of layers."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return list(module.children())
    return [layer for child in module.children() for layer in _layers_of(child)]
