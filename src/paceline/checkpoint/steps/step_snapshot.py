"""Copies of states that change during a training step, and references to those that do not."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.objects.optimizer_states import parameters
from paceline.checkpoint.objects.registered import Registered
from paceline.core.state.unwrapping import unwrap
from paceline.errors import CheckpointError

SMALL = 2**16
"""Most elements of a tensor that is copied. Larger ones are usually parameters, or buffers that do not change."""
_PLAIN = (type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device)


@dataclass(frozen=True)
class Uncopied:
    """A large tensor, which is not copied, and its version counter, which tells whether it has changed."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Uncopied:
        return cls(tensor, tensor._version)

    def unchanged(self, name: str) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise CheckpointError(f"{name} was changed since the end of the last step")
        return self.tensor


def holder_of(state: Any) -> Any:
    """Return an object that has `state`, to be saved."""
    return SimpleNamespace(state_dict=lambda: state)


def snapshot(value: Any) -> Any:
    """Return a copy of the nested `value`, with large tensors as :class:`Uncopied`."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.numel() <= SMALL else Uncopied.of(value)
    kind = type(value)
    if kind is dict:
        return {key: snapshot(each) for key, each in value.items()}
    if kind in (list, tuple):
        return kind(snapshot(each) for each in value)
    if isinstance(value, Mapping):  # copied, because another kind of mapping need not be made from a dict
        copied = copy.copy(value)
        for key, each in value.items():
            copied[key] = snapshot(each)  # type: ignore[index]
        return copied
    # Of an unknown class: only a copy is sure to stay as it is.
    return copy.deepcopy(value)


def from_snapshot(value: Any, name: str) -> Any:
    """Undo :func:`snapshot`: return the value with the tensors themselves."""
    if isinstance(value, Uncopied):
        return value.unchanged(name)
    kind = type(value)
    if kind in (list, tuple):
        return kind(from_snapshot(each, name) for each in value)
    if isinstance(value, Mapping):
        restored = copy.copy(value)
        for key, each in value.items():
            restored[key] = from_snapshot(each, name)  # type: ignore[index]
        return restored
    return value


class Snapshotter:
    """Copies the parts of an object's state that a rollback needs, except parameters, their state and small buffers.

    The parts of a module are found once. A part added later is missed here, and noticed by :func:`load_buffers`.
    """

    def __init__(self, entry: Registered) -> None:
        self.entry = entry
        self._large: list[tuple[str, nn.Module, str]] = []
        """Large buffers of modules: the whole name, and where the buffer is."""
        self._extra: list[nn.Module] = []
        """Parts of a module that have a state besides parameters and buffers."""
        if isinstance(entry.object, nn.Module):
            module = unwrap(entry.object)
            self._extra = _with_extra_state(module)
            for prefix, part in module.named_modules():
                for name, buffer in part.named_buffers(prefix, recurse=False):
                    if buffer.numel() > SMALL:
                        self._large.append((name, part, name.rpartition(".")[2]))

    def take(self) -> Any:
        """Return a copy of the object's state as it is now."""
        target = self.entry.object
        if isinstance(target, nn.Module):
            large = {name: Uncopied.of(getattr(part, attribute)) for name, part, attribute in self._large}
            return large, [snapshot(part.get_extra_state()) for part in self._extra]
        if isinstance(target, torch.optim.Optimizer):
            groups = target.param_groups
            return [{key: snapshot(value) for key, value in group.items() if key != "params"} for group in groups]
        return snapshot(target.state_dict())


def object_from_snapshot(entry: Registered, taken: Any) -> Registered:
    """Return an entry whose object has the state that :meth:`Snapshotter.take` copied.

    Modules and optimizers are changed back in place.

    Small buffers of modules are left to :func:`load_buffers`.
    """
    if isinstance(entry.object, nn.Module):
        module, (large, extra) = unwrap(entry.object), taken
        for name in large.keys() & module.state_dict().keys():  # others are not saved
            large[name].unchanged(f"buffer {name!r} of {entry.name!r}")
        for part, state in zip(_with_extra_state(module), extra, strict=True):
            part.set_extra_state(from_snapshot(state, entry.name))
        return entry
    if isinstance(entry.object, torch.optim.Optimizer):
        for group, options in zip(entry.object.param_groups, taken, strict=True):
            group.update(from_snapshot(options, entry.name))
        return entry
    return replace(entry, object=holder_of(from_snapshot(taken, entry.name)))


def load_buffers(entries: Iterable[Registered], values: Iterable[torch.Tensor]) -> None:
    """Load the stored `values` of the buffers that :class:`SmallBuffers` found."""
    try:
        with torch.no_grad():
            for buffer, value in zip(SmallBuffers(entries).now(), values, strict=True):
                (torch.view_as_real(buffer) if buffer.is_complex() else buffer).copy_(value)
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"the buffers of modules are others than at the end of the last step ({error})") from None


def parameters_of(entries: Iterable[Registered]) -> list[torch.Tensor]:
    """Return the parameters of modules and optimizers among `entries`, some of them twice."""
    found: list[torch.Tensor] = []
    for entry in entries:
        if isinstance(entry.object, nn.Module):
            found += entry.object.parameters()
        elif isinstance(entry.object, torch.optim.Optimizer):
            found += parameters(entry.object)
    return found


def _with_extra_state(module: nn.Module) -> list[nn.Module]:
    plain = nn.Module.get_extra_state
    return [part for part in module.modules() if type(part).get_extra_state is not plain]


class SmallBuffers:
    """The small buffers of all modules among some entries, found once.

    A buffer added later is missed here, and noticed by :func:`load_buffers`.
    """

    def __init__(self, entries: Iterable[Registered]) -> None:
        found: dict[int, tuple[nn.Module, str]] = {}
        for entry in entries:
            if isinstance(entry.object, nn.Module):
                for part in unwrap(entry.object).modules():
                    for name, buffer in part.named_buffers(recurse=False):
                        if buffer.numel() <= SMALL:
                            found.setdefault(id(buffer), (part, name))
        self._places = list(found.values())

    def now(self) -> list[torch.Tensor]:
        """Return the current buffers, including those that replaced others."""
        return [getattr(part, name) for part, name in self._places]
