"""Copies of states that change during a training step, and references to large tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.optimizer_states import parameters
from paceline.checkpoint.registered import Registered
from paceline.core.unwrapping import unwrap
from paceline.errors import CheckpointError

SMALL = 2**16
"""Maximum number of elements of tensors that are copied; larger ones are usually parameters or constant buffers."""
_NONE = torch.empty((0,) * 9, dtype=torch.float32, device="cpu")
"""Placeholder for a buffer that is None."""
_PLAIN = (type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device)


@dataclass(frozen=True)
class Uncopied:
    """A large tensor that is not copied, and its version counter, which reveals changes."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Uncopied:
        return cls(tensor, tensor._version)

    def unchanged(self, name: str) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise CheckpointError(f"{name} has changed since the end of the last step")
        return self.tensor


def holder_of(state: Any) -> Any:
    """Return an object whose ``state_dict()`` returns `state`."""
    return SimpleNamespace(state_dict=lambda: state)


def snapshot(value: Any) -> Any:
    """Return a copy of the nested `value`, with large tensors as :class:`Uncopied`."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.numel() <= SMALL else Uncopied.of(value)
    kind = type(value)
    if kind is dict:
        return {key: snapshot(item) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(snapshot(item) for item in value)
    if isinstance(value, Mapping):  # copied, because not every mapping can be constructed from a dict
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = snapshot(item)  # type: ignore[index]
        return copied
    return copy.deepcopy(value)


def from_snapshot(value: Any, name: str) -> Any:
    """Return the value that :func:`snapshot` copied."""
    if isinstance(value, Uncopied):
        return value.unchanged(name)
    kind = type(value)
    if kind in (list, tuple):
        return kind(from_snapshot(item, name) for item in value)
    if isinstance(value, Mapping):
        restored = copy.copy(value)
        for key, item in value.items():
            restored[key] = from_snapshot(item, name)  # type: ignore[index]
        return restored
    return value


class Snapshotter:
    """Copies an object's state, except parameters, optimizer states and small buffers.

    The parts of a module are collected once. :meth:`SmallBuffers.load` detects parts that are added later.
    """

    def __init__(self, entry: Registered) -> None:
        self.entry = entry
        self._large: list[tuple[str, nn.Module, str]] = []
        """Large buffers of modules: full name, module and attribute."""
        self._extra: list[nn.Module] = []
        """Modules with extra state."""
        if isinstance(entry.object, nn.Module):
            module = unwrap(entry.object)
            self._extra = _with_extra_state(module)
            for prefix, part in module.named_modules():
                for name, buffer in part.named_buffers(prefix, recurse=False):
                    if buffer.numel() > SMALL:
                        self._large.append((name, part, name.rpartition(".")[2]))

    def take(self) -> Any:
        """Return a copy of the object's current state."""
        target = self.entry.object
        if isinstance(target, nn.Module):
            large = {name: getattr(part, attribute) for name, part, attribute in self._large}
            copies = {name: None if buffer is None else Uncopied.of(buffer) for name, buffer in large.items()}
            return copies, [snapshot(part.get_extra_state()) for part in self._extra]
        if isinstance(target, torch.optim.Optimizer):
            groups = target.param_groups
            return [{key: snapshot(value) for key, value in group.items() if key != "params"} for group in groups]
        return snapshot(target.state_dict())


def object_from_snapshot(entry: Registered, content: Any) -> Registered:
    """Return an entry whose object has the state that :meth:`Snapshotter.take` copied.

    Modules and optimizers are changed in place. :meth:`SmallBuffers.load` restores small buffers of modules.
    """
    if isinstance(entry.object, nn.Module):
        module, (large, extra) = unwrap(entry.object), content
        for name in large.keys() & module.state_dict().keys():  # other buffers are not saved
            path, _, attribute = name.rpartition(".")
            buffer = from_snapshot(large[name], f"buffer {name!r} of {entry.name!r}")
            setattr(module.get_submodule(path), attribute, buffer)
        for part, state in zip(_with_extra_state(module), extra, strict=True):
            part.set_extra_state(from_snapshot(state, entry.name))
        return entry
    if isinstance(entry.object, torch.optim.Optimizer):
        for group, options in zip(entry.object.param_groups, content, strict=True):
            group.update(from_snapshot(options, entry.name))
        return entry
    return replace(entry, object=holder_of(from_snapshot(content, entry.name)))


def parameters_of(entries: Iterable[Registered]) -> list[torch.Tensor]:
    """Return the parameters of modules and optimizers, some of them twice."""
    tensors: list[torch.Tensor] = []
    for entry in entries:
        if isinstance(entry.object, nn.Module):
            tensors += entry.object.parameters()
        elif isinstance(entry.object, torch.optim.Optimizer):
            tensors += parameters(entry.object)
    return tensors


def _with_extra_state(module: nn.Module) -> list[nn.Module]:
    plain = nn.Module.get_extra_state
    return [part for part in module.modules() if type(part).get_extra_state is not plain]


class SmallBuffers:
    """The small buffers of all modules, None included, collected once."""

    def __init__(self, entries: Iterable[Registered]) -> None:
        self._modules = [unwrap(entry.object) for entry in entries if isinstance(entry.object, nn.Module)]
        everything = self._everything()
        self._known = set(everything)
        """All buffers at the time of collection, including large ones."""
        self._places = [
            (part, name) for (part, name), buffer in everything.items() if buffer is None or buffer.numel() <= SMALL
        ]

    def _everything(self) -> dict[tuple[nn.Module, str], torch.Tensor | None]:
        """Return all buffers, by submodule and name."""
        parts = (part for module in self._modules for part in module.modules())
        return {(part, name): buffer for part in parts for name, buffer in part._buffers.items()}

    def current(self) -> list[torch.Tensor]:
        """Return the current buffers, including replaced ones, with :data:`_NONE` in place of None."""
        return [_NONE if (buffer := getattr(part, name)) is None else buffer for part, name in self._places]

    def load(self, values: Iterable[torch.Tensor]) -> None:
        """Load the result of :meth:`current` at the end of the last step, even if the buffers now have other shapes."""
        if new := sorted(name for _, name in self._everything().keys() - self._known):
            raise CheckpointError(f"buffer {new[0]!r} was registered after the first step; register it before, as None")
        for (part, name), value in zip(self._places, values, strict=True):
            is_complex = (buffer := getattr(part, name)) is not None and buffer.is_complex()
            loaded = torch.view_as_complex(value) if is_complex else value  # stored as reals
            setattr(part, name, None if value.shape == _NONE.shape else loaded)
