"""The bytes that one rank holds while it trains, by the way in which ranks share the work.

A footprint has the bytes of the tensors of each kind, and the largest sum that exists at once: in forward and backward,
or in the optimizer's step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from paceline.optim.elementwise import is_elementwise
from paceline.optim.owned_shard import HALVES
from paceline.optim.segments import STAGED
from paceline.optim.sharding import share_out
from paceline.optim.sharding_plan import Piece
from paceline.tools.memory_estimate.contents import Contents, nbytes
from paceline.tools.memory_estimate.dry_run import DryRun
from paceline.tools.memory_estimate.live_bytes import LARGE
from paceline.tools.memory_estimate.trial import Gradient, Trial

TORCH_DDP, DDP, SHARDED, FSDP2 = "torch DDP", "Paceline DDP", "sharded optimizer", "FSDP2"

NO_RUN = DryRun(0, (), 0, 0, "", 0.0, 0.0, 0, 0)
"""The run of a training whose batch is not known."""


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank."""

    strategy: str
    weights: int
    """Bytes of parameters and buffers."""
    gradients: int
    state: int
    """Bytes of the optimizer's state, with the copies of weights that it trains in their place."""
    communication: int
    """Bytes of the buffers by which weights and gradients travel."""
    backward: int
    """Bytes of activations, gradients and temporaries that come and go in forward and backward, at most at once."""
    step: int
    """Bytes that come and go in the optimizer's step, at most at once."""
    step_in_heap: int
    """The same for blocks smaller than :data:`~paceline.tools.memory_estimate.live_bytes.LARGE` alone."""
    constant: tuple[int, int]
    """Bytes that are there all the time while the former are, and while the latter are."""

    @property
    def peak(self) -> int:
        """Most bytes of tensors at once."""
        return max(self.constant[0] + self.backward, self.constant[1] + self.step)


@dataclass(frozen=True)
class Training:
    """A model, its optimizer, and the dtype in which it is trained."""

    contents: Contents
    trial: Trial
    master_dtype: torch.dtype | None = None
    """Type of the copies that are trained in place of bf16 and fp16 parameters."""
    run: DryRun = NO_RUN
    """The bytes of a forward and a backward, if a batch is known."""

    @property
    def has_masters(self) -> bool:
        """Whether some parameter has such a copy."""
        return any(self.trained_dtype(parameter) is not parameter.dtype for parameter in self.contents.parameters)

    def footprints(self, ranks: int) -> list[Footprint]:
        """Return the bytes of each strategy on the rank of `ranks` that has the most.

        Raises:
            UsageError: if the optimizer cannot train some parameter.
        """
        return [torch_ddp(self), ddp(self, ranks), sharded(self, ranks), fsdp2(self, ranks)]

    def trained_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype in which the optimizer sees `parameter`."""
        return (self.master_dtype or parameter.dtype) if parameter.dtype in HALVES else parameter.dtype

    def master_bytes(self, place: int, numel: int) -> int:
        """Return the bytes of the copy of `numel` elements of the parameter at `place`; 0 where it is none."""
        parameter = self.contents.parameters[place]
        dtype = self.trained_dtype(parameter)
        return 0 if dtype is parameter.dtype else numel * dtype.itemsize

    def state_bytes(self, place: int, shape: Sequence[int] | None = None) -> int:
        """Return the bytes of optimizer state for the parameter at `place`, or for a part of it that has `shape`."""
        parameter = self.contents.parameters[place]
        kind: Gradient = "sparse" if place in self.contents.sparse else "dense"
        whole = parameter.shape if shape is None else shape
        dtype = self.trained_dtype(parameter)
        return self.trial.nbytes(tuple(whole), dtype, kind if parameter.requires_grad else "none")

    def backward_bytes(self, buckets: Sequence[Sequence[int]] = (), ranks: int = 1) -> int:
        """Return the most bytes of activations, temporaries and gradients in a forward and a backward.

        Args:
            buckets: parameters whose gradients are freed together, because they are copied into a bucket.
            ranks: number of ranks that share a gradient after its arrival.
        """
        parameters, dense = self.contents.parameters, set(self.contents.dense)
        sizes = [nbytes(each) // ranks if place in dense else 0 for place, each in enumerate(parameters)]
        return self.run.peak(sizes, buckets) if self.run.arrivals else sum(sizes) * (not buckets)

    def dense(self) -> list[tuple[int, Sequence[int]]]:
        """Return the trained parameters with dense gradients, and their shapes."""
        return [(place, self.contents.parameters[place].shape) for place in self.contents.dense]

    def step_bytes(self, parts: Iterable[tuple[int, Sequence[int]]]) -> tuple[int, int]:
        """Return the bytes in the optimizer's step beside weights, gradients and state, and those of small blocks.

        Args:
            parts: the parameters that are updated, and the shapes in which the optimizer sees them.
        """
        seen = [
            (len(shape), prod(shape), self.trained_dtype(self.contents.parameters[place])) for place, shape in parts
        ]
        small = [each for each in seen if each[1] * each[2].itemsize < LARGE]
        most, in_heap = map(self.trial.temporary_bytes, (seen, small))
        return self.run.kept + most, self.run.kept + in_heap

    def whole_state_bytes(self) -> int:
        """Return the bytes of the whole state, and of copies of the parameters that are trained in their place."""
        pairs = list(enumerate(self.contents.parameters))
        masters = sum(self.master_bytes(place, each.numel()) for place, each in pairs if each.requires_grad)
        return masters + sum(self.state_bytes(place) for place, _ in pairs)


def torch_ddp(training: Training) -> Footprint:
    """Return the footprint of torch's DDP: gradients are copied into buckets (``gradient_as_bucket_view=False``)."""
    contents = training.contents
    gradients, state = contents.gradient_bytes, training.whole_state_bytes()
    always = contents.weight_bytes + state + gradients
    backward, step = training.backward_bytes(), training.step_bytes(training.dense())
    constant = always, always + gradients
    return Footprint(TORCH_DDP, contents.weight_bytes, gradients, state, gradients, backward, *step, constant)


