"""Restores a checkpoint into the registered objects: completely on every rank, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint.format.manifest import Manifest
from paceline.checkpoint.format.safetensors_file import stored
from paceline.checkpoint.format.state_codec import Encoder
from paceline.checkpoint.loading.saved_checkpoint import Kind, Match, Saved, compare
from paceline.checkpoint.objects.optimizer_states import follow
from paceline.checkpoint.objects.registered import Registered
from paceline.core.processes import consensus
from paceline.core.processes.world import World
from paceline.core.state.virtual_ranks import virtual_ranks_of
from paceline.core.telemetry.failpoints import strike
from paceline.core.telemetry.users_code import warn
from paceline.core.torch_internals.distributed.dtensor import whole_of
from paceline.errors import CheckpointWarning, DesyncError

Result = TypeVar("Result")


def restore(
    world: World,
    step: int | None,
    choose: Callable[[int | None], tuple[Path, Manifest]],
    entries: Sequence[Registered],
    allow_changed: bool,
    *,
    is_part: bool = False,
) -> Saved:
    """Compare a checkpoint with `entries`, restore them and this rank's random generators from it, and return it.

    If loading fails on any rank, every rank restores the earlier states and raises an error.

    Args:
        world: the ranks.
        step: the step to restore, the same on all ranks; None for the newest.
        choose: called on rank 0; returns the path and the manifest of the checkpoint.
        entries: the objects to load.
        allow_changed: whether to keep this run's optimizer settings if they differ; rank 0 warns about the differences.
        is_part: whether to load only a part, without generators and bucket layouts.
    """
    for rank, other_step in enumerate(consensus.gather(world, step)):
        if other_step != step:
            raise DesyncError(
                f"rank {rank} restores step {other_step} but rank {world.rank} restores step {step}; choose the "
                "same step on every rank"
            )
    saved = Saved.open(world, lambda: choose(step))
    matches: list[Match] = []
    comparison = partial(compare, entries, saved, world, allow_changed, is_part=is_part)
    consensus.agree(world, consensus.error_of(lambda: matches.extend(comparison())))
    loading = Loading(world, saved, [match.entry.name for match in matches if match.kind is Kind.SHARDED])
    is_same_size = saved.manifest.world_size == world.size
    load = {
        Kind.SHARED: loading.shared,
        Kind.SHARDED: loading.sharded,
        Kind.OWN: loading.own if is_same_size else loading.merged,
    }
    try:
        for match in sorted(matches, key=lambda match: match.kind is Kind.OWN):  # per-rank states last, sent together
            load[match.kind](match)
            strike("restore")
        if is_part:
            return saved
        consensus.decide(world, lambda: _warn_of_other_size(saved, world, entries))
        # Last, because loading a layout ends the search for the order of gradients.
        consensus.agree(world, consensus.error_of(_load_layouts, saved, matches))
        if allow_changed:
            consensus.agree(world, consensus.error_of(_keep_own_settings, world, saved.step, matches))
    # Also after Ctrl-C or another rank's error, which agree() raises.
    except BaseException:
        _put_back(loading.undo, saved.step)
        raise
    return saved


@dataclass
class _Before:
    """A copy of an object's state before a restore."""

    entry: Registered
    node: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    is_loaded: bool = False  # whether the object has loaded another state since

    @classmethod
    def of(cls, entry: Registered) -> _Before:
        encoder = Encoder(None if entry.per_rank else whole_of)  # collective
        node = entry.capture(encoder)
        # Cloned, because loading writes into the object's own tensors.
        return cls(entry, node, {name: stored(tensor.clone()) for name, tensor in encoder.tensors.items()})


