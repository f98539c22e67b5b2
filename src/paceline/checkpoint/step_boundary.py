"""The end of a training step, when all registered objects are consistent, and their states at that point.

Parameters and optimizer states do not change until the next optimizer step, so they are not copied. Settings of
optimizers, small buffers of modules, and the states of other objects can change earlier, so they are copied. A large
tensor among these is not copied, but its version counter reveals a change.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint import captures
from paceline.checkpoint.captures import Capture
from paceline.checkpoint.optimizer_states import parameters
from paceline.checkpoint.rank_states import StepBarrier
from paceline.checkpoint.registered import Registered
from paceline.checkpoint.step_folders import full_memory_message
from paceline.core.failpoints import strike
from paceline.core.spans import recorder
from paceline.core.step_progress import StepRecord
from paceline.core.unwrapping import AveragingWrapper, joins, unwrap
from paceline.errors import CheckpointError

logger = logging.getLogger(__name__)
SMALL = 2**16
"""Maximum number of elements of tensors that are copied; larger ones are usually parameters or constant buffers."""
_NONE = torch.empty((0,) * 9, dtype=torch.float32, device="cpu")
"""Placeholder for a buffer that is None."""
_PLAIN = (type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device)


class Boundary:
    """The last step boundary of this rank.

    Args:
        entries: returns the registered objects.
        barrier: the barrier of all ranks; None if steps are not rescued.
        record: this rank's record, if it has one without a barrier.
    """

    def __init__(
        self, entries: Callable[[], list[Registered]], barrier: StepBarrier | None, record: StepRecord | None = None
    ) -> None:
        self.step = 0
        """Optimizer steps done."""
        self.requests = 0
        """Stop requests of this rank, as bits."""
        self.all_requests = 0
        """Stop requests of all ranks as of the last step."""
        self.barrier = barrier
        """The barrier; None if this run does not use a barrier or has left it."""
        self._entries = entries
        self._record = record
        """Counts completed steps without a barrier, so that a restart knows which steps it recomputes."""
        self._is_armed = False
        """Whether :meth:`mark` has been called; from then on, optimizers wait for the other ranks."""
        self._has_stepped = False
        """Whether an optimizer has stepped or is about to step since the boundary."""
        self._hooks: dict[int, Any] = {}
        """Handles of the optimizers' hooks, by the optimizer's id."""
        self._snapshots: dict[str, Any] | None = None
        """Copies at the boundary, by the name of the object, or None."""
        self._versions: list[int] = []
        """Version counters of the parameters at the boundary."""
        self._watched = Watched([])
        self._process = os.getpid()

    @property
    def can_be_saved(self) -> bool:
        """Whether :meth:`states` can return the states of all shared objects at the boundary."""
        return self._snapshots is not None and not self._has_stepped

    @property
    def has_seen_steps(self) -> bool:
        """Whether a registered optimizer has stepped, or a step was restored."""
        return self._has_stepped or self.step > 0

    @property
    def joins(self) -> bool:
        """Whether a model is inside ``join``, which lets ranks take different numbers of steps."""
        return any(map(joins, self._refresh_watched().modules))

    @property
    def is_apart(self) -> bool:
        """Whether a registered optimizer has taken local steps since it last averaged."""
        return any(optimizer.is_apart for optimizer in self._refresh_watched().local)

    def watch(self, entry: Registered) -> None:
        """Watch the steps of `entry` if it is an optimizer."""
        if (optimizer := entry.stepping) is not None and id(optimizer) not in self._hooks:
            self._hooks[id(optimizer)] = optimizer.register_step_pre_hook(self._optimizer_steps)

    def resume_from(self, step: int) -> None:
        """Continue from `step`; all registered objects already have its states."""
        self.step, self._snapshots = step, None
        if (box := recorder.box) is not None:
            box.go_on_from(step)
        self._has_stepped = False

    def mark(self) -> bool:
        """Mark that all registered objects are consistent; return whether this ends an optimizer step.

        The result is False while gradients accumulate, and after a step that a GradScaler has skipped.
        """
        if self._has_stepped:
            strike("stepped")
        watched = self._refresh_watched()
        # The first mark may precede any step; it is the boundary for a failure in the first step.
        is_first, self._is_armed = not self._is_armed, True
        if any(model.holds_local_gradients() for model in watched.accumulating):
            return False
        if self._hooks and not self._has_stepped and not is_first:
            return False
        is_step = self._has_stepped or not self._hooks
        self.step += is_step
        if self.barrier is not None and not self._can_rescue(watched):
            if watched.holds_shards and self.barrier.rank == 0:
                logger.warning(
                    "the optimizer is sharded, and a failure will cost the steps since the last save on disk, because "
                    "no other rank has a copy of a shard; save often with Checkpointer(every=…)"
                )
            self.leave_barrier()
        if self.barrier is not None and is_first:  # the optimizer has not waited at the barrier
            self._prepare(self.step, watched)
        if self.barrier is not None:
            self._snapshot(watched)
            try:
                self.barrier.complete(self.step, *watched.own_states())
            except OSError as error:
                # The states have grown since they were prepared. The record does not report the step as completed, so
                # that a rescue does not mistake the prepared states for the states at the end of the step.
                self._leave_full_memory(error)
        elif self._record is not None:
            self._record.complete(self.step)
        self._has_stepped = False
        if (box := recorder.box) is not None:
            box.mark(self.step)
        strike("boundary")
        return is_step

    def states(self) -> Iterator[Registered]:
        """Yield the objects that all ranks share, with their states at the boundary.

        Training cannot continue afterwards, because modules and optimizers are changed in place.
        """
        assert self._snapshots is not None
        if self._versions != self._watched.versions():
            raise CheckpointError("a parameter has changed since the end of the last step")
        for entry in self._entries():
            if not entry.per_rank:
                yield object_from_snapshot(entry, self._snapshots[entry.name])

    def load_buffers(self, values: Sequence[torch.Tensor]) -> None:
        """Load the stored `values` of small buffers into the modules."""
        self._watched.buffers.load(values)

    def retire(self) -> None:
        """Stop making optimizers wait."""
        self._is_armed = False

    def close(self) -> None:
        """Remove the hooks from all optimizers."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._snapshots = None

    def _optimizer_steps(self, *_: Any) -> None:
        if os.getpid() != self._process:  # a forked child inherits the hook, but only its parent is the rank
            return
        if self._has_stepped:
            if not self._is_armed and (box := recorder.box) is not None:
                box.lose_count()
            return
        strike("prepared")
        if self._is_armed and self.barrier is not None:
            watched = self._refresh_watched()
            if self._can_rescue(watched):
                self._prepare(self.step + 1, watched)
            else:
                self.leave_barrier()
        # From here on, this rank cannot save the boundary, because its parameters and optimizers are changing.
        self._has_stepped = True
        strike("gate")

    def _refresh_watched(self) -> Watched:
        entries = self._entries()
        # Objects are never removed, so each new object changes their number.
        if len(entries) != len(self._watched.entries):
            self._watched = Watched(entries)
        return self._watched

    def _snapshot(self, watched: Watched) -> None:
        earlier = self._snapshots or {}
        self._snapshots = {}
        for snapshotter, is_constant in watched.shared:
            name = snapshotter.entry.name
            self._snapshots[name] = earlier[name] if is_constant and name in earlier else snapshotter.take()
        self._versions = watched.versions()

    def leave_barrier(self) -> None:
        """Stop rescuing steps and waiting for the other ranks, which then do the same."""
        assert self.barrier is not None
        self._record = self.barrier.record
        self._record.is_alone = True
        self.barrier, self._snapshots = None, None

    def _prepare(self, step: int, watched: Watched) -> None:
        """Wait for the other ranks before `step`. If memory is full, leave the barrier."""
        assert self.barrier is not None
        try:
            self.all_requests = self.barrier.prepare(step, *watched.own_states(is_before_step=True), self.requests)
        except OSError as error:
            self._leave_full_memory(error)
            return
        if self.barrier.is_left:
            self.leave_barrier()

    def _leave_full_memory(self, error: OSError) -> None:
        assert self.barrier is not None
        logger.warning("rank %d: %s", self.barrier.rank, full_memory_message(error, self.barrier.folder))
        self.leave_barrier()

    def _can_rescue(self, watched: Watched) -> bool:
        """Return whether the other ranks could save the states of a lost rank.

        Rescue requires a registered optimizer, because parameters could otherwise change at any time. It does not
        support ``join`` (ranks take different numbers of steps), GPUs (the host runs ahead of the device) or sharded
        optimizers (no other rank has a copy of a shard).
        """
        return bool(self._hooks) and watched.is_on_cpu and not self.joins and not watched.holds_shards


