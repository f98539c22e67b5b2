"""A saved checkpoint on every rank: the manifest and the states' nodes. Only rank 0 reads files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import captures
from paceline.checkpoint.format import manifest, safetensors_file, state_codec, verify
from paceline.checkpoint.format.manifest import GENERATORS, RANK_ROLE, File, Manifest
from paceline.checkpoint.objects.protocols import Mergeable
from paceline.checkpoint.objects.registered import Outline, Registered
from paceline.core import strict_json
from paceline.core.processes import consensus
from paceline.core.processes.world import World
from paceline.core.state.optimizer_shards import is_shard
from paceline.errors import CheckpointError, CheckpointMismatch


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
                state = strict_json.parse(verify.read_document(path / manifest.STATE))
            except (ValueError, verify.Damaged) as error:
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
            file = self.manifest.file(RANK_ROLE, rank)
            if file is None:
                continue
            specs = {key: spec for key, spec in file.tensors.items() if key.partition(".")[0] not in without}
            tensors = self._read(world, replace(file, tensors=specs))
            if rank == world.rank:
                own_tensors = tensors if rank == 0 else captures.receive_tensors(0, specs)
            elif world.rank == 0:
                captures.send_tensors(rank, specs, tensors)
        return own_tensors

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
    fixed = {entry.name for entry in own_entries if not isinstance(entry.object, Mergeable)}
    if fixed and not is_same_size:
        raise CheckpointMismatch(
            f"{min(fixed)!r} has a state per rank and was saved by {saved.manifest.world_size} ranks, but this run "
            f"has {world.size}; resume with {saved.manifest.world_size} ranks"
        )
    # Additional ranks compare with rank 0's states, which have the same form.
    rank = world.rank if world.rank < len(saved.ranks) else 0
    matches = []
    for entry in entries:
        kind = kinds[entry.name]
        match = Match(entry, kind, saved.outline(entry.name, None if kind is Kind.SHARED else rank))
        if kind is not Kind.OWN or is_same_size:
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
