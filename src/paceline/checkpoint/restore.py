"""Restores a checkpoint into the registered objects: completely on every rank, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint import captures, manifest, safetensors_file, state_codec
from paceline.checkpoint.manifest import GENERATORS, RANK_ROLE, File, Manifest
from paceline.checkpoint.optimizer_states import follow
from paceline.checkpoint.registered import Mergeable, Outline, Registered, Replaceable
from paceline.checkpoint.safetensors_file import stored
from paceline.checkpoint.state_codec import Encoder
from paceline.core import consensus, strict_json
from paceline.core.failpoints import strike
from paceline.core.missing_ranks import named_ranks
from paceline.core.optimizer_shards import is_shard
from paceline.core.stacks import warn
from paceline.core.torch_distributed import whole_of
from paceline.core.virtual_ranks import virtual_ranks_of
from paceline.core.world import World
from paceline.errors import CheckpointError, CheckpointMismatch, CheckpointWarning, DesyncError


class Kind(Enum):
    """How the state of a registered object was saved."""

    SHARED = "once for all ranks"
    OWN = "a different state by each rank"
    SHARDED = "a shard by each rank"


@dataclass(frozen=True)
class Match:
    """A registered object that matches its saved state. If the state is sharded, `outline` describes one shard."""

    entry: Registered
    kind: Kind
    outline: Outline


@dataclass(frozen=True)
class Saved:
    """A checkpoint: the nodes of the objects that all ranks share, and of each rank's own objects."""

    path: Path
    manifest: Manifest
    objects: Mapping[str, Any]
    ranks: Sequence[Mapping[str, Any]]

    @property
    def step(self) -> int:
        return self.manifest.step

    @classmethod
    def open(cls, world: World, choose: Callable[[], tuple[Path, Manifest]]) -> Saved:
        """Open, on every rank, the verified checkpoint whose path and manifest `choose` returns on rank 0."""

        def read() -> Any:
            path, listed = choose()
            try:
                state = strict_json.parse(manifest.read_document(path / manifest.STATE))
            except (ValueError, manifest.Damaged) as error:
                raise malformed(path, error) from None
            return {"path": str(path), "manifest": listed.render().decode("ascii"), "state": state}

        answer = consensus.decide(world, read)
        path = Path(answer["path"])
        contents = manifest.parse(answer["manifest"].encode("ascii"), path)
        state = answer["state"]
        try:
            objects, ranks = state["objects"], state["ranks"]
            if any(type(entry) is not dict for entry in (objects, *ranks)):
                raise ValueError("it has an entry that is not a JSON object")
            for entry in [*objects.values(), *(entry for rank in ranks for entry in rank.values())]:
                if set(entry) - {"optimizer"} != {"state", "metadata", "buckets"}:
                    raise ValueError("an object's entry has unexpected keys")
            if any(GENERATORS not in rank for rank in ranks):
                raise ValueError("a rank's random generators are missing")
            if len(ranks) != contents.world_size:
                raise ValueError(f"it has {len(ranks)} ranks, but the manifest says {contents.world_size}")
        except (ValueError, TypeError, KeyError) as error:
            raise malformed(path, error) from None
        return cls(path, contents, objects, ranks)

    def outline(self, name: str, rank: int | None = None) -> Outline:
        """Return the object `name` with meta tensors; `rank` is None for the state that all ranks share."""
        file = self.manifest.file(name) if rank is None else self.manifest.file(RANK_ROLE, rank)
        node = self.objects[name] if rank is None else self.ranks[rank][name]
        try:
            tensors = {} if file is None else {key: spec.empty("meta") for key, spec in file.tensors.items()}
            state_codec.decode(node["metadata"], tensors)
            description = state_codec.decode(node.get("optimizer", {"dict": {}}), {})
            return Outline(state_codec.decode(node["state"], tensors), description)
        except (ValueError, RuntimeError) as error:
            raise malformed(self.path, error) from None

    def kind_of(self, entry: Registered) -> Kind:
        """Return how `entry` was saved. An optimizer can be sharded in this run, in the checkpoint, or in both."""
        if entry.holds_shard:
            is_own = entry.name not in self.objects
        else:
            is_own = entry.per_rank or (entry.is_optimizer and self.has_shards(entry.name))
        if not is_own:
            return Kind.SHARED
        return Kind.SHARDED if self.has_shards(entry.name) else Kind.OWN

    def has_shards(self, name: str) -> bool:
        """Return whether the object `name` was saved in shards, one per rank."""
        # Either every rank has a shard or none has.
        return bool(self.ranks) and name in self.ranks[0] and is_shard(self.outline(name, 0).state)

    def shard_tensors(self, world: World, name: str, rank: int) -> dict[str, torch.Tensor]:
        """Return the tensors of `name` that `rank` saved, on the CPU of every rank."""
        file = self.manifest.file(RANK_ROLE, rank)
        if file is None:
            return {}
        specs = {key: spec for key, spec in file.tensors.items() if key.startswith(f"{name}.")}
        tensors = self._read(world, replace(file, tensors=specs))
        return captures.broadcast_tensors(world, specs, tensors)

    def tensors(self, world: World, name: str) -> dict[str, torch.Tensor]:
        """Return the tensors of the shared object `name`, on the CPU of every rank."""
        file = self.manifest.file(name)
        return {} if file is None else captures.broadcast_tensors(world, file.tensors, self._read(world, file))

    def rank_tensors(self, world: World, without: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Return the tensors of this rank's own states on the CPU, skipping the objects in `without`."""
        own_tensors: dict[str, torch.Tensor] = {}
        # Every rank loops over all files, because all ranks take part in each read.
        for rank in range(world.size):
            file = self.manifest.file(RANK_ROLE, self.source_of(rank))
            if file is None:
                continue
            specs = {key: spec for key, spec in file.tensors.items() if key.partition(".")[0] not in without}
            tensors = self._read(world, replace(file, tensors=specs))
            if rank == world.rank:
                own_tensors = tensors if rank == 0 else captures.receive_tensors(0, specs)
            elif world.rank == 0:
                captures.send_tensors(rank, specs, tensors)
        return own_tensors

    def source_of(self, rank: int) -> int:
        """Return the saved rank whose own states `rank` loads."""
        return rank % len(self.ranks)  # keeps the place in an island

    def _read(self, world: World, file: File) -> dict[str, torch.Tensor]:
        """Return the tensors of `file` on rank 0, and an empty dict on the other ranks."""
        tensors: dict[str, torch.Tensor] = {}

        def read() -> None:
            try:
                tensors.update(safetensors_file.read(self.path / file.path, file.tensors))
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"rank 0 cannot read {self.path / file.path} ({error}); call restore() again, which skips a "
                    "damaged checkpoint"
                ) from error

        consensus.decide(world, read)
        return tensors


