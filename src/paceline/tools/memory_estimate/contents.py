"""The tensors of a module that take memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.core.state.buckets import CAPACITY, FIRST_CAPACITY, assign
from paceline.ddp.transport.sparse import sparse_by_layer
from paceline.errors import UsageError


@dataclass(frozen=True)
class Contents:
    """Parameters and buffers, each once however often it is shared, in the dtypes in which they are trained."""

    parameters: list[nn.Parameter]
    """Parameters in the module's order, on the meta device."""
    sparse: frozenset[int]
    """Indices of the parameters whose gradients are sparse."""
    buffer_bytes: int
    layers: list[list[int]]
    """Indices of the parameters of each layer that FSDP2 gathers as a unit; the others belong to the root."""
    layers_title: str
    """Description of the layers for people; empty without any."""

    @property
    def dense(self) -> list[int]:
        """Indices of the parameters with a dense gradient."""
        pairs = enumerate(self.parameters)
        return [place for place, parameter in pairs if parameter.requires_grad and place not in self.sparse]

    def buckets(self, order: Sequence[int]) -> list[list[int]]:
        """Return the wrapper's buckets of the parameters whose gradients arrive in `order`."""
        sizes, kinds = [nbytes(each) for each in self.parameters], [each.dtype for each in self.parameters]
        return assign(sizes, kinds, order, (FIRST_CAPACITY, CAPACITY))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters and buffers."""
        return sum(map(nbytes, self.parameters)) + self.buffer_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all dense gradients."""
        return sum(nbytes(self.parameters[place]) for place in self.dense)

    @property
    def title(self) -> str:
        """Numbers of parameters by dtype, for people."""
        counts: Counter[str] = Counter()
        for parameter in self.parameters:
            counts[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
        total, trained = sum(counts.values()), sum(each.numel() for each in self.parameters if each.requires_grad)
        dtypes = " and ".join(counts) if len(counts) == 1 else ", ".join(f"{n:,} {name}" for name, n in counts.items())
        return f"{total:,} parameters ({dtypes})" + ("" if trained == total else f", {trained:,} of them trained")


def nbytes(tensor: Tensor) -> int:
    """Return the bytes that the elements of `tensor` take."""
    return tensor.numel() * tensor.element_size()


def contents_of(module: nn.Module, dtype: torch.dtype | None) -> Contents:
    """Return the contents of `module` once its floating-point tensors are cast to `dtype`, if that is given.

    Raises:
        UsageError: if a layer does not know its shape yet, or there is nothing to train.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(
                f"{name!r} has no shape, because it belongs to a lazy layer that has not seen an input; run a forward "
                "in the function that builds the model"
            )
    found = list(module.parameters())
    if not any(parameter.requires_grad for parameter in found):
        raise UsageError(
            "the model has no parameter that requires a gradient, so there is nothing to train; name a model with one"
        )
    places = {id(parameter): place for place, parameter in enumerate(found)}
    parameters = [
        nn.Parameter(torch.empty(each.shape, dtype=_cast(each, dtype), device="meta"), requires_grad=each.requires_grad)
        for each in found
    ]
    sparse = frozenset(places[key] for key in sparse_by_layer(module))
    buffers = sum(buffer.numel() * _cast(buffer, dtype).itemsize for buffer in module.buffers())
    gathered, layers, names = set[int](), [], Counter[str]()
    for layer in _layers_of(module):
        # A parameter that layers share is gathered with the first of them.
        inside = {places[id(parameter)] for parameter in layer.parameters()} - gathered
        gathered |= inside
        if inside:
            layers.append(sorted(inside))
            names[type(layer).__name__] += 1
    title = ", ".join(f"{count} × {name}" for name, count in names.most_common(3)) + ", …" * (len(names) > 3)
    return Contents(parameters, sparse, buffers, layers, title)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _layers_of(module: nn.Module) -> list[nn.Module]:
    """Return the layers to which users apply fully_shard: those in the outermost lists of layers."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return list(module.children())
    return [layer for child in module.children() for layer in _layers_of(child)]