class Watched:
    """Parts of the registered objects that every step needs, collected once because the search is slow.

    Parameters that are added to a module later are missed.
    """

    def __init__(self, entries: Sequence[Registered]) -> None:
        self.entries = tuple(entries)
        self.own = [entry for entry in entries if entry.per_rank and not entry.holds_shard]
        self.shared = [(Snapshotter(entry), entry.is_constant) for entry in entries if not entry.per_rank]
        self.accumulating = [entry.object for entry in entries if isinstance(entry.object, AveragingWrapper)]
        self.modules = [entry.object for entry in entries if isinstance(entry.object, nn.Module)]
        self.local = [entry.object for entry in entries if hasattr(entry.object, "is_apart")]
        """Optimizers with local steps."""
        self.parameters: list[torch.Tensor] = []
        """Parameters of modules and optimizers, some of them twice."""
        for entry in entries:
            if isinstance(entry.object, nn.Module):
                self.parameters += entry.object.parameters()
            elif entry.is_optimizer:
                self.parameters += parameters(entry.object)
        self.buffers = SmallBuffers(entries)
        self.holds_shards = any(entry.holds_shard for entry in entries)
        self.is_on_cpu = all(parameter.device.type == "cpu" for parameter in self.parameters)

    def own_states(self, *, is_before_step: bool = False) -> tuple[list[Capture], list[torch.Tensor]]:
        """Return this rank's own states: of each object, and the small buffers.

        Before an optimizer step, optimizers are omitted, because they are large and unchanged since the last step.
        """
        own = [entry for entry in self.own if not (is_before_step and entry.is_optimizer)]
        return [captures.own([entry]) for entry in own], self.buffers.current()

    def versions(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]


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
        if isinstance(target, Optimizer):
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
    if isinstance(entry.object, Optimizer):
        for group, options in zip(entry.object.param_groups, content, strict=True):
            group.update(from_snapshot(options, entry.name))
        return entry
    return replace(entry, object=holder_of(from_snapshot(content, entry.name)))


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


def holder_of(state: Any) -> Any:
    """Return an object whose ``state_dict()`` returns `state`."""
    return SimpleNamespace(state_dict=lambda: state)
