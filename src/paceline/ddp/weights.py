"""Weights of micro-batches (``model.weight(w)``), and how they scale gradients.

In a weighted step, gradients from before the step must be kept apart from the step's own, and gradients that the
program has dropped do not count.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from paceline.core.device_streams import is_queued, read_later
from paceline.core.stacks import warn
from paceline.core.torch_internals import (
    GraphTask,
    backward_call,
    has_nonzero,
    has_overlap,
    is_accumulated,
    multiply_each,
    norm_each,
    queue_callback,
    stored_elements,
)
from paceline.errors import UsageError

UNWEIGHTED, WEIGHTED, UNCOUNTED, BY_SLICE = 1, 2, 4, 8
"""Bits of :attr:`~paceline.ddp.control_block.Status.weighting`. ``BY_SLICE`` means that the weight is this
rank's number of slices rather than a weight set by the program. Without ``WEIGHTED`` the rank ran no backward pass, and
its slices count only if the program sets no weights on any rank."""


def compute_scale(notes: Sequence[tuple[float, float]]) -> float:
    """Return the factor that turns sums over ranks into means: 1/N, or 1/Σw if micro-batches were weighted.

    N counts the ranks except ``UNCOUNTED`` ones, which have no data.

    Args:
        notes: weight and weighting of each rank, see :class:`~paceline.ddp.control_block.Status`. If all
            weights are zero, the gradient is zero.
    """
    bits, counted = 0, 0
    for _, weighting in notes:
        bits |= int(weighting)
        counted += not int(weighting) & UNCOUNTED
    if bits & WEIGHTED:
        total = total_weight(notes)
        return 1.0 / total if total else 0.0
    return 1.0 / max(1, counted)


def total_weight(notes: Sequence[tuple[float, float]]) -> float:
    """Return the sum of the weights set by the program or, if there are none, of the numbers of slices."""
    is_given = any(int(weighting) & (WEIGHTED | BY_SLICE) == WEIGHTED for _, weighting in notes)
    return sum((weight for weight, weighting in notes if not (is_given and int(weighting) & BY_SLICE)), 0.0)


def compute_correction(notes: Sequence[tuple[float, float]]) -> float:
    """Return the factor that converts a mean over all ranks to the mean that :func:`compute_scale` defines."""
    if any(int(weighting) & (WEIGHTED | UNCOUNTED) for _, weighting in notes):
        return compute_scale(notes) * len(notes)
    return 1.0


class Block:
    """One ``model.weight()`` block.

    Args:
        weight: a number, or a tensor of one element. A GPU tensor is copied in the background, and reading
            :attr:`weight` waits for the copy.
    """

    def __init__(self, weight: float | Tensor) -> None:
        self.has_forward = False
        """Whether a forward pass of the wrapper ran inside the block."""
        self.is_claimed = False
        """Whether the block's backward pass has begun."""
        self.is_on_its_way = isinstance(weight, Tensor) and is_queued(weight.device)
        """Whether reading the weight may have to wait."""
        self.drops: list[Callable[[], bool]] = []
        """Functions that wait for the device and return whether the program has dropped the block's gradients."""
        if isinstance(weight, Tensor) and self.is_on_its_way:
            self._read = read_later(weight)
        else:
            self._weight = _checked(float(weight))

    @property
    def weight(self) -> float:
        if self.is_on_its_way:
            self._weight = _checked(self._read())
            self.is_on_its_way = False
        return self._weight


