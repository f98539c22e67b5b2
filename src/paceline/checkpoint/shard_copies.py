"""Copies of what each rank alone has of a sharded optimizer, in memory that outlives the rank.

    backward ──► the gate ─────────────► update of this rank's share ──► gathering ──► step()
                 parameters of the        state of the share             from here on every rank has
                 share are stored          is stored                     stored its state of this step

No rank leaves the gathering of parameters before all have stored their states, so those of a step that any rank has
completed are there, whichever rank ends. The states of the step before stay beside them until every rank has completed
this one. Ranks that are left inside the optimizer go back by the parameters, of which each rank has stored its pieces
before the gate.
"""

from __future__ import annotations

import marshal
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from paceline.checkpoint.capture import Capture
from paceline.checkpoint.carried_over import tensors_of
from paceline.checkpoint.codec import Encoder, decode
from paceline.checkpoint.own_states import OwnStates
from paceline.checkpoint.registered import Registered
from paceline.checkpoint.slots import Slot, SlotFile, as_stored, layout_of, slots_in, tensors_in
from paceline.checkpoint.stateful import Piece
from paceline.errors import CheckpointError
from paceline.optimizer_shards import KEY
from paceline.step_records import SHARD

_STATES, _VALUES = 2, 1
"""Slots of the files: states of this step and the one before, parameters at the last boundary."""


class ShardCopies:
    """The copies of all ranks' shares of one sharded optimizer; this rank writes those of its own.

    Args:
        folder: of the ranks' records.
        rank: this one.
        size: of the world.
        entry: the optimizer.

    Raises:
        OSError: from methods that store, if memory is full.
    """

    def __init__(self, folder: Path, rank: int, size: int, entry: Registered) -> None:
        self.entry = entry
        self._folder, self._rank, self._size, self._share = folder, rank, size, entry.object.share
        self._states: SlotFile | None = None
        self._values: SlotFile | None = None
        """Both made when first written to."""
        self._steps = [-1] * _STATES
        """The step of each slot with states."""
        self._held: list[Any] = []
        """The state that was stored last: tensors, and plain values, in their order."""
        self._changes: list[tuple[int, int]] = []
        """Where its tensors lay, and their version counters."""
        self._revision = -1
        """Of the share, when it was stored last."""
        self._tensors: list[torch.Tensor] = []
        self._plain = b""
        """What was stored: tensors, and all else."""

    # -- of this rank -----------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Registered:
        """The optimizer's settings, as an object of its own; they change apart from the state, by schedules."""
        return replace(self.entry, object=SimpleNamespace(state_dict=self._share.groups))

    @property
    def is_current(self) -> bool:
        """Whether the state is as it was stored last."""
        return self._is_held(held := list(_flat(self._share.state()))) and _changes(held) == self._changes

    def keep_state(self, step: int) -> None:
        """Store this rank's state as that of the end of `step`."""
        state = self._share.state()
        held = list(_flat(state))
        if not self._is_held(held):
            self._encode(state)
        self._held, self._revision = held, self._share.revision
        if self._states is None:
            self._states = SlotFile(self._path("state", self._rank), _STATES, "shard")
        slot = self._steps.index(step) if step in self._steps else self._steps.index(min(self._steps))
        self._steps[slot] = -1
        self._states.write(slot, step, self._plain, [as_stored(tensor) for tensor in self._tensors])
        self._steps[slot] = step
        self._changes = _changes(held)

    def keep_values(self, step: int) -> None:
        """Store this rank's pieces of the parameters as they are at the end of `step`, before they change."""
        values = self._share.values()
        tensors = [as_stored(tensor.detach()) for _, _, tensor in values]
        plain = marshal.dumps(([(index, piece) for index, piece, _ in values], layout_of(tensors)))
        if self._values is None:
            self._values = SlotFile(self._path("values", self._rank), _VALUES)
        self._values.write(0, step, plain, tensors)

    def remove(self) -> None:
        """Give the memory of this rank's copies back."""
        for file in (self._states, self._values):
            if file is not None:
                file.remove()
        self._states = self._values = None
        self.start_over()

    def start_over(self) -> None:
        """Take what is stored for that of another run, which goes on from an earlier step, say."""
        self._steps = [-1] * _STATES
        self._revision = -1

    def _is_held(self, held: list[Any]) -> bool:
        """Whether `held` is what was stored last, but for the values of its tensors."""
        return (
            self._revision == self._share.revision
            and len(held) == len(self._held)
            and all(map(_is_same, held, self._held))
            and [place for place, _ in _changes(held)] == [place for place, _ in self._changes]
        )

    def _encode(self, state: dict[int, dict[str, Any]]) -> None:
        encoder = Encoder()
        node, about = encoder.encode(state), Encoder().encode(self.entry.object.local_state()[KEY])
        self._tensors = list(encoder.tensors.values())
        layout = layout_of([as_stored(tensor) for tensor in self._tensors])
        self._plain = marshal.dumps((node, encoder.aliases, about, list(encoder.tensors), layout))

    # -- of all ranks -----------------------------------------------------------------------------------------------

    def way_back(self, step: int) -> WayBack:
        """Return the way from a step of the optimizer back to the end of `step`, where it is now."""
        group_parameters = [group["params"] for group in self.entry.object.param_groups]
        parameters = [parameter for parameters in group_parameters for parameter in parameters]
        return WayBack(parameters, partial(self._put_back, step))

    def shards(self, step: int) -> list[Callable[[list[Any]], Capture]]:
        """Return for each rank what makes its shard at the end of `step`, from the settings that it had there.

        Raises:
            CheckpointError: if one is missing.
        """
        found = []
        for rank in range(self._size):
            content = self._content("state", rank)
            # An optimizer that did not step since has stored nothing since.
            slots = [slot for slot in slots_in(content, _STATES) if slot.step <= step]
            if not slots:
                raise CheckpointError(f"rank {rank} has not stored its shard of {self.entry.name!r}")
            found.append((content, max(slots, key=lambda slot: (slot.step, slot.number))))
        steps = [slot.step for _, slot in found]
        if len(set(steps)) > 1:
            raise CheckpointError(f"the ranks have stored their shards of {self.entry.name!r} at steps {steps}")
        return [partial(self._shard, content, slot) for content, slot in found]

    def _shard(self, content: mmap.mmap, slot: Slot, groups: list[Any]) -> Capture:
        node, aliases, about, names, layout = marshal.loads(slot.plain)
        tensors = dict(zip(names, tensors_in(content, slot.at, layout), strict=True))
        tensors |= {alias: tensors[name] for alias, name in aliases.items()}
        shard = {"state": decode(node, tensors), "param_groups": groups, KEY: decode(about, {})}
        name, encoder = self.entry.name, Encoder()
        return Capture({name: self.entry.capture(encoder, name, shard)}, encoder.tensors, encoder.aliases)

    def _put_back(self, step: int) -> None:
        contents = [self._content("values", rank) for rank in range(self._size)]
        for rank, content in enumerate(contents):
            if [slot.step for slot in slots_in(content, _VALUES)] != [step]:
                raise CheckpointError(f"rank {rank} has not stored its pieces of the parameters")
        for content in contents:
            self._share.put_back(_pieces(content))

    def _content(self, kind: str, rank: int) -> mmap.mmap:
        try:
            with self._path(kind, rank).open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise CheckpointError(f"rank {rank} has not stored its shard of {self.entry.name!r}") from None

    def _path(self, kind: str, rank: int) -> Path:
        return self._folder / f"rank-{rank}.{self.entry.name}.{kind}{SHARD}"


