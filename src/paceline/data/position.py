"""The place of a run in its data: the epoch, and how many of its global batches were consumed.

    begin ──► hand_over, once a batch is asked for ──► finish (epoch + 1, position 0)
      a pass over the rest of the epoch          └──► leave: the pass ended before the epoch did

The position counts global batches, so it is valid for any number of ranks. It counts batches that were handed
over, not those that workers have fetched ahead. A batch is consumed once an optimizer steps, or a backward is
synchronized, after it was handed over (:mod:`paceline.data.consumption`). A pass that was left continues behind the
last consumed batch, so looking at a batch does not use it up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.core.state import data_position
from paceline.core.state.rng import derive_seed
from paceline.data.arguments import at_least, check_settings, find_place, short_seed
from paceline.data.consumption import Consumption
from paceline.data.dataset_digest import outline_digest
from paceline.data.split.slicing import Slicing
from paceline.data.split.speeds import Speed
from paceline.errors import CheckpointMismatch, UsageError


class Position:
    """Epoch and position, in global batches, of a sampler or a stream.

    Attributes:
        epoch: the pass over the data that the next batch belongs to, from 0.
        position: how many global batches of this epoch were handed over.
    """

    window = 1
    """Micro-batches of a step, where the source was told."""
    size = -1
    """Samples of the data set, as of the beginning of the epoch; -1 for a stream."""

    def __init__(
        self,
        batch_size: int,
        seed: int,
        drop_last: bool,
        place: tuple[int | None, int | None],
        speed: Speed | None = None,
    ) -> None:
        self.batch_size = at_least("batch_size", batch_size, 1)
        self.seed = at_least("seed", seed, 0)
        self.drop_last = drop_last
        self.rank, self.world_size = find_place(*place)
        self.slicing = Slicing(self.batch_size, self.rank, self.world_size, speed)
        self.cuts = self.slicing.cuts
        """The speeds by which batches are cut into slices; None where slices are equal."""
        self.epoch, self.position = 0, 0
        self._started = (0, 0)  # epoch and position at which the latest pass began
        self.key = data_position.key_of_caller() if self.world_size > 1 else -1
        """Index of this source in the script, the same on every rank; -1 if there is only one rank."""
        self._end: int | None = None  # the epoch's number of global batches, where the position alone tells it
        self._named = False  # set_epoch named the epoch, and nothing of it was consumed since
        self._reported = False  # batches were handed over, or advance was called, in the latest pass
        self.passes = 0  # begun so far
        self._consumption = Consumption()  # how much of the latest pass the script has used up
        # Describes the latest pass for other ranks. Made when first needed, because its digests read the whole order.
        self._origin = data_position.Origin()
        self._origin_of = -1  # the pass that it is of
        self._data = -1  # digest of the data set
        self._stream_digest = -1  # of the samples that a stream has given in this epoch; -1 if nobody compares it

    @property
    def length(self) -> int | None:
        """Number of global batches in the epoch; None for a stream whose end was not seen yet."""
        return self._end

    def tickets(self) -> Iterator[Any]:
        """Yield a ticket to fetch for each global batch that is left in the pass."""
        raise NotImplementedError

    @property
    def has_unlike_slices(self) -> bool:
        """Whether ranks' slices are unlike in length, so that losses must be weighted."""
        return bool(self.slicing.unlike_by) and self.world_size > 1

    @property
    def steps_batches(self) -> int:
        """Batches that come before a step, as far as is known."""
        return max(1, self.window, self._consumption.window)

    def begin(self) -> None:
        """Start a pass over the rest of the epoch, or over the next one if nothing is left of it.

        Batches that the latest pass handed over but that were not consumed come again.

        Raises:
            UsageError: if that pass was left in the middle of an accumulation window; see :meth:`rewind`.
        """
        self._check_no_open_window()
        self.rewind()
        if self.position == self.length and not self._named:
            self.finish()
        self._started = (self.epoch, self.position)
        self._reported = False
        self.passes += 1
        self._consumption.begin(self.position)

    def hand_over(self) -> None:
        """Count a batch that the script gets now."""
        self._consumption.hand_over(self.position)  # first: it accounts for the batches before this one
        self.advance()
        self._consumption.handed = self.position
        data_position.hand_over(self)

    def leave(self) -> None:
        """Note that the latest pass will hand over no more batches."""
        self._consumption.leave()

    def rewind(self) -> None:
        """Go back behind the last batch that a step followed, if the latest pass was left before its epoch's end.

        The next pass does this automatically, except in the middle of an accumulation window, whose gradients may still
        exist. Call this after dropping them.
        """
        self._consumption.leave()
        if (left := self._consumption.left_over(self.position, self.length)) is not None:
            self.set_position(left)

    def _check_no_open_window(self) -> None:
        self._consumption.leave()
        left = self._consumption.left_over(self.position, self.length)
        if left is not None and self._consumption.window > 1:
            raise UsageError(
                f"rank {self.rank}: the last pass was left after batch {self.position} of epoch {self.epoch}, "
                f"{self.position - left} after the last optimizer step, and whether gradients were accumulated over "
                "these cannot be told; step before you leave the loop, or call optimizer.zero_grad() and rewind() on "
                "the loader's sampler to have them again, or set_position"
                f"({self.position}) to go on behind them"
            )

    def advance(self, batches: int = 1) -> None:
        """Report that this many more global batches were consumed, whether or not an optimizer steps.

        :class:`paceline.data.DataLoader` does this for you; with other loaders, call it yourself.

        Raises:
            UsageError: if the epoch has not that many left.
        """
        position = self.position + at_least("batches", batches, 0)
        if self.length is not None and position > self.length:
            raise UsageError(
                f"rank {self.rank}: epoch {self.epoch} has {self.length} global batches, but {position} were "
                "reported as consumed; call advance once a batch, and not at all with "
                "paceline.data.DataLoader"
            )
        self.position = position
        self._named = False
        self._reported = True

    def finish(self) -> None:
        """Go to the start of the next epoch."""
        self._move(self.epoch + 1, 0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next pass belongs to; it overrides the automatic advance.

        Another epoch than the current one starts from its beginning. Naming the current one keeps the
        position, so a script that calls this at the top of its loop over epochs resumes in the middle of one.
        Named after its last batch was consumed, the next pass has nothing left to yield.
        """
        if at_least("epoch", epoch, 0) != self.epoch:
            self._move(epoch, 0)
        self._named = True

    def set_position(self, position: int) -> None:
        """Set the global batch of the current epoch at which the next pass begins."""
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
        """Return epoch and position, and the settings that they are relative to; the same for any number of ranks.

        The position is behind the last batch that an optimizer step followed. Where no step has ever followed a batch
        of this source, it is behind the last one that was handed over.

        Args:
            consumed: for loaders that do not report consumed batches: the number of batches that the script has
                taken since it began the latest pass. None uses the reported position.
        """
        epoch, position = self.epoch, self.position
        if consumed is not None:
            epoch, position = self._started[0], self._started[1] + at_least("consumed", consumed, 0)
        elif position == self._consumption.handed:
            position = self._consumption.position()
        state = {"epoch": epoch, "position": position, **self._identity(), **self._mark(epoch, position)}
        if self.cuts is not None:
            # From the beginning of the step, because its earlier micro-batches decide how this one is split by cost.
            state["speeds"] = self.cuts.state(epoch, position - position % self.window)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; the number of ranks may differ.

        Raises:
            CheckpointMismatch: if batch size, seed or data differ, so that the position would mean something
                else.
        """
        remedies = {name: f"{text}, or start over without the saved position" for name, text in REMEDIES.items()}
        check_settings(self.rank, state, self._identity(), remedies)
        try:
            epoch, position = at_least("epoch", state["epoch"], 0), at_least("position", state["position"], 0)
            if self.cuts is not None:
                self.cuts.load(state.get("speeds", ()))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointMismatch(
                f"rank {self.rank}: the saved position {state!r} is none ({error}); load what state_dict returned"
            ) from error
        self._move(epoch, position, state.get("length"))

    def origin(self) -> data_position.Origin:
        """Describe the pass under way, for comparison with the other ranks."""
        if self._origin_of != self.passes:
            self._origin_of, self._origin = self.passes, self.origin_in(self._started[0])
        return self._origin._replace(position=self._consumption.handed, stream=self._stream_digest)

    def origin_in(self, epoch: int | None) -> data_position.Origin:
        """Describe the data and, unless `epoch` is None, its order in that epoch."""
        order = -1 if epoch is None else self._order_digest(epoch)
        if epoch is not None and self.cuts is not None:  # ranks with different speeds would take overlapping slices
            order = data_position.short(derive_seed("speed", order, self.cuts.is_measured, repr(self.cuts.changes)))
        if epoch is not None and (virtual_ranks := self.slicing.virtual_ranks) is not None:
            order = data_position.short(derive_seed("virtual ranks", order, virtual_ranks))
        return data_position.Origin(
            source=self.key,
            samples=self.size,
            drop_last=bool(self.drop_last),
            seed=short_seed(self.seed),
            batch_size=self.batch_size,
            data=self._data,
            order=order,
            epoch=-1 if epoch is None else epoch,
        )

    def describe(self, dataset: Any) -> None:
        """Compute the digest of the data if other ranks must compare it and it is not known yet."""
        if self.world_size > 1 and self._data == -1:  # a lone rank need not read anything for it
            self._data = data_position.short(outline_digest(dataset))

    def _order_digest(self, epoch: int) -> int:
        """Return a digest of the epoch's order, as far as the seed does not decide it."""
        return -1

    def _identity(self) -> dict[str, Any]:
        """Return the settings that a position is relative to; they must be equal when it is loaded."""
        return {"batch_size": self.batch_size, "seed": self.seed, "drop_last": self.drop_last}

    def _mark(self, epoch: int, position: int) -> dict[str, Any]:
        """Return further facts about this position, to be saved with it."""
        return {}

    def _move(self, epoch: int, position: int, length: int | None = None) -> None:
        self.epoch, self.position, self._end = epoch, position, length
        self._named = False
        self._consumption.moved()


REMEDIES = {
    "batch_size": "a position counts batches of one size, so use batch_size={}",
    "seed": "another seed is another order, so use seed={}",
    "drop_last": "use drop_last={}",
    "size": "the data has changed, so resume with the same {} samples",
    "shuffle": "another order makes the position meaningless, so use shuffle={}",
}