class Blocks:
    """A wrapper's ``model.weight()`` blocks whose backward pass has not begun."""

    def __init__(self) -> None:
        self.open: list[Block] = []
        """The ``with`` blocks that are currently open, the innermost last."""
        # Blocks with a forward, in order. Weak references, because a block whose loss was dropped never runs backward.
        self._with_forward: list[weakref.ref[Block]] = []
        self.unused: list[Block] = []
        """Blocks that were closed without a forward pass, since the last forward or synchronization."""

    @contextmanager
    def inside(self, block: Block) -> Iterator[None]:
        self.open.append(block)
        try:
            yield
        finally:
            self.open.pop()
        # A block with gradients disabled belongs to an evaluation, so it never runs backward.
        if not (block.has_forward or block.is_claimed) and torch.is_grad_enabled():
            self.unused.append(block)

    def forward_ended(self) -> Block | None:
        """Return the block around a forward that has just ended, or None if there is none."""
        if self.unused:
            self.unused.clear()
        if not self.open:
            return None
        block = self.open[-1]
        if not block.has_forward:
            block.has_forward = True
            self._with_forward = [reference for reference in self._with_forward if _waits(reference())]
            self._with_forward.append(weakref.ref(block))
        return block

    def of_backward(self, block: Block | None) -> Block | None:
        """Return the block of a backward pass whose forward ran in `block` (None if outside any block); may be None."""
        if self.open and (block is None or block.is_claimed):
            return self.open[-1]
        if block is None and self.unused:
            return self.unused.pop(0)
        return block

    def waiting(self) -> Block | None:
        """Return the block whose backward pass is expected next: the open one, or the first one closed.

        Returns None if no block is waiting for its backward pass.
        """
        blocks = self.open[-1:] if self.open else (reference() for reference in self._with_forward)
        return next((block for block in blocks if _waits(block)), None)

    def without_forward(self) -> list[Block]:
        """Return the blocks without a forward pass of the wrapper; their backward pass may have bypassed it."""
        return [*self.unused, *(block for block in self.open if not block.has_forward)]


def _waits(block: Block | None) -> TypeGuard[Block]:
    return block is not None and block.has_forward and not block.is_claimed


def _checked(weight: float) -> float:
    if not math.isfinite(weight) or weight < 0:
        raise UsageError(f"model.weight() takes a finite number >= 0, such as a count of tokens, not {weight!r}")
    return weight


class Seen(NamedTuple):
    """A gradient as it was at one moment; does not keep it alive."""

    tensor: weakref.ref[Tensor]
    version: int

    @classmethod
    def of(cls, gradient: Tensor) -> Seen:
        return cls(weakref.ref(gradient), gradient._version)

    def is_unchanged(self, gradient: Tensor | None) -> bool:
        """Return whether `gradient` is the same tensor with the same version, which every change in place increases."""
        return gradient is not None and gradient is self.tensor() and gradient._version == self.version