def ddp(training: Training, ranks: int) -> Footprint:
    """Return the footprint of our wrapper: gradients are in the buckets, see :mod:`paceline.ddp.reducer.gradients`."""
    contents = training.contents
    state = training.whole_state_bytes()
    communication = reduction_bytes(contents) if ranks > 1 else 0
    in_backward, in_step = wrapper_bytes(contents, ranks)
    always = contents.weight_bytes + state
    constant = always + in_backward, always + in_step
    backward, step = backward_of_wrapper(training, ranks), training.step_bytes(training.dense())
    return Footprint(
        DDP, contents.weight_bytes, contents.gradient_bytes, state, communication, backward, *step, constant
    )


def reduction_bytes(contents: Contents) -> int:
    """Return the wrapper's bytes beside buckets: gradients that wait to be moved into one, and copies of buffers."""
    buckets = contents.buckets(contents.dense[::-1])
    sizes = (sum(nbytes(contents.parameters[place]) for place in bucket) for bucket in buckets)
    return max(sizes, default=0) + contents.buffer_bytes


def backward_of_wrapper(training: Training, ranks: int) -> int:
    """Return the bytes that come and go in a forward and backward of the wrapper."""
    if ranks == 1:
        return training.backward_bytes()
    dense = set(training.contents.dense)
    # Without a run in the reverse of their order, which the wrapper takes until it has seen gradients arrive.
    order = [place for place, _ in training.run.arrivals if place in dense] or training.contents.dense[::-1]
    return training.backward_bytes(training.contents.buckets(order))


def wrapper_bytes(contents: Contents, ranks: int) -> tuple[int, int]:
    """Return the bytes of gradients and of copies of buffers that the wrapper has in backward, and after it.

    Several ranks have buckets all the time; one rank has its gradients from their arrival on.
    """
    if ranks == 1:
        return 0, contents.gradient_bytes
    return (contents.gradient_bytes + contents.buffer_bytes,) * 2


def sharded(training: Training, ranks: int) -> Footprint:
    """Return the footprint of :mod:`paceline.optim`: each rank has only the optimizer state of its own pieces."""
    contents, plan = training.contents, plan_of(training, ranks)
    # The gradients of pieces with a master are cast for the step. Frozen pieces have masters, but no gradients to cast.
    trained = [
        [piece for piece in pieces if contents.parameters[piece.parameter].requires_grad] for pieces in plan.held
    ]
    casts = [sum(training.master_bytes(piece.parameter, piece.numel) for piece in pieces) for pieces in trained]
    states = [held_state(training, pieces) for pieces in plan.held]
    most = max(range(ranks), key=lambda rank: states[rank] + casts[rank])
    staging = plan.staging_bytes if ranks > 1 else 0
    communication = reduction_bytes(contents) + staging if ranks > 1 else 0
    in_backward, in_step = wrapper_bytes(contents, ranks)
    always = contents.weight_bytes + states[most]
    constant = always + in_backward, always + in_step
    pieces = [piece for piece in trained[most] if piece.parameter not in contents.sparse]
    temporaries = training.step_bytes((piece.parameter, (piece.numel,)) for piece in pieces)
    step, step_in_heap = (casts[most] + staging + each for each in temporaries)
    gradients = contents.gradient_bytes + casts[most]
    backward = backward_of_wrapper(training, ranks)
    parts = contents.weight_bytes, gradients, states[most], communication
    return Footprint(SHARDED, *parts, backward, step, step_in_heap, constant)


