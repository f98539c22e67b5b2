"""Objects that can be registered with a Checkpointer: capture their states, and compare and load saved states."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint import module_states, optimizer_states
from paceline.checkpoint.manifest import GENERATORS, RANK_ROLE
from paceline.checkpoint.module_states import as_in, check_module, without_compile
from paceline.checkpoint.state_codec import Encoder, Unencodable, decode
from paceline.core.messages import with_article
from paceline.core.optimizer_shards import Assembly, Window
from paceline.core.torch_distributed import has_sharded
from paceline.core.unwrapping import AveragingWrapper, unwrap
from paceline.errors import CheckpointMismatch, PacelineError, UsageError


class Stateful(Protocol):
    """An object with a state: a module, optimizer, scheduler, sampler or GradScaler."""

    def state_dict(self) -> Any:
        """Return the state as nested plain values and tensors."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state that :meth:`state_dict` returned."""


@runtime_checkable
class Mergeable(Protocol):
    """A per-rank object without tensors that can load states from a different number of ranks."""

    def load_rank_states(self, states: Sequence[Any], /) -> None:
        """Load this rank's part of the states of all ranks."""


@runtime_checkable
class Replaceable(Protocol):
    """A per-rank object whose state an additional rank can take from another rank."""

    def replace_lost(self) -> None:
        """Turn the loaded state of another rank into the state of a new rank."""


@runtime_checkable
class Sharded(Protocol):
    """An optimizer whose state is sharded over the ranks; see :mod:`paceline.core.optimizer_shards`."""

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """Class of the sharded optimizer."""

    def local_state(self) -> dict[str, Any]:
        """Return this rank's shard."""

    def windows(self) -> dict[int, Window]:
        """Return this rank's part of each parameter's state."""

    def load_state_dict(self, state: Any, /) -> None:
        """Load this rank's shard, an :class:`Assembly` of shards, or the state of the unsharded optimizer."""


_NAME = re.compile(r"[a-z0-9_]{1,64}")
_RESERVED = ("state", RANK_ROLE, GENERATORS)


@dataclass(frozen=True)
class Outline:
    """A saved object with meta tensors: its state and, for an optimizer, its description, which is otherwise empty."""

    state: Any
    optimizer: Mapping[str, Any]


