"""Detects a mean loss inside ``model.weight(n)``, which expects a sum: the gradient would be n times too small.

Only the first few weighted backward passes are examined. The loss is found in the stack frame of torch's own
``backward``, and its ``grad_fn`` shows which operations produced it. The factors of a product are no longer available
while the graph is running; because n times a mean is a sum, a product causes no warning.
"""

from __future__ import annotations

import math
from enum import Enum
from types import FrameType
from typing import Any

from torch import Tensor

from paceline.core.telemetry.users_code import warn
from paceline.core.torch_internals.autograd import backward_call
from paceline.ddp.agreement.weight_block import Block

LOOKS = 3
"""Number of weighted backward passes to examine in each wrapper."""
DEPTH = 8
"""Maximum number of graph nodes to look through between the loss and the mean."""
MEAN = 1
"""ATen's number for ``reduction="mean"``."""
# Operations that turn a mean into a mean. Node names end in "Backward" and a number.
_KEEPS = ("ToCopy", "Neg", "Div", "Clone", "Alias", "Squeeze", "Unsqueeze", "View", "UnsafeView", "ReshapeAlias")
_SAME = tuple(f"{name}Backward" for name in _KEEPS)


class Origin(Enum):
    """The operation that produced a loss."""

    MEAN_LOSS = "a loss function that averages"
    MEAN = "a mean"
    UNKNOWN = "unknown"
    OTHER = "a sum, or anything else"


class MistakenMeans:
    """Examines the first weighted backward passes of a wrapper, and warns once."""

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
    return origin(root.grad_fn) in (Origin.MEAN_LOSS, Origin.MEAN)


def origin(node: Any, depth: int = DEPTH) -> Origin:
    """Return the operation that produced the scalar of `node`, looking through at most `depth` nodes."""
    if node is None or not depth:
        return Origin.OTHER
    name = node.name().rpartition("::")[2]
    sources = [source for source, _ in node.next_functions if source is not None]
    if getattr(node, "_saved_reduction", None) == MEAN:
        return Origin.MEAN_LOSS
    if name.startswith("MeanBackward"):
        if math.prod(node._saved_self_sym_sizes) == 1:  # the mean of one number is that number
            return origin(sources[0], depth - 1) if sources else Origin.OTHER
        source = sources[0].name() if sources else ""
        # A mean over a list of losses, each of which may be a sum.
        return Origin.UNKNOWN if source.startswith(("StackBackward", "CatBackward")) else Origin.MEAN
    if name.startswith(_SAME) and len(sources) == 1:
        return origin(sources[0], depth - 1)
    if name.startswith(("AddBackward", "SubBackward")):
        if _smooths_labels(sources):
            return Origin.MEAN_LOSS
        terms = [origin(source, depth - 1) for source in sources]
        if Origin.MEAN_LOSS in terms:
            return Origin.MEAN_LOSS
        return Origin.OTHER if Origin.OTHER in terms else Origin.MEAN if Origin.MEAN in terms else Origin.UNKNOWN
    if name.startswith("MulBackward"):
        return Origin.UNKNOWN
    return Origin.OTHER


def _smooths_labels(terms: list[Any]) -> bool:
    """Return whether `terms` come from a mean cross entropy with ``label_smoothing``.

    That function adds two products with a number, computed in C++ (``MulBackward1``); a product written in Python has a
    different node.
    """
    if len(terms) != 2 or any(not term.name().endswith("MulBackward1") for term in terms):
        return False
    source = terms[0].next_functions[0][0]
    return source is not None and source.name().startswith("NllLoss") and source._saved_reduction == MEAN
