"""Whether a saved checkpoint fits what is registered, told before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection

from paceline.checkpoint import documents
from paceline.checkpoint.registered import Registered
from paceline.checkpoint.saved import GENERATORS, Saved
from paceline.errors import CheckpointMismatch
from paceline.world import World


def compare(entries: Collection[Registered], saved: Saved, world: World, allow_changed: bool) -> None:
    """Compare `entries`, which the ranks of `world` have registered, with `saved`.

    Settings of optimizers may differ if `allow_changed`.

    Raises:
        CheckpointMismatch: if they do not fit; names what differs first.
        CheckpointError: if `saved` is malformed.
    """
    shared = [entry for entry in entries if not entry.per_rank]
    _compare_names({entry.name for entry in shared}, set(saved.objects), saved.step)
    own = {entry.name for entry in entries if entry.per_rank}
    for nodes in saved.ranks:
        _compare_names(own, set(nodes) - {GENERATORS}, saved.step)
    if own and saved.manifest.world_size != world.size:
        raise CheckpointMismatch(
            f"{min(own)!r} has a state per rank, saved by {saved.manifest.world_size} ranks, but this run "
            f"has {world.size}; resume with {saved.manifest.world_size} ranks"
        )
    for entry in shared:
        entry.check(saved.outline(entry.name), saved.step, allow_changed)
    if saved.manifest.world_size == world.size:
        for entry in entries:
            if entry.per_rank:
                entry.check(saved.outline(entry.name, world.rank), saved.step, allow_changed)
        saved.outline(GENERATORS, world.rank)  # a malformed one is refused


def _compare_names(own: set[str], saved: set[str], step: int) -> None:
    if missing := sorted(own - saved):
        raise CheckpointMismatch(
            f"{missing[0]!r} is registered but not in the checkpoint of step {step}, which has "
            f"{documents.shown(sorted(saved))}; register what was saved"
        )
    if extra := sorted(saved - own):
        raise CheckpointMismatch(
            f"the checkpoint of step {step} has {documents.shown(extra[0])}, which is not registered as that; "
            "register what was saved"
        )
