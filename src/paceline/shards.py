"""DTensors as gradient averaging and its hooks see them: by this rank's own part."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor  # not before there may be one: it takes a while to load

    return isinstance(tensor, DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, in place; any other tensor as it is."""
    return cast("DTensor", tensor)._local_tensor if is_sharded(tensor) else tensor