@dataclass(frozen=True)
class Registered:
    """An `object` and its `name`; with ``per_rank``, every rank has a different state."""

    name: str
    object: Any
    per_rank: bool = False
    peers: Mapping[str, Registered] = field(default_factory=dict)
    """All registered objects. An optimizer's parameters get their names from the modules among them."""
    options: optimizer_states.Options = field(default_factory=dict)
    """An optimizer's settings before training, as far as they are known."""

    @classmethod
    def of(cls, name: str, object: Any, per_rank: bool, peers: Mapping[str, Registered]) -> Registered:
        """Return an entry for `object` and its current settings; `peers` are all registered objects."""
        _check_registrable(name, object, per_rank, peers)
        per_rank = per_rank or isinstance(object, Sharded | Replaceable)
        options = optimizer_states.remembered_options(inner) if (inner := optimizer_states.stepping(object)) else {}
        return cls(name, object, per_rank, peers, options)

    @property
    def is_sharded(self) -> bool:
        """Whether it has DTensors, which need a collective to be saved."""
        if isinstance(self.object, nn.Module):
            return has_sharded(self._target.state_dict().values())
        return self.is_optimizer and has_sharded(optimizer_states.parameters(self.object))

    @property
    def is_optimizer(self) -> bool:
        """Whether it is an optimizer."""
        return isinstance(self.object, Optimizer)

    @property
    def stepping(self) -> Optimizer | None:
        """The optimizer whose steps are watched; None if the object is not an optimizer."""
        return optimizer_states.stepping(self.object)

    @property
    def holds_shard(self) -> bool:
        """Whether each rank holds a shard of its state."""
        return isinstance(self.object, Sharded)

    @property
    def is_constant(self) -> bool:
        """Whether the object declares, with an attribute ``state_is_constant``, that its state never changes."""
        return not isinstance(self.object, nn.Module) and bool(getattr(self.object, "state_is_constant", False))

    def check_window(self, step: int) -> None:
        """Raise if this is a model in the middle of an accumulation window."""
        if isinstance(self.object, AveragingWrapper) and self.object.holds_local_gradients():
            raise UsageError(
                f"step {step} was not saved: {self.name!r} is in the middle of an accumulation window, and a resume "
                "would lose its gradients; save after optimizer.step(), when model.do_sync is true"
            )
        if not self.per_rank and getattr(self.object, "has_local_parameters", False):
            raise UsageError(
                f"step {step} was not saved: in local_steps(), each rank has its own parameters of {self.name!r}, but "
                "only those of rank 0 would be saved; register the model and its optimizer with per_rank=True"
            )

    def capture(self, encoder: Encoder, prefix: str = "") -> dict[str, Any]:
        """Return the node of the object's state, and add its tensors to `encoder`, named with `prefix`."""
        state = self.object.local_state() if isinstance(self.object, Sharded) else self._target.state_dict()
        metadata = getattr(state, "_metadata", None)
        if isinstance(self.object, nn.Module):
            state, metadata = without_compile(state), without_compile(metadata)
        try:
            node = {
                "state": encoder.encode(state, prefix),
                "metadata": encoder.encode(metadata, f"{prefix}_metadata"),
                "buckets": self.object.bucket_layout() if isinstance(self.object, AveragingWrapper) else None,
            }
            if self.is_optimizer:
                node["optimizer"] = encoder.encode(self._description(), f"{prefix}_optimizer")
            return node
        except Unencodable as error:
            raise UsageError(
                f"{self.name}.state_dict(){error.path} {error.reason}, which cannot be saved; let state_dict() return "
                "only tensors, numbers, strings, lists, tuples and dicts"
            ) from None

    def check(self, saved: Outline, step: int, allow_changed: bool) -> None:
        """Compare the object with `saved`, its state of `step`, before anything is loaded.

        Objects other than modules and optimizers compare themselves, if they have a method ``check_state_dict``.
        """
        if isinstance(self.object, nn.Module):
            check_module(self.name, self._target, without_compile(saved.state), step)
        elif self.is_optimizer:
            # A malformed description can fail anywhere in the comparison.
            with _refused(f"the description of {self.name!r} in step {step} is malformed", "use another checkpoint"):
                optimizer_states.check(self.name, self._description(), saved.optimizer, step, allow_changed)
        elif callable(compare := getattr(self.object, "check_state_dict", None)):
            compare(saved.state)

    def changes(self, saved: Outline) -> list[str]:
        """Describe the settings of an optimizer that differ from those `saved`."""
        return optimizer_states.changes(self.name, self._description(), saved.optimizer)

    def keep_own_settings(self, saved: Outline) -> None:
        """Restore this run's settings after an optimizer has loaded the state `saved`."""
        optimizer_states.apply_options(self.object, self.options, self._description(), saved.optimizer)

    def load(self, node: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], step: int) -> None:
        """Load the state of `step` from `node` and `tensors`."""
        with _refused(
            f"{self.name!r} cannot load its state of step {step}", "register the kind of object that was saved"
        ):
            state, metadata = decode(node["state"], tensors), decode(node["metadata"], tensors)
            if isinstance(self.object, nn.Module):
                own_state = self._target.state_dict()
                state = module_states.laid_out(own_state, as_in(own_state, state))
                metadata = as_in(getattr(own_state, "_metadata", ()), metadata or {})
            elif self.is_optimizer:
                state = optimizer_states.laid_out(self.object, state)
            if metadata is not None:
                state._metadata = metadata  # load_state_dict() reads module versions from here
            self._target.load_state_dict(state)
            if self.is_optimizer:
                if (inner := self.stepping) not in (None, self.object):
                    self.object.param_groups = inner.param_groups  # PostLocalSGDOptimizer keeps the replaced list
                optimizer_states.bring_back_dtypes(self.object, state, decode(node["optimizer"], tensors))

    def load_rank_states(self, nodes: Sequence[Mapping[str, Any]], step: int) -> None:
        """Load the states of `step`, which were saved by a different number of ranks."""
        assert isinstance(self.object, Mergeable)
        problem = f"{self.name!r} cannot load the states of {len(nodes)} ranks of step {step}"
        with _refused(problem, "resume with the same number of ranks"):
            self.object.load_rank_states([decode(node["state"], {}) for node in nodes])

    def assembly(self) -> Assembly:
        """Return an assembly for this rank's part of an optimizer's state."""
        if isinstance(self.object, Sharded):
            return Assembly(self.object.windows())
        parameters = enumerate(optimizer_states.parameters(self.object))
        return Assembly({index: Window(tuple(param.shape), param.stride(), None) for index, param in parameters})

    def add_shard(self, assembly: Assembly, node: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        assembly.add(decode(node["state"], tensors))

    def load_shards(self, assembly: Assembly, outline: Outline, _step: int) -> None:
        """Load the assembled state."""
        if isinstance(self.object, Sharded):
            self.object.load_state_dict(assembly)
            return
        state = optimizer_states.laid_out(self.object, {"state": assembly.state(), "param_groups": assembly.groups})
        self.object.load_state_dict(state)
        optimizer_states.bring_back_dtypes(self.object, state, outline.optimizer)

    def load_layout(self, node: Mapping[str, Any]) -> None:
        if node["buckets"] is not None and isinstance(self.object, AveragingWrapper):
            with _refused(f"the bucket layout of {self.name!r} is malformed", "use another checkpoint"):
                self.object.load_bucket_layout(node["buckets"])

    def _description(self) -> dict[str, Any]:
        modules = [(entry.name, entry.object) for entry in self.peers.values() if isinstance(entry.object, nn.Module)]
        return optimizer_states.describe(self.object, self.options, optimizer_states.parameter_names(modules))

    @property
    def _target(self) -> Any:
        return unwrap(self.object) if isinstance(self.object, nn.Module) else self.object


@contextmanager
def _refused(problem: str, remedy: str) -> Iterator[None]:
    """Turn errors raised by the object's own code into a CheckpointMismatch."""
    try:
        yield
    except PacelineError:
        raise
    # User code and torch can raise anything for a state that does not fit.
    except Exception as error:
        raise CheckpointMismatch(f"{problem} ({type(error).__name__}: {error}); {remedy}") from error


def _check_registrable(name: Any, object: Any, per_rank: bool, used_names: Collection[str]) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED:
        raise UsageError(
            f"{name!r} cannot be the name of a registered object; use lower-case letters, digits and underscores, "
            f"but none of the names {', '.join(_RESERVED)}"
        )
    if name in used_names:
        raise UsageError(f"an object is already registered as {name!r}; choose another name")
    if not callable(getattr(object, "state_dict", None)) or not callable(getattr(object, "load_state_dict", None)):
        raise UsageError(
            f"the object to register as {name!r}, {with_article(type(object).__qualname__)}, must have the methods "
            "state_dict and load_state_dict; add the missing one"
        )
    inner = optimizer_states.stepping(object)
    if inner not in (None, object) and not per_rank:
        raise UsageError(
            f"the {type(object).__qualname__} to register as {name!r} lets ranks differ between its averages; register "
            "it and the model with per_rank=True"
        )
    if isinstance(object, Optimizer) and inner is None:
        raise UsageError(
            f"the {type(object).__qualname__} to register as {name!r} does not call Optimizer.__init__, so its steps "
            "cannot be detected; register the optimizer inside it (for local SGD with per_rank=True, like the model)"
        )