class KeptGradients:
    """Preserves gradients from before a weighted step.

    At the end of the step, ``p.grad`` is divided by the sum of the weights over all ranks. To compensate, a rank of
    weight w multiplies its kept gradients by w. The division then yields their weighted average, which is equal on
    every rank.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget the kept gradients, because the step is over or they were dropped."""
        self.found: dict[int, Seen] | None = None
        """For each parameter id, the gradient that existed at the latest forward; None before the first forward."""
        # None before the first backward. Copies are needed only if more weights may follow, under no_sync().
        self.copies: list[tuple[Tensor, Tensor]] | None = None
        self._weight = 0.0
        self._is_settled = False

    def look(self, parameters: Sequence[Tensor]) -> None:
        """Record the gradients that exist before a backward pass; called after each forward in a block."""
        if self.copies is not None:
            return
        self.found = {}
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and _may_count(gradient):
                self.found[id(parameter)] = Seen.of(gradient)

    def multiply(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        weight: Callable[[], float],
        elsewhere: Collection[int],
        *,
        is_last: bool,
    ) -> None:
        """Multiply the kept gradients by the sum of this rank's weights; called when a backward begins.

        Args:
            names: names of the parameters.
            parameters: the parameters.
            weight: returns the sum of this rank's weights.
            elsewhere: parameters that another wrapper averages in the backward.
            is_last: whether the backward is synchronized, so that no other backward follows.
        """
        if self.copies is None:
            self.copies, kept, changed = [], [], {}
            for index, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
                if parameter.grad is not None and index not in elsewhere:
                    seen = None if self.found is None else self.found.get(id(parameter))
                    is_unchanged = self.found is None or (seen is not None and seen.is_unchanged(parameter.grad))
                    if is_unchanged or not (parameter.requires_grad and is_accumulated(parameter)):
                        kept.append(parameter)
                    elif _may_count(parameter.grad):
                        changed[parameter] = name if seen is not None and seen.tensor() is parameter.grad else ""
            if kept or changed:
                self._weight = weight()
                self._keep(kept, is_last=is_last)
                self._keep_if_more_arrives(changed, is_last=is_last)
        elif self.copies:
            previous, self._weight = self._weight, weight()
            for parameter, gradient in self.copies:
                if parameter.grad is not None:
                    more = gradient * (self._weight - previous)
                    parameter.grad = parameter.grad + more if more.is_sparse else parameter.grad.add_(more)
            self._is_settled = is_last

    @torch.no_grad()
    def _keep(self, parameters: Sequence[Tensor], *, is_last: bool) -> None:
        if parameters:
            assert self.copies is not None
            if not is_last:
                self.copies += [(param, param.grad.clone()) for param in parameters if param.grad is not None]
            self._is_settled = is_last
            multiply_gradients(parameters, self._weight)

    def _keep_if_more_arrives(self, names: Mapping[Tensor, str], *, is_last: bool) -> None:
        """Keep gradients that appeared or changed between the forward and the backward pass that is starting.

        If the change was made by this backward pass itself before it reached an output (a head outside the forward), no
        other gradient arrives. Then a new tensor is not kept, and one that existed at the forward is refused; `names`
        has an empty name for a new one.
        """
        if not names:
            return
        handles: dict[Tensor, RemovableHandle] = {}
        running = GraphTask()

        def arrives(parameter: Tensor, _gradient: Tensor) -> None:
            handles.pop(parameter).remove()
            if task() is not None:
                self._keep([parameter], is_last=is_last)

        def ended(_: object) -> None:
            while handles:
                handles.popitem()[1].remove()

        def check(_running: GraphTask) -> None:
            mixed = [name for parameter in handles if (name := names[parameter])]
            ended(None)
            if mixed:
                raise UsageError(
                    f"{mixed[0]!r} had a gradient before this weighted step, and this backward pass added to it before "
                    "it reached an output of the wrapper, so the wrapper cannot separate the two; call "
                    "optimizer.zero_grad() before the forward pass"
                )

        task = weakref.ref(running, ended)  # on an exception, autograd drops the callback without calling it
        queue_callback(partial(check, running))
        for parameter in names:
            handles[parameter] = parameter.register_hook(partial(arrives, parameter))

    def check_no_more(self) -> None:
        """Refuse another weight once the kept gradients have been multiplied by the final sum."""
        if self._is_settled:
            raise UsageError(
                "one backward pass covers several model.weight() blocks, but p.grad already held gradients, which must "
                "be multiplied by the sum of all weights before the pass begins; run one backward pass per block, or "
                "call optimizer.zero_grad() first"
            )


Answer: TypeAlias = bool | Callable[[], bool]
"""A value, or a function that waits for the device and returns it."""


class LocalGradients:
    """Detects that the program has dropped the gradients of weighted micro-batches under ``no_sync``.

    They count as dropped if all gradients of the wrapper are None or zero now, although one was nonzero when the latest
    of these backward passes ended. Only values decide: a program may drop gradients without raising a version
    (``p.grad.data.zero_()``), and it may clip or mask the gradients of micro-batches that still count.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget the gradients, because they are averaged or dropped."""
        self._existed = True
        self._were_nonzero: Answer = False

    def record(self, parameters: Sequence[Tensor]) -> None:
        """Record whether ``p.grad`` holds nonzero gradients; called at the end of each of these backward passes."""
        self._existed = any(parameter.grad is not None for parameter in parameters)
        self._were_nonzero = _are_nonzero(parameters)

    def are_dropped(self, parameters: Sequence[Tensor]) -> Answer:
        if all(parameter.grad is None for parameter in parameters):
            return self._existed  # None drops gradients that were zero, too
        were = self._were_nonzero
        are = were is not False and _are_nonzero(parameters)
        if callable(were) or callable(are):
            return lambda: _read(were) and not _read(are)
        return were and not are


