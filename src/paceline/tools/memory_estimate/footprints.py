"""The bytes that a rank needs for training with each data-parallel strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from torch import nn

from paceline.ddp.options.buckets import CAPACITY, FIRST_CAPACITY, MIB, assign
from paceline.ddp.transport.sparse import sparse_by_layer
from paceline.optim.segments import STAGED
from paceline.optim.separable import is_elementwise
from paceline.optim.sharding import share_out
from paceline.optim.sharding_plan import Piece
from paceline.tools.memory_estimate.activations import Activations
from paceline.tools.memory_estimate.optimizer_state import Gradient, OptimizerState

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


class Training:
    """A model and its optimizer. Only the shapes and dtypes of the module's tensors are used."""

    def __init__(self, module: nn.Module, optimizer: OptimizerState) -> None:
        self.parameters = list(module.parameters())
        self.optimizer = optimizer
        places = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        self.sparse = {places[key] for key in sparse_by_layer(module)}
        """Indices of the parameters with sparse gradients."""
        self.buffer_bytes = sum(buffer.nbytes for buffer in module.buffers())
        self.layers: list[list[int]] = []
        """Indices of the parameters in each layer that FSDP2 gathers as a unit."""
        gathered: set[int] = set()
        for layer in _layers_of(module):
            inside = {places[id(parameter)] for parameter in layer.parameters()} - gathered
            gathered |= inside
            self.layers.append(sorted(inside))

    @property
    def dense(self) -> list[int]:
        """Indices of the trained parameters with dense gradients."""
        return [at for at, parameter in enumerate(self.parameters) if parameter.requires_grad and at not in self.sparse]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all dense gradients."""
        return sum(self.parameters[place].nbytes for place in self.dense)

    def footprints(self, ranks: int) -> list[Footprint]:
        """Return the footprint of each strategy on `ranks` ranks."""
        weights = sum(parameter.nbytes for parameter in self.parameters) + self.buffer_bytes
        gradients = self.gradient_bytes
        # Some optimizers keep state for frozen parameters, too.
        state = sum(self._state_bytes(at, tuple(param.shape)) for at, param in enumerate(self.parameters))
        reduction = self._reduction_bytes() if ranks > 1 else 0
        largest = max(param.nbytes for param in self.parameters if param.requires_grad)
        return [
            Footprint(TORCH_DDP, weights, gradients, state, gradients, largest),
            Footprint(DDP, weights, gradients, state, reduction, largest),
            self._sharded(ranks, weights, reduction),
            self._fsdp2(ranks),
        ]

    def held_state(self, pieces: Iterable[Piece]) -> int:
        """Return the bytes of state of a rank that trains `pieces`."""
        return sum(self._state_bytes(piece.parameter, self._shape(piece)) for piece in pieces)

    def sharded_pieces(self, ranks: int) -> tuple[list[list[Piece]], int]:
        """Return the pieces that each rank of a sharded optimizer holds, and the bytes to exchange updated pieces."""
        kind = self.optimizer
        by = "element" if is_elementwise(kind.optimizer_class) else "tensor"
        # Parameters with sparse gradients cannot be divided, so every rank updates them. A single rank updates all.
        replicated = range(len(self.parameters)) if ranks == 1 else sorted(self.sparse)
        held = [[Piece(at, 0, self.parameters[at].numel(), rank) for at in replicated] for rank in range(ranks)]
        staged = []
        for members, pieces in share_out(self.parameters, replicated, by, [0] * ranks):
            loads: Counter[int] = Counter()
            for piece in pieces:
                held[piece.owner].append(piece)
                loads[piece.owner] += piece.numel
            if self.parameters[members[0]].requires_grad:
                staged.append(ranks * max(loads.values()) * self.parameters[members[0]].element_size())
        return held, max((sum(staged[at : at + STAGED]) for at in range(len(staged))), default=0)

    def _sharded(self, ranks: int, weights: int, reduction: int) -> Footprint:
        held, staging = self.sharded_pieces(ranks)
        pieces = max(held, key=self.held_state)
        communication = reduction + (staging if ranks > 1 else 0)
        largest = max((self._piece_bytes(piece) for piece in pieces), default=0)
        return Footprint(SHARDED, weights, self.gradient_bytes, self.held_state(pieces), communication, largest)

    def _fsdp2(self, ranks: int) -> Footprint:
        """Return the footprint of FSDP2: a rank holds part of each parameter, and at most two gathered layers."""
        weights, gradients, state, largest = self.buffer_bytes, 0, 0, 0
        for place, parameter in enumerate(self.parameters):
            # fully_shard pads all parts to the size of the largest.
            shape = (-(-parameter.shape[0] // ranks), *parameter.shape[1:]) if parameter.dim() else ()
            nbytes = prod(shape) * parameter.element_size()
            weights += nbytes
            state += self._state_bytes(place, shape)
            if parameter.requires_grad:
                gradients += nbytes
                largest = max(largest, nbytes)
        return Footprint(FSDP2, weights, gradients, state, self._gathered_bytes() if ranks > 1 else 0, largest)

    def _gathered_bytes(self) -> int:
        def whole(places: Sequence[int]) -> int:
            return sum(self.parameters[at].nbytes * (1 + self.parameters[at].requires_grad) for at in places)

        inside = {place for layer in self.layers for place in layer}
        root = [place for place in range(len(self.parameters)) if place not in inside]
        return whole(root) + sum(sorted(map(whole, self.layers), reverse=True)[:2])

    def _reduction_bytes(self) -> int:
        """Return the bytes of gradients that wait to be copied into a bucket, plus the copies of buffers."""
        sizes = [parameter.nbytes for parameter in self.parameters]
        kinds = [parameter.dtype for parameter in self.parameters]
        buckets = assign(sizes, kinds, self.dense[::-1], (FIRST_CAPACITY, CAPACITY))
        return max((sum(sizes[place] for place in bucket) for bucket in buckets), default=0) + self.buffer_bytes

    def _shape(self, piece: Piece) -> tuple[int, ...]:
        parameter = self.parameters[piece.parameter]
        return tuple(parameter.shape) if piece.numel == parameter.numel() else (piece.numel,)

    def _state_bytes(self, place: int, shape: tuple[int, ...]) -> int:
        gradient: Gradient = "sparse" if place in self.sparse else "dense"
        parameter = self.parameters[place]
        return self.optimizer.nbytes(shape, parameter.dtype, gradient if parameter.requires_grad else "none")

    def _piece_bytes(self, piece: Piece) -> int:
        parameter = self.parameters[piece.parameter]
        return piece.numel * parameter.element_size() if parameter.requires_grad else 0


def _layers_of(module: nn.Module) -> list[nn.Module]:
    """Return the usual units of fully_shard: the children of the outermost lists of layers."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return list(module.children())
    return [layer for child in module.children() for layer in _layers_of(child)]
