"""Access to DTensors for gradient averaging, its hooks and checkpoints: this rank's part, or the whole tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor  # imported only if needed, because it is slow to load

    return isinstance(tensor, DTensor)


def has_sharded(values: Iterable[Any]) -> bool:
    """Whether there is a DTensor among `values`."""
    return any(isinstance(value, Tensor) and is_sharded(value) for value in values)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, not copied; any other tensor unchanged."""
    return cast("DTensor", tensor)._local_tensor if is_sharded(tensor) else tensor


@torch.no_grad()
def whole_of(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor; needs a collective among the ranks of its mesh."""
    return cast("DTensor", tensor).full_tensor()


@torch.no_grad()
def part_like(full: Tensor, tensor: Tensor) -> Tensor:
    """Return `full`, which every rank has, in the layout of the DTensor `tensor`, without a collective."""
    from torch.distributed.tensor import distribute_tensor

    like = cast("DTensor", tensor)
    moved = full.to(like._local_tensor.device)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


def as_local(parameter: nn.Parameter) -> nn.Parameter:
    """Return `parameter` or, if it is a DTensor, an object that represents it in the reducer."""
    return cast("nn.Parameter", _Shard(cast("DTensor", parameter))) if is_sharded(parameter) else parameter


def release(parameter: nn.Parameter) -> None:
    """Remove the hook that :func:`as_local` registered."""
    if isinstance(parameter, _Shard):
        parameter.close()


class _Shard:
    """This rank's shard of a DTensor parameter: its shape, and its gradient as a plain tensor.

    It has the parameter attributes that the reducer uses.
    """

    def __init__(self, parameter: DTensor) -> None:
        self._parameter = parameter
        # Convert gradients on arrival, because this may need a collective: gradients arrive in the same order on all
        # ranks that share a parameter, but each group of replicas chooses its own order for launching buckets.
        self._handle = parameter.register_post_accumulate_grad_hook(_lay_out)

    @property
    def requires_grad(self) -> bool:
        return self._parameter.requires_grad

    @property
    def grad(self) -> Tensor | None:
        if self._parameter.grad is None:
            return None
        _lay_out(self._parameter)
        return cast("DTensor", self._parameter.grad)._local_tensor

    @grad.setter
    def grad(self, local: Tensor | None) -> None:
        from torch.distributed.tensor import DTensor

        spec = self._parameter._spec
        self._parameter.grad = None if local is None else DTensor(local, spec, requires_grad=False)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        return self._parameter.register_post_accumulate_grad_hook(hook)

    def register_hook(self, hook: Any) -> Any:
        return self._parameter.register_hook(hook)

    def expand_as(self, _other: Any) -> Any:
        return self._parameter.expand_as(self._parameter)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter._local_tensor, name)

    def close(self) -> None:
        self._handle.remove()


@torch.no_grad()
def _lay_out(parameter: Any) -> None:
    """Give the gradient its parameter's layout. The gradient of a replicated parameter may still be a partial sum."""
    gradient = parameter.grad
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
        parameter.grad = gradient
    if hasattr(gradient._local_tensor, "trigger_wait"):  # a functional collective is running
        gradient._local_tensor = gradient._local_tensor.wait()
