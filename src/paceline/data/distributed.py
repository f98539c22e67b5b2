"""torch's DistributedSampler, with a state and an epoch that advances by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.utils.data.distributed

from paceline import sources
from paceline.data.position import at_least, find_place
from paceline.errors import CheckpointMismatch
from paceline.rng import derive_seed


class DistributedSampler(torch.utils.data.distributed.DistributedSampler[Any]):
    """A drop-in for ``torch.utils.data.DistributedSampler``: same arguments, same indices.

    Like torch's, it pads: where the ranks do not divide the data set, some samples come twice an epoch (or,
    with `drop_last`, some never), so that metrics and gradients are not what one process gets. The batches
    depend on the number of ranks too. :class:`paceline.data.GlobalBatchSampler` has neither fault.

    What it adds: the epoch advances after each exhausted pass (:meth:`set_epoch` wins), and the state can be
    saved.

    Args:
        dataset: the data set.
        num_replicas: the number of ranks; by default the process group's, or 1 without one.
        rank: this rank; by default the process group's, or 0 without one.
        shuffle: whether each epoch is a permutation from `seed` + epoch.
        seed: the same on every rank.
        drop_last: drop the tail instead of padding it.

    Attributes:
        epoch: the pass that comes next, from 0.
        position: how many of this rank's samples the next pass leaves out at the beginning.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        rank, num_replicas = find_place(rank, num_replicas)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.position = 0
        self._started = (0, 0)
        self.world_size = self.num_replicas
        self.key = sources.key_of_caller() if self.world_size > 1 else -1

    def __iter__(self) -> Iterator[Any]:
        if self.position == self.num_samples:
            self._move(self.epoch + 1, 0)
        self._started = started = (self.epoch, self.position)
        sources.hand_over(self)
        yield from list(super().__iter__())[self.position :]
        if (self.epoch, self.position) == started:
            self._move(self.epoch + 1, 0)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next; the current one keeps its position, another begins at its start."""
        if at_least("epoch", epoch, 0) != self.epoch:
            self._move(epoch, 0)

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Where the next pass begins.

        Args:
            consumed: how many of this rank's samples the script has taken since it began the latest pass. The
                sampler cannot know: without it, the state is right between passes only.
        """
        epoch, position = self.epoch, self.position
        if consumed is not None:
            epoch, position = self._started[0], self._started[1] + at_least("consumed", consumed, 0)
        return {"epoch": epoch, "position": position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; within an epoch with the same number of ranks only.

        Raises:
            CheckpointMismatch: if the state is of other data, another seed, or another number of ranks.
        """
        for name, ours in self._identity().items():
            if name == "num_replicas" and not state.get("position"):
                continue  # between epochs any number of ranks will do
            if (theirs := state.get(name)) != ours:
                raise CheckpointMismatch(
                    f"rank {self.rank}: {name} was {theirs!r} when the checkpoint was written but is "
                    f"{ours!r} now; use the same, or GlobalBatchSampler, whose position any number of ranks "
                    "can take up"
                )
        self._move(at_least("epoch", state["epoch"], 0), at_least("position", state["position"], 0))

    def origin(self) -> sources.Origin:
        """Describe the pass under way, to be compared with the other ranks' in its first step."""
        return sources.Origin(
            source=self.key,
            samples=len(self.dataset),  # type: ignore[arg-type]
            drop_last=bool(self.drop_last),
            seed=self.seed if self.seed < sources.LIMIT else sources.short(derive_seed(self.seed)),
            order=int(self.shuffle),
            epoch=self._started[0],
            position=self._started[1],
        )

    def _identity(self) -> dict[str, Any]:
        return {
            "size": len(self.dataset),  # type: ignore[arg-type]
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "num_replicas": self.num_replicas,
        }

    def _move(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