class WayBack:
    """The way back of an optimizer's parameters to the last boundary."""

    def __init__(self, parameters: Iterable[torch.Tensor], put_back: Callable[[], None]) -> None:
        self.versions = {parameter: parameter._version for parameter in parameters}
        """Of the parameters' version counters, before the optimizer steps."""
        self._put_back = put_back

    def put_back(self) -> None:
        """Give the parameters what they had."""
        self._put_back()


def with_shards(copies: Iterable[ShardCopies], step: int, ranks: Sequence[OwnStates]) -> list[OwnStates]:
    """Return the own states of all `ranks` with shards in the place of the optimizers' settings.

    Raises:
        CheckpointError: if a shard is missing.
    """
    found = list(ranks)
    for each in copies:
        shards = each.shards(step)
        found = [
            replace(states, objects=_joined(states.objects, each.entry.name, shard))
            for states, shard in zip(found, shards, strict=True)
        ]
    return found


def _joined(objects: Capture, name: str, shard: Callable[[list[Any]], Capture]) -> Capture:
    settings = tensors_of(name, objects)
    whole = shard(decode(objects.nodes[name]["state"], settings))
    others = {key: tensor for key, tensor in objects.tensors.items() if key not in settings}
    return Capture({**objects.nodes, **whole.nodes}, {**others, **whole.tensors}, {**objects.aliases, **whole.aliases})


def _pieces(content: mmap.mmap) -> Iterator[Piece]:
    [slot] = slots_in(content, _VALUES)
    places, layout = marshal.loads(slot.plain)
    for (index, piece), tensor in zip(places, tensors_in(content, slot.at, layout), strict=True):
        yield index, piece, tensor


def _flat(state: Any) -> Iterator[Any]:
    """Yield what nested `state` consists of, in its order: keys, tensors, plain values, and kinds of containers."""
    if isinstance(state, dict):
        yield len(state)
        for key, value in state.items():
            yield key
            yield from _flat(value)
    elif isinstance(state, list | tuple):
        yield type(state), len(state)
        for value in state:
            yield from _flat(value)
    else:
        yield state


def _is_same(now: Any, before: Any) -> bool:
    """Whether a part of the state is the same tensor, or an equal plain value."""
    if isinstance(now, torch.Tensor) or isinstance(before, torch.Tensor):
        return now is before
    return type(now) is type(before) and bool(now == before)


def _changes(held: list[Any]) -> list[tuple[int, int]]:
    """Return where the tensors among `held` lie, and how often they were changed."""
    return [(each.data_ptr(), each._version) for each in held if isinstance(each, torch.Tensor)]