@dataclass
class Loading:
    """Loads objects from `saved`; all ranks load the same object together."""

    world: World
    saved: Saved
    in_shards: Collection[str]
    """Names of the optimizers that were saved in shards."""
    undo: list[_Before] = field(default_factory=list)

    def shared(self, match: Match) -> None:
        name = match.entry.name
        tensors = self.saved.tensors(self.world, name)
        self.load(match, match.entry.load, self.saved.objects[name], tensors)

    def own(self, match: Match) -> None:
        """Load the state that this rank saved."""
        tensors = self._own_tensors  # a collective, so outside the block that handles errors of a single rank
        self.load(match, match.entry.load, self.saved.ranks[self.world.rank][match.entry.name], tensors)

    def merged(self, match: Match) -> None:
        """Load states that a different number of ranks saved."""
        self.load(match, match.entry.load_rank_states, [nodes[match.entry.name] for nodes in self.saved.ranks])

    def sharded(self, match: Match) -> None:
        """Load an optimizer from all ranks' shards, one shard at a time, so that no rank holds all of them."""
        entry, assembly = match.entry, match.entry.assembly()
        errors: list[Exception] = []
        for rank, nodes in enumerate(self.saved.ranks):
            tensors = self.saved.shard_tensors(self.world, entry.name, rank)
            # Every rank looks at every shard, because no rank knows which shards have its pieces.
            error = consensus.error_of(entry.add_shard, assembly, nodes[entry.name], tensors)
            errors += [] if error is None else [error]  # raised after all ranks have taken part in every broadcast
        consensus.agree(self.world, errors[0] if errors else None)
        self.load(match, entry.load_shards, assembly, match.outline)

    @cached_property
    def _own_tensors(self) -> Mapping[str, torch.Tensor]:
        return self.saved.rank_tensors(self.world, without=self.in_shards)

    def load(self, match: Match, load: Callable[..., None], *states: Any) -> None:
        """Load `states` into one object, after copying its current state."""

        def attempt() -> None:
            # Copied before the load, because a failed load may have changed half of the object.
            self.undo.append(previous := _Before.of(match.entry))
            load(*states, self.saved.step)
            previous.is_loaded = True

        consensus.agree(self.world, consensus.error_of(attempt))


def _load_layouts(saved: Saved, matches: Iterable[Match]) -> None:
    for match in matches:
        if match.kind is Kind.SHARED:
            match.entry.load_layout(saved.objects[match.entry.name])


def _keep_own_settings(world: World, step: int, matches: Sequence[Match]) -> None:
    changes: list[str] = []
    for match in matches:
        if match.entry.is_optimizer:
            changes += match.entry.changes(match.outline)
            match.entry.keep_own_settings(match.outline)
    for match in matches:
        if isinstance(match.entry.object, LRScheduler):
            follow(match.entry.object)
    if changes and world.rank == 0:
        warn(
            f"this run's settings are kept: {'; '.join(changes)} in the checkpoint of step {step}",
            CheckpointWarning,
        )


def _put_back(undo: Iterable[_Before], step: int) -> None:
    """Load the earlier states, without communication, because other ranks may have ended."""
    # In reverse, because a scheduler, which is loaded after its optimizer, also changes the optimizer's rates.
    for previous in reversed(list(undo)):
        error = consensus.error_of(previous.entry.load, previous.node, previous.tensors, step)
        if error is not None and previous.is_loaded:  # an object that accepts no state at all is unchanged
            warn(
                f"{previous.entry.name!r} could not be reset after the restore of step {step} failed ({error}); create "
                "it again before you continue",
                CheckpointWarning,
            )


def _warn_of_other_size(saved: Saved, world: World, entries: Sequence[Registered]) -> None:
    # With virtual ranks, each slice has its own random streams.
    if saved.manifest.world_size != world.size and not any(virtual_ranks_of(entry.object) for entry in entries):
        warn(
            f"step {saved.step} was saved by {saved.manifest.world_size} ranks and this run has {world.size}: it "
            "continues with the same samples and means but not with the same bits, and random generators keep their "
            "current state; use virtual_ranks for the same bits",
            CheckpointWarning,
        )