def _read(answer: Answer) -> bool:
    return answer() if callable(answer) else answer


def _are_nonzero(parameters: Iterable[Tensor]) -> Answer:
    """Return whether any gradient is nonzero now."""
    queued: dict[torch.device, list[Tensor]] = {}
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        if not is_queued(gradient.device):
            if has_nonzero(gradient):
                return True
        elif (elements := stored_elements(gradient)).numel():
            queued.setdefault(gradient.device, []).append(elements)
    answers = [read_later(torch.stack(norm_each(gradients)).any()) for gradients in queued.values()]
    return bool(answers) and (lambda: any(answer() for answer in answers))


def _may_count(gradient: Tensor) -> bool:
    """Return whether the gradient may be nonzero; does not wait for the device."""
    return is_queued(gradient.device) or has_nonzero(gradient)


def multiply_gradients(parameters: Iterable[Tensor], weight: float) -> None:
    """Multiply the gradients of `parameters`; not in place if a gradient's elements may overlap in memory."""
    dense = []
    for parameter in parameters:
        assert parameter.grad is not None
        if parameter.grad.is_sparse or has_overlap(parameter.grad):
            parameter.grad = parameter.grad * weight
        else:
            dense.append(parameter.grad)
    if dense:
        multiply_each(dense, weight)


LOOKS = 3
"""Number of weighted backward passes to examine in each wrapper."""
MEAN = 1
"""ATen's number for ``reduction="mean"``."""
# Operations that turn a mean into a mean. Node names end in "Backward" and a number.
_KEEPS = ("ToCopy", "Neg", "Div", "Clone", "Alias", "Squeeze", "Unsqueeze", "View", "UnsafeView", "ReshapeAlias")
_SAME = tuple(f"{name}Backward" for name in _KEEPS)


class MistakenMeans:
    """Detects a mean loss inside ``model.weight(n)``, which expects a sum: the gradient would be n times too small.

    Only the first few weighted backward passes are examined. The loss is found in the stack frame of torch's own
    ``backward``, and its ``grad_fn`` shows the operation that produced it. Sums and products cause no warning, because
    n times a mean is a sum, and factors are no longer available while the graph is running.
    """

    def __init__(self) -> None:
        self._looks = LOOKS

    def check(self, block: Block) -> None:
        """Warn if the running backward pass starts from a mean although the weight is for a summed loss."""
        if not self._looks:
            return
        self._looks -= 1
        weight = block.weight
        # A fractional weight is not a number of items, so the mean may be intended. A mean over one item equals the
        # sum.
        if weight <= 1 or weight != int(weight):
            return
        call = backward_call()
        if call is None or not any(map(_is_mean, _roots(call))):
            return
        self._looks = 0
        message = (
            f"backward starts from a mean inside model.weight({weight:g}), which takes a summed loss, so gradients are "
            f'up to {weight:g} times too small; multiply the mean by {weight:g}, or use reduction="sum" in the loss'
        )
        warn(message, call=call)


def _roots(call: FrameType) -> list[Tensor]:
    value = call.f_locals.get("tensors")
    tensors = [value] if isinstance(value, Tensor) else list(value) if isinstance(value, tuple | list) else []
    return [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.numel() == 1]


def _is_mean(root: Tensor) -> bool:
    """Return whether `root` is a loss that averages, or the mean of several numbers."""
    node: Any = root.grad_fn
    while node is not None:
        name = node.name().rpartition("::")[2]
        if getattr(node, "_saved_reduction", None) == MEAN:
            return True
        source = node.next_functions[0][0] if node.next_functions else None
        if name.startswith("MeanBackward") and math.prod(node._saved_self_sym_sizes) > 1:
            # A mean over a list of losses causes no warning, because each loss may be a sum.
            return source is None or not source.name().startswith(("StackBackward", "CatBackward"))
        if not name.startswith(("MeanBackward", *_SAME)):  # the mean of one number is that number
            return False
        node = source
    return False
