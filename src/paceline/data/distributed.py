"""torch's DistributedSampler with a saved state and an epoch that advances automatically."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.utils.data.distributed

from paceline.core.state import data_position
from paceline.data.arguments import at_least, check_settings, find_place, short_seed


class DistributedSampler(torch.utils.data.distributed.DistributedSampler[Any]):
    """A drop-in replacement for ``torch.utils.data.DistributedSampler``: same arguments, same indices.

    Like torch's, it pads: if the size of the data set is not divisible by the number of ranks, some samples appear
    twice per epoch (with `drop_last`, some are left out), so metrics and gradients differ from a single process. The
    batches also depend on the number of ranks. :class:`paceline.data.GlobalBatchSampler` avoids both.

    It adds two features: the epoch advances after each exhausted pass (:meth:`set_epoch` takes precedence), and the
    state can be saved.

    Args:
        dataset: the data set.
        num_replicas: the number of ranks; by default the process group's, or 1 without one.
        rank: this rank; by default the process group's, or 0 without one.
        shuffle: whether each epoch is a permutation determined by `seed` + epoch.
        seed: the same on every rank.
        drop_last: drop the tail instead of padding it.

    Attributes:
        epoch: the next pass, from 0.
        position: number of this rank's samples to skip at the beginning of the next pass.
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
        self.world_size = self.num_replicas
        self.epoch, self.position = 0, 0
        self._started = (0, 0)  # epoch and position at the beginning of the latest pass
        self.key = data_position.key_of_caller() if self.world_size > 1 else -1

    def __iter__(self) -> Iterator[Any]:
        if self.position == self.num_samples:
            self.epoch, self.position = self.epoch + 1, 0
        self._started = started = (self.epoch, self.position)
        data_position.hand_over(self)
        yield from list(super().__iter__())[self.position :]
        if (self.epoch, self.position) == started:  # set_epoch() or load_state_dict() during the pass takes precedence
            self.epoch, self.position = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch. The current epoch keeps its position; a different one starts from its beginning."""
        if at_least("epoch", epoch, 0) != self.epoch:
            self.epoch, self.position = epoch, 0

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the position of the next pass.

        Args:
            consumed: number of this rank's samples that the script has taken since it began the latest pass. Without
                it, the state is correct only between passes.
        """
        epoch, position = self.epoch, self.position
        if consumed is not None:
            epoch, position = self._started[0], self._started[1] + at_least("consumed", consumed, 0)
        return {"epoch": epoch, "position": position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`; in the middle of an epoch, only with the same number of ranks.

        Raises:
            CheckpointMismatch: if the state was saved with different data, a different seed or a different number of
                ranks.
        """
        settings = self._identity()
        if not state.get("position"):
            del settings["num_replicas"]  # between epochs the number of ranks may change
        remedy = "use the same value, or GlobalBatchSampler, whose position is valid for any number of ranks"
        check_settings(self.rank, state, settings, dict.fromkeys(settings, remedy))
        self.epoch, self.position = at_least("epoch", state["epoch"], 0), at_least("position", state["position"], 0)

    def origin(self) -> data_position.Origin:
        """Describe the current pass, for comparison with the other ranks in its first step."""
        return data_position.Origin(
            source=self.key,
            drop_last=bool(self.drop_last),
            seed=short_seed(self.seed),
            samples=len(self.dataset),  # type: ignore[arg-type]
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