def malformed(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a checkpoint `path` whose checksums are right but whose content is malformed."""
    return CheckpointError(
        f"{path / manifest.STATE} has the right checksum but was not written by Paceline, because it is malformed "
        f"({error}); remove the folder to use the previous checkpoint"
    )


def compare(
    entries: Collection[Registered], saved: Saved, world: World, allow_changed: bool, *, is_part: bool = False
) -> list[Match]:
    """Compare `entries` with the checkpoint `saved`; return the objects to load.

    They include the random generators if the number of ranks is the same and this is not a partial restore.
    """
    kinds = {entry.name: saved.kind_of(entry) for entry in entries}
    shared = {name for name, kind in kinds.items() if kind is Kind.SHARED}
    _compare_names(shared, set(saved.objects), saved.step, is_part=is_part)
    for nodes in saved.ranks:
        _compare_names(kinds.keys() - shared, set(nodes) - {GENERATORS}, saved.step, is_part=is_part)
    is_same_size = saved.manifest.world_size == world.size
    own_entries = [entry for entry in entries if kinds[entry.name] is Kind.OWN]
    fixed = {entry.name for entry in own_entries if not isinstance(entry.object, Mergeable | Replaceable)}
    if fixed and not is_same_size:
        raise CheckpointMismatch(
            f"{min(fixed)!r} has a state per rank and was saved with world size {saved.manifest.world_size}, but "
            f"this run has {world.size}; resume with the saved world size"
        )
    # Additional ranks compare with another rank's states, which have the same structure.
    rank = saved.source_of(world.rank)
    matches = []
    for entry in entries:
        kind = kinds[entry.name]
        match = Match(entry, kind, saved.outline(entry.name, None if kind is Kind.SHARED else rank))
        if kind is not Kind.OWN or is_same_size or isinstance(entry.object, Replaceable):
            entry.check(match.outline, saved.step, allow_changed)
        matches.append(match)
    if is_same_size and not is_part:
        matches.append(Match(captures.generators(), Kind.OWN, saved.outline(GENERATORS, rank)))
    return matches


def _compare_names(registered: set[str], saved: set[str], step: int, *, is_part: bool) -> None:
    if missing := sorted(registered - saved):
        raise CheckpointMismatch(
            f"{missing[0]!r} is registered but not in the checkpoint of step {step}, which has "
            f"{strict_json.shown(sorted(saved))}; register the objects that were saved"
        )
    if not is_part and (extra := sorted(saved - registered)):
        raise CheckpointMismatch(
            f"{strict_json.shown(extra[0])} is in the checkpoint of step {step} but not registered; register the "
            "objects that were saved, or load some of them with restore(only=[…]) or load_weights(path, model)"
        )


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
    load = {
        Kind.SHARED: loading.shared,
        Kind.SHARDED: loading.sharded,
        Kind.OWN: loading.own,
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
class _Previous:
    """A copy of an object's state before a restore."""

    entry: Registered
    node: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    is_loaded: bool = False  # whether the object has loaded another state since

    @classmethod
    def of(cls, entry: Registered) -> _Previous:
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
    undo: list[_Previous] = field(default_factory=list)

    def shared(self, match: Match) -> None:
        name = match.entry.name
        tensors = self.saved.tensors(self.world, name)
        self.load(match, match.entry.load, self.saved.objects[name], tensors)

    def own(self, match: Match) -> None:
        """Load the state that this rank saved, or the states that a different number of ranks saved."""
        name, entry, ranks = match.entry.name, match.entry, self.saved.ranks
        if len(ranks) != self.world.size and not isinstance(entry.object, Replaceable):
            self.load(match, entry.load_rank_states, [nodes[name] for nodes in ranks])
            return
        tensors = self._own_tensors  # a collective, so outside the block that handles errors of a single rank
        self.load(match, entry.load, ranks[self.saved.source_of(self.world.rank)][name], tensors)
        if self.world.rank >= len(ranks):
            entry.object.replace_lost()

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
            self.undo.append(previous := _Previous.of(match.entry))
            load(*states, self.saved.step)
            previous.is_loaded = True

        consensus.agree(self.world, consensus.error_of(attempt))


def _load_layouts(saved: Saved, matches: Iterable[Match]) -> None:
    for match in matches:  # all ranks have the same layout, even if their weights differ
        nodes = saved.objects if match.kind is Kind.SHARED else saved.ranks[0]
        match.entry.load_layout(nodes[match.entry.name])


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
        warn(f"this run's settings are kept: {'; '.join(changes)} in the checkpoint of step {step}", CheckpointWarning)


def _put_back(undo: Iterable[_Previous], step: int) -> None:
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
    size = saved.manifest.world_size
    if size < world.size and any(isinstance(entry.object, Replaceable) for entry in entries):
        new = named_ranks(range(size, world.size))
        warn(
            f"step {saved.step} has no state of {new}; they continue from the weights and the outer state that all "
            "islands share",
            CheckpointWarning,
        )
    elif size != world.size and not any(virtual_ranks_of(entry.object) for entry in entries):
        warn(
            f"step {saved.step} was saved with world size {size} and this run has {world.size}: "
            "it continues with the same samples and means but not with the same bits, and random generators keep their "
            "current state; use virtual_ranks for the same bits",
            CheckpointWarning,
        )