@dataclass(frozen=True)
class Plan:
    """The pieces of parameters that each rank of a sharded optimizer trains."""

    held: list[list[Piece]]
    """The pieces of each rank."""
    staging_bytes: int
    """Bytes of updated parameters under way, where ranks do not share their memory."""


def plan_of(training: Training, ranks: int) -> Plan:
    """Return the plan that :class:`paceline.optim.ShardedOptimizer` makes."""
    contents, trial = training.contents, training.trial
    parameters = contents.parameters
    by = "element" if is_elementwise(trial.optimizer_class, trial.options) else "tensor"
    # Updated by every rank: sparse gradients cannot be cut into pieces, and one rank has nobody to share with.
    apart = range(len(parameters)) if ranks == 1 else sorted(contents.sparse)
    held = [[Piece(place, 0, parameters[place].numel(), rank) for place in apart] for rank in range(ranks)]
    staged = []
    for members, pieces in share_out(parameters, apart, by, [0] * ranks):
        loads: Counter[int] = Counter()
        for piece in pieces:
            held[piece.owner].append(piece)
            loads[piece.owner] += piece.numel
        if parameters[members[0]].requires_grad:
            staged.append(ranks * max(loads.values()) * parameters[members[0]].element_size())
    return Plan(held, max((sum(staged[at : at + STAGED]) for at in range(len(staged))), default=0))


def held_state(training: Training, pieces: Iterable[Piece]) -> int:
    """Return the bytes of state, and of masters, of a rank that holds `pieces`."""
    total = 0
    for piece in pieces:
        is_whole = piece.numel == training.contents.parameters[piece.parameter].numel()
        total += training.state_bytes(piece.parameter, None if is_whole else (piece.numel,))
        total += training.master_bytes(piece.parameter, piece.numel)
    return total


def fsdp2(training: Training, ranks: int) -> Footprint:
    """Return the footprint of FSDP2: a rank holds a part of each parameter, gathers a layer, and the next one ahead.

    Where there are masters, these are the sharded parameters, and layers are gathered in the parameters' own dtype, as
    with ``MixedPrecisionPolicy(param_dtype=…)``.
    """
    contents = training.contents
    weights = gradients = state = 0
    for place, parameter in enumerate(contents.parameters):
        shape = _shard(parameter, ranks)
        dtype = training.trained_dtype(parameter) if parameter.requires_grad else parameter.dtype
        held = prod(shape) * dtype.itemsize
        weights += held
        gradients += held if parameter.requires_grad else 0
        state += training.state_bytes(place, shape)
    communication = gathered_bytes(contents) if ranks > 1 else 0
    weights += contents.buffer_bytes
    shards = [(place, _shard(contents.parameters[place], ranks)) for place in contents.dense]
    constant = weights + state + communication, weights + state + gradients
    backward, step = training.backward_bytes(ranks=ranks), training.step_bytes(shards)
    return Footprint(FSDP2, weights, gradients, state, communication, backward, *step, constant)


def gathered_bytes(contents: Contents) -> int:
    """Return the bytes that are whole at a time: weights and gradients of the root, of a layer, and of the next one."""
    inside = {place for layer in contents.layers for place in layer}
    root = [place for place in range(len(contents.parameters)) if place not in inside]
    layers = sorted((_whole_bytes(contents, layer) for layer in contents.layers), reverse=True)
    return _whole_bytes(contents, root) + sum(layers[:2])


def _whole_bytes(contents: Contents, places: Sequence[int]) -> int:
    parameters = [contents.parameters[place] for place in places]
    return sum(nbytes(parameter) * (2 if parameter.requires_grad else 1) for parameter in parameters)


def _shard(parameter: nn.Parameter, ranks: int) -> tuple[int, ...]:
    """Return the shape of the largest part, to which fully_shard pads the others."""
    if not parameter.dim():
        return ()
    return -(-parameter.shape[0] // ranks), *parameter.shape[1:]
