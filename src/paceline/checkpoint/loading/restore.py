"""Restores a saved checkpoint into the registered objects: completely on every rank, or not at all on any."""

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
from paceline.checkpoint.objects.processor import differences
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
    """Load a checkpoint into `entries` and this rank's generators, once they have been compared with it; return it.

    With `is_part`, it may hold more than `entries`, and generators and bucket layouts are left alone.

    It is that of `step`, the same on all ranks, whose path and manifest `choose` returns on rank 0.

    With `allow_changed`, this run's optimizer settings win where they differ, and rank 0 warns about them.

    If loading fails on any rank, every rank puts back the earlier states of the objects loaded so far, and raises.
    """
    for rank, theirs in enumerate(consensus.gather(world, step)):
        if theirs != step:
            raise DesyncError(
                f"rank {rank} restores step {theirs} but rank {world.rank} restores step {step}; choose the "
                "same step on every rank"
            )
    saved = Saved.open(world, lambda: choose(step))
    matches: list[Match] = []
    found = partial(compare, entries, saved, world, allow_changed, is_part=is_part)
    consensus.agree(world, consensus.error_of(lambda: matches.extend(found())))
    loading = Loading(world, saved, [match.entry.name for match in matches if match.kind is Kind.SHARDED])
    is_same_size = saved.manifest.world_size == world.size
    load = {
        Kind.SHARED: loading.shared,
        Kind.SHARDED: loading.sharded,
        Kind.OWN: loading.own if is_same_size else loading.merged,
    }
    try:
        for match in sorted(matches, key=lambda match: match.kind is Kind.OWN):  # own states are sent together
            load[match.kind](match)
            strike("restore")
        if is_part:
            return saved
        consensus.decide(world, lambda: _warn_of_other_bits(saved, world, entries))
        # Last, because a layout ends the search for the order in which gradients arrive.
        consensus.agree(world, consensus.error_of(_load_layouts, saved, matches))
        if allow_changed:
            consensus.agree(world, consensus.error_of(_keep_own_settings, world, saved.step, matches))
    # Also Ctrl-C, and another rank's error, which comes from agree(): every rank ends with the states that it had
    # before.
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
    took_another: bool = False  # whether the object's load_state_dict has taken a state since

    @classmethod
    def of(cls, entry: Registered) -> _Before:
        encoder = Encoder(None if entry.per_rank else whole_of)  # collective
        node = entry.capture(encoder)
        # Cloned, because loading writes into the object's own tensors.
        return cls(entry, node, {name: stored(tensor.clone()) for name, tensor in encoder.tensors.items()})


@dataclass
class Loading:
    """Loads objects from `saved`, by how each was saved; all ranks load the same one together."""

    world: World
    saved: Saved
    in_shards: Collection[str]
    """Names of the optimizers that were saved in shards."""
    undo: list[_Before] = field(default_factory=list)

    def shared(self, match: Match) -> None:
        """Load a state that all ranks share."""
        name = match.entry.name
        tensors = self.saved.tensors(self.world, name)
        self.load(match, match.entry.load, self.saved.objects[name], tensors)

    def own(self, match: Match) -> None:
        """Load the state that this rank saved."""
        tensors = self._own_tensors  # collective, so outside the block that reports errors of this rank alone
        self.load(match, match.entry.load, self.saved.ranks[self.world.rank][match.entry.name], tensors)

    def merged(self, match: Match) -> None:
        """Load the states that another number of ranks saved."""
        self.load(match, match.entry.load_rank_states, [nodes[match.entry.name] for nodes in self.saved.ranks])

    def sharded(self, match: Match) -> None:
        """Load an optimizer from the shards of all ranks that saved it, one at a time: no rank holds them all."""
        entry, assembly = match.entry, match.entry.assembly()
        errors: list[Exception] = []
        for rank, nodes in enumerate(self.saved.ranks):
            tensors = self.saved.shard_tensors(self.world, entry.name, rank)
            # Decoded on every rank, although each needs few of the pieces: no rank knows beforehand which shard holds
            # its own.
            error = consensus.error_of(entry.add_shard, assembly, nodes[entry.name], tensors)
            errors += [] if error is None else [error]  # kept until all ranks have taken part in every broadcast
        consensus.agree(self.world, errors[0] if errors else None)
        self.load(match, entry.load_shards, assembly, match.outline)

    @cached_property
    def _own_tensors(self) -> Mapping[str, torch.Tensor]:
        return self.saved.rank_tensors(self.world, without=self.in_shards)

    def load(self, match: Match, load: Callable[..., None], *states: Any) -> None:
        """Load `states` into one object, so that it can be undone."""

        def attempt() -> None:
            # Before the load, because one that raises may have changed half of the object.
            self.undo.append(before := _Before.of(match.entry))
            load(*states, self.saved.step)
            before.took_another = True

        consensus.agree(self.world, consensus.error_of(attempt))


def _load_layouts(saved: Saved, matches: Iterable[Match]) -> None:
    for match in matches:
        if match.kind is Kind.SHARED:
            match.entry.load_layout(saved.objects[match.entry.name])


def _keep_own_settings(world: World, step: int, matches: Sequence[Match]) -> None:
    changes: list[str] = []
    for match in matches:
        changes += match.entry.changes(match.outline)
        match.entry.keep_own_settings(match.outline)
    for match in matches:
        if isinstance(match.entry.object, LRScheduler):
            follow(match.entry.object)
    if changes and world.rank == 0:
        warn(
            f"this run's settings are taken over: {'; '.join(changes)} in the checkpoint of step {step}",
            CheckpointWarning,
        )


def _put_back(undo: Iterable[_Before], step: int) -> None:
    """Load the earlier states, without any communication, because other ranks may have ended."""
    # The last one first: a scheduler puts back rates of its optimizer, which was loaded before it.
    for before in reversed(list(undo)):
        error = consensus.error_of(before.entry.load, before.node, before.tensors, step)
        if error is not None and before.took_another:  # an object that accepts no state at all has not changed
            warn(
                f"{before.entry.name!r} does not take back the state that it had before the restore of step {step} "
                f"failed ({error}); make it anew before training goes on",
                CheckpointWarning,
            )


def _warn_of_other_bits(saved: Saved, world: World, entries: Sequence[Registered]) -> None:
    # With virtual ranks, each slice has random streams of its own.
    if saved.manifest.world_size != world.size and not any(virtual_ranks_of(entry.object) for entry in entries):
        warn(
            f"step {saved.step} was saved by {saved.manifest.world_size} ranks and this run has {world.size}: it goes "
            "on with the same samples and means, not with the same bits, and every rank keeps its random generators "
            "as they are seeded now; virtual_ranks keeps the bits, too",
            CheckpointWarning,
        )
    for entry in entries:
        before, now = saved.objects.get(entry.name, {}).get("processor"), entry.processor()
        if isinstance(before, dict) and now is not None and (found := differences(before, now)):
            warn(
                f"step {saved.step} was computed with other kernels than this run's ({', '.join(found)}), so sums may "
                "round differently from here on; resume with the same for the same bits",
                CheckpointWarning,
            )
