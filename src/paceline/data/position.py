"""The position of a run in its data: the epoch, and how many global batches of the epoch were consumed.

    begin ──► hand_over, for each batch ──► finish (epoch + 1, position 0)
      a pass over the rest of the epoch └──► leave: the pass ended before the epoch did

The position counts global batches, so it is valid for any number of ranks. It counts batches that were handed over, not
batches that workers have prefetched. A batch is consumed when it is followed by an optimizer step or a synchronized
backward (:class:`Consumption`). A pass that was left early continues after the last consumed batch, so
looking at a batch does not use it up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from operator import index
from typing import Any, SupportsIndex

import torch.distributed as dist

from paceline.core import data_position, world
from paceline.core.rng import derive_seed
from paceline.core.schedulers import adopted
from paceline.data.dataset_digest import outline_digest
from paceline.data.slices import Slicing
from paceline.errors import CheckpointMismatch, UsageError

REMEDIES = {
    "batch_size": "use batch_size={}",
    "seed": "use seed={}",
    "drop_last": "use drop_last={}",
    "size": "resume with the same {} samples",
    "shuffle": "use shuffle={}",
}


class Position:
    """Epoch and position, in global batches, of a sampler or a stream.

    Attributes:
        epoch: the pass over the data that the next batch belongs to, from 0.
        position: how many global batches of this epoch were handed over.
    """

    size = -1
    """Number of samples in the dataset at the beginning of the epoch; -1 for a stream."""

    def __init__(
        self,
        batch_size: int,
        seed: int,
        drop_last: bool,
        place: tuple[int | None, int | None],
        speed: Sequence[float] | None = None,
    ) -> None:
        self.batch_size = at_least("batch_size", batch_size, 1)
        self.seed = at_least("seed", seed, 0)
        self.drop_last = drop_last
        self.rank, self.world_size = find_place(*place)
        self.slicing = Slicing(self.batch_size, self.rank, self.world_size, speed)
        self.epoch, self.position = 0, 0
        self._started = (0, 0)  # epoch and position at the beginning of the latest pass
        self._virtual_ranks: int | None = None  # slices per global batch in the latest pass; None for one per rank
        self.key = data_position.key_of_caller() if self.world_size > 1 else -1
        """Number that identifies this source in the script, the same on every rank; -1 if there is only one rank."""
        self._end: int | None = None  # the epoch's number of global batches, if known without the order
        self._named = False  # set_epoch chose the epoch, and none of its batches has been consumed since
        self._reported = False  # in the latest pass, batches were handed over or advance was called
        self.passes = 0  # number of passes
        self._consumption = Consumption()  # how much of the latest pass the script has used up
        # Describes the latest pass to other ranks. Computed on first use, because the digests read the whole order.
        self._origin = data_position.Origin()
        self._origin_of = -1  # the pass that `_origin` describes
        self._data = -1  # digest of the dataset
        self._stream_digest = -1  # running digest of a stream's samples in this epoch; -1 if ranks do not compare it

    @property
    def length(self) -> int | None:
        """Number of global batches in the epoch; None for a stream whose end has not been reached."""
        return self._end

    def tickets(self) -> Iterator[Any]:
        """Yield a ticket for each remaining global batch of the pass."""
        raise NotImplementedError

    def begin(self, virtual_ranks: int | None = None) -> None:
        """Start a pass over the rest of the epoch, or over the next epoch if this one is complete.

        Batches that the latest pass handed over but no step consumed are repeated.

        Args:
            virtual_ranks: number of slices per global batch in this pass; None for one slice per rank.

        Raises:
            UsageError: if the latest pass was left in the middle of an accumulation window, see :meth:`rewind`; or if
                batches cannot be cut into that many slices.
        """
        self.slicing.shares(virtual_ranks)  # refuses a number that does not fit
        self._consumption.leave()
        last_step_at = self._consumption.left_over(self.position, self.length)
        if last_step_at is not None and self._consumption.window > 1:
            raise UsageError(
                f"rank {self.rank}: the last pass was left after batch {self.position} of epoch {self.epoch}, "
                f"{self.position - last_step_at} batches after the last optimizer step, so gradients may have "
                "accumulated; step before you leave the loop, or call optimizer.zero_grad() and the sampler's rewind() "
                f"to repeat these batches, or its set_position({self.position}) to skip them"
            )
        self.rewind()
        if self.position == self.length and not self._named:
            self.finish()
        self._started = (self.epoch, self.position)
        self._virtual_ranks = virtual_ranks
        self._reported = False
        self.passes += 1
        self._consumption.begin(self.position)

    def hand_over(self) -> None:
        """Count a batch that the script is about to get."""
        self._consumption.hand_over(self.position)  # first, because it accounts for earlier batches
        self.advance()
        self._consumption.handed = self.position
        data_position.hand_over(self)

    def leave(self) -> None:
        """Record that the latest pass will not hand over any more batches."""
        self._consumption.leave()

    def rewind(self) -> None:
        """Go back to the end of the last step, if the latest pass was left before the end of its epoch.

        The next pass does this automatically, except in the middle of an accumulation window, because its gradients may
        still exist. In that case, clear them and then call this method.
        """
        self._consumption.leave()
        if (last_step_at := self._consumption.left_over(self.position, self.length)) is not None:
            self.set_position(last_step_at)

    def advance(self, batches: int = 1) -> None:
        """Report that this many more global batches were consumed, whether or not there was an optimizer step.

        :class:`paceline.data.DataLoader` does this for you; with other loaders, call this method yourself.

        Raises:
            UsageError: if fewer batches are left in the epoch.
        """
        position = self.position + at_least("batches", batches, 0)
        if self.length is not None and position > self.length:
            raise UsageError(
                f"rank {self.rank}: epoch {self.epoch} has {self.length} global batches, but {position} were "
                "reported as consumed; call advance once per batch, and never with paceline.data.DataLoader"
            )
        self.position = position
        self._named = False
        self._reported = True

    def finish(self) -> None:
        """Go to the start of the next epoch."""
        self._move(self.epoch + 1, 0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, instead of the automatic advance.

        A different epoch starts from its beginning. The current epoch keeps its position, so a script that calls this
        at the top of its loop over epochs can resume in the middle of an epoch. If all batches of the current epoch
        were consumed, the next pass is empty.
        """
        if at_least("epoch", epoch, 0) != self.epoch:
            self._move(epoch, 0)
        self._named = True

    def set_position(self, position: int) -> None:
        """Set the first global batch of the next pass, in the current epoch."""
        if self.length is not None and at_least("position", position, 0) > self.length:
            raise UsageError(
                f"position {position} is beyond the {self.length} global batches of epoch {self.epoch}; "
                f"give 0..{self.length}"
            )
        self._move(self.epoch, at_least("position", position, 0), self._end)

    def restart(self) -> None:
        """Make the next pass begin at the first batch of the current epoch."""
        self.set_position(0)

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the epoch, the position and the settings that give them meaning; the same for any number of ranks.

        The position follows the last batch that a step consumed. If no step has ever followed a batch of this source,
        it follows the last batch that was handed over.

        Args:
            consumed: for loaders that do not report consumed batches: the number of batches that the script has
                taken since it began the latest pass. None uses the reported position.
        """
        epoch, position = self.epoch, self.position
        if consumed is not None:
            epoch, position = self._started[0], self._started[1] + at_least("consumed", consumed, 0)
        elif position == self._consumption.handed:
            position = self._consumption.position()
        return {"epoch": epoch, "position": position, **self._identity(), **self._mark(epoch, position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was called; the number of ranks may differ.

        Raises:
            CheckpointMismatch: if batch size, seed or data differ, because the position would refer to different
                samples.
        """
        for name, value in self._identity().items():
            if (saved := state.get(name)) != value:
                raise CheckpointMismatch(
                    f"rank {self.rank}: {name} was {saved!r} when the checkpoint was written but is {value!r} now; "
                    f"{REMEDIES[name].format(saved)}, or start over without the saved position"
                )
        try:
            epoch, position = at_least("epoch", state["epoch"], 0), at_least("position", state["position"], 0)
        except (KeyError, UsageError) as error:
            raise CheckpointMismatch(
                f"rank {self.rank}: {state!r} is not a saved position ({error}); load what state_dict returned"
            ) from error
        self._move(epoch, position, state.get("length"))

    def origin(self) -> data_position.Origin:
        """Describe the current pass, for comparison with the other ranks."""
        if self._origin_of != self.passes:
            self._origin_of, self._origin = self.passes, self.origin_in(self._started[0], self._virtual_ranks)
        return self._origin._replace(position=self._consumption.handed, stream=self._stream_digest)

    def origin_in(self, epoch: int | None, virtual_ranks: int | None) -> data_position.Origin:
        """Describe the data and, unless `epoch` is None, its order and slices in a pass over that epoch."""
        order = -1 if epoch is None else self._order_digest(epoch)
        if epoch is not None and self.slicing.speeds is not None:  # with different speeds, slices would overlap
            order = data_position.short(derive_seed("speed", order, repr(self.slicing.speeds)))
        if epoch is not None and virtual_ranks is not None:
            order = data_position.short(derive_seed("virtual ranks", order, virtual_ranks))
        return data_position.Origin(
            source=self.key,
            samples=self.size,
            drop_last=bool(self.drop_last),
            seed=self.seed if self.seed < data_position.LIMIT else data_position.short(derive_seed(self.seed)),
            batch_size=self.batch_size,
            data=self._data,
            order=order,
            epoch=-1 if epoch is None else epoch,
        )

    def describe(self, dataset: Any) -> None:
        """Compute the digest of the data, for comparison between ranks."""
        if self.world_size > 1 and self._data == -1:
            self._data = data_position.short(outline_digest(dataset))

    def _order_digest(self, epoch: int) -> int:
        """Return a digest of the epoch's order; -1 if the seed decides it."""
        return -1

    def _identity(self) -> dict[str, Any]:
        """Return the settings that give a position its meaning; they must be the same when it is loaded."""
        return {"batch_size": self.batch_size, "seed": self.seed, "drop_last": self.drop_last}

    def _mark(self, epoch: int, position: int) -> dict[str, Any]:
        """Return what else to save with this position."""
        return {}

    def _move(self, epoch: int, position: int, length: int | None = None) -> None:
        self.epoch, self.position, self._end = epoch, position, length
        self._named = False
        self._consumption.moved()


class Consumption:
    """Counts the batches that the script has consumed in a pass, that is, batches handed over before the latest step.

    A step is an optimizer step or a synchronized backward pass of any model. A batch is not consumed if the script only
    looked at it, or if ``zip`` fetched it before finding that another iterator had ended.
    """

    consumed: int
    """Position after the last batch that was followed by a step; before the first step, the start of the pass."""
    handed: int
    """Position after the last batch that a loader handed over; -1 if the position was set by other means."""
    window: int
    """Largest number of batches per step in this pass."""
    has_stepped: bool
    """Whether a step followed a batch of this pass."""
    sees_steps: bool
    """Whether a step followed any batch of any pass."""

    def __init__(self) -> None:
        self.sees_steps = False
        self.begin(-1)
        self._open = False

    def begin(self, position: int) -> None:
        """Begin a pass at `position`."""
        self.consumed = self.handed = position
        self.window, self.has_stepped = 0, False
        self._steps = data_position.steps()
        self._open = True  # the script may still step with the batches handed over

    def hand_over(self, position: int) -> None:
        """Record that the batch at `position` is about to be handed over."""
        self.account()
        self._steps = data_position.steps()

    def account(self) -> None:
        """Mark batches as consumed if there was a step since the last one was handed over."""
        if self._open and self.handed > self.consumed and data_position.steps() != self._steps:
            self.window = max(self.window, self.handed - self.consumed)
            self.consumed = self.handed
            self.has_stepped = self.sees_steps = True

    def leave(self) -> None:
        """End the pass: later steps do not belong to its batches."""
        self.account()
        self._open = False

    def position(self) -> int:
        """Return the position to save. If there was never a step, all batches handed over count as consumed."""
        self.account()
        return self.consumed if self.sees_steps else self.handed

    def left_over(self, position: int, length: int | None) -> int | None:
        """Return where to resume a pass that stopped at `position`; None if it continues there or is complete."""
        # A pass that was read to the end without any step, such as an evaluation, is complete.
        is_current = position == self.handed > self.consumed
        return self.consumed if is_current and (position != length or self.has_stepped) else None

    def moved(self) -> None:
        """Record that the position was changed from outside."""
        self.handed, self._open = -1, False


def find_place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size: the arguments if given, else the process group's, else 0 and 1."""
    if rank is None or world_size is None:
        default_rank, default_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            current = world.current()
            default_rank, default_size = current.rank, current.size
        elif (size := (os.environ | adopted(os.environ)).get("WORLD_SIZE", "1")) != "1":
            raise UsageError(
                f"WORLD_SIZE={size}, but the process group is not initialized, so the data cannot be split; call "
                "paceline.init() first, or give rank= and world_size="
            )
        rank = default_rank if rank is None else rank
        world_size = default_size if world_size is None else world_size
    at_least("world_size", world_size, 1)
    if at_least("rank", rank, 0) >= world_size:
        raise UsageError(f"rank {rank} is not below world_size {world_size}; give a rank in 0..{world_size - 1}")
    return rank, world_size


def at_least(name: str, value: int, minimum: int) -> int:
    """Check that `value` is a whole number >= `minimum`, and return it."""
    # Accept any integer type, such as NumPy's, but not bool, which is an int in Python.
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or index(value) < minimum:
        raise UsageError(f"{name} must be a whole number >= {minimum}, not {value!r}")
    return index(value)
