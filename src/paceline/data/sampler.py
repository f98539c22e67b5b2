"""A sampler of global batches, each split into one slice per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

from torch import Tensor
from torch.utils.data import Sampler

from paceline.core import data_position
from paceline.core.digests import quick_digest
from paceline.core.rng import derive_seed
from paceline.core.virtual_ranks import Slices, seed_of_slice
from paceline.data.balance import Cost, costs_of, split_by_cost, split_by_padded_cost, warn_if_equal
from paceline.data.position import Position, at_least
from paceline.data.slices import EpochOrder, Indices, Slice, batch_bounds, batch_count, slice_bounds
from paceline.errors import CheckpointMismatch, UsageError


class GlobalBatchSampler(Position, Sampler[list[int]]):
    """Batches that are the same for any number of ranks, with each sample exactly once per epoch.

    The order of an epoch is cut into global batches, and each global batch into one contiguous slice per rank. There is
    no padding or repetition: slices differ by at most one sample, and some are empty if there are more ranks than
    samples. Every rank yields the same number of batches.

    Use it with :class:`paceline.data.DataLoader`, which counts consumed batches and yields an empty batch for
    an empty slice.
    After a ``break`` the next loop continues after the last consumed batch, in the same epoch; :meth:`restart` goes
    back to the beginning of the epoch. The epoch advances when a pass is exhausted.

    Other loaders (``torch.utils.data.DataLoader(dataset, batch_sampler=sampler)``) do not report consumed batches. With
    them, the epoch advances when the last batch is *fetched*, and the pass starts over after a ``break``. Inside the
    loop, save ``state_dict(consumed=k)`` after `k` batches of the pass, or call :meth:`advance` after each batch. An
    empty slice is an empty list, which torch's default collate does not accept.

    Args:
        dataset: the dataset, or its number of samples.
        batch_size: samples in a *global* batch, all ranks together. The last batch may be short.
        order: the order of indices, instead of a shuffled one: a sequence, or a function of the epoch that returns one.
            It may repeat, omit and group indices, and must be the same on every rank. A function may draw random
            numbers, for example ``lambda epoch: list(WeightedRandomSampler(weights, n))``: before each call, the CPU
            generators of Python, NumPy and torch are seeded from (seed, epoch).
        shuffle: whether the order is a permutation determined by (seed, epoch) instead of 0, 1, 2, …; ignored with
            `order`.
        seed: determines the permutations, and the random streams for samples that the DataLoader fetches.
        drop_last: whether to drop a short last batch.
        cost: the training cost of each sample, such as its length, to cut slices of about equal cost instead of equal
            length. Either one number per sample, the same on every rank, or a function of a sample, which is called
            once per sample. The global batches, their order and the exact mean do not change. Slices differ in length,
            so losses must be weighted with ``model.weight(len(batch))``.
        padded: with `cost`, whether batches are padded to their longest sample. If so, the cost of a slice is its
            number of samples times its largest sample cost, and samples of similar cost go to the same rank.
        accumulate: with `cost`, the number of micro-batches per step. Ranks then get about equal shares of the whole
            step, because they synchronize only in its last micro-batch.
        speed: the speed of each rank, such as ``[2, 1, 1]``, to cut slices in proportion to it. The global batches,
            their order and the exact mean do not change; losses must be weighted with ``model.weight(len(batch))``.
            Every rank gets at least one sample. With `cost`, the slices' costs are in proportion to the speeds.
        rank: this rank; by default the process group's, or 0 without one.
        world_size: the number of ranks; by default the process group's, or 1 without one.

    Raises:
        UsageError: if a value is out of range, or the dataset has no length.
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        *,
        order: Indices | Callable[[int], Indices] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        cost: Cost | None = None,
        padded: bool = False,
        accumulate: int = 1,
        speed: Sequence[float] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed, drop_last, (rank, world_size), speed)
        self.size = size_of(dataset)
        self._dataset: Sized | None = None  # for its size in later epochs; None if `dataset` is a number
        self._costs = None if cost is None else costs_of(cost, dataset, self.size)
        if self._costs is not None and self.rank == 0:
            warn_if_equal(self._costs)
        self.window = at_least("accumulate", accumulate, 1)
        self._split = split_by_padded_cost if padded else split_by_cost
        if cost is None and (padded or self.window > 1):
            name = "padded" if padded else "accumulate"
            raise UsageError(f"{name} is for slices of equal cost; give cost=, or remove {name}=")
        if not isinstance(dataset, int):
            self.describe(dataset)
        self.shuffle = shuffle
        self._order = EpochOrder(self.size, order, shuffle, self.seed)
        self._fetched = 0  # batches that __iter__ has yielded in this pass
        self._assumed = False  # the latest pass was fetched to its end, so it counts as consumed
        if cost is not None:
            self.slicing.unequal_by = "cost"
        self._check_not_empty()

    def _check_not_empty(self) -> None:
        if self.length == 0:
            raise UsageError(
                f"drop_last leaves no batch: {self.size} samples are fewer than batch_size {self.batch_size}; "
                "use a smaller batch_size or drop_last=False"
            )

    def describe(self, dataset: Any) -> None:
        """Compute the digest of the data. Its size is read again at the beginning of every epoch."""
        if self._dataset is None and hasattr(dataset, "__len__"):
            self._dataset = dataset
        super().describe(dataset)

    def _read_size(self) -> None:
        """Update the size of the dataset, which may have grown since the last epoch."""
        if self._dataset is None or (size := size_of(self._dataset)) == self.size:
            return
        if self._costs is not None:
            raise UsageError(
                f"rank {self.rank}: the dataset has {size} samples in epoch {self.epoch} but cost= has {self.size}; "
                "make a new loader with the costs of all samples"
            )
        self.size, self._data = size, -1
        self._order.size = size
        self.describe(self._dataset)
        self._check_not_empty()

    def __len__(self) -> int:
        """Number of global batches in the whole current epoch."""
        self._read_size_between_epochs()
        return self.length

    def _read_size_between_epochs(self) -> None:
        if self.position == 0 and (self.passes == 0 or self._started != (self.epoch, 0)):
            self._read_size()

    @property
    def length(self) -> int:
        """Return the number of global batches in the current epoch. A user's order is evaluated for that epoch only."""
        return batch_count(self._order.length(self.epoch), self.batch_size, self.drop_last)

    @property
    def varies(self) -> bool:
        """Whether epochs may differ in length because the order is a function of the epoch."""
        return callable(self._order.users)

    @property
    def samples_consumed(self) -> int:
        """Number of samples of the current epoch that all ranks together have consumed."""
        if self.position == 0:
            return 0  # a user-defined order may raise after the last epoch
        return min(self.position * self.batch_size, self._order.length(self.epoch))

    def tickets(self) -> Iterator[Slice | Slices]:
        """Yield this rank's slice of each remaining global batch, or its slices with virtual ranks."""
        if self._virtual_ranks is None:
            yield from self._tickets_by_rank()
            return
        (epoch, start), (count, shares) = self._started, self.slicing.shares(self._virtual_ranks)
        order = self._order.of(epoch)
        for number, indices in self._batches(order, start):
            batch = indices.tolist()
            slices = [Slice(batch[slice(*slice_bounds(len(batch), at, count))], epoch, number, at) for at in shares]
            yield Slices(slices, [seed_of_slice(self.seed, epoch, number, at) for at in shares])

    def example(self) -> int | None:
        """Return the index of a sample if the last batch of this pass has fewer samples than slices, else None."""
        order = self._order.of(self._started[0])
        last = self.batch_size if self.drop_last else len(order) % self.batch_size or self.batch_size
        return None if last >= self.slicing.shares(self._virtual_ranks)[0] else int(order[-1])

    def _batches(self, order: Tensor, start: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the numbers and indices of the global batches in `order`, from number `start` on."""
        for number in range(start, batch_count(len(order), self.batch_size, self.drop_last)):
            yield number, order[slice(*batch_bounds(number, len(order), self.batch_size))]

    def _tickets_by_rank(self) -> Iterator[Slice]:
        epoch, start = self._started
        order, speeds = self._order.of(epoch), self.slicing.speeds
        loads: list[float] = []
        # Start at the beginning of the window, because earlier micro-batches determine how later ones are split.
        for number, batch in self._batches(order, start - start % self.window):
            if self._costs is None:
                low, high = slice_bounds(len(batch), self.rank, self.world_size, speeds)
                indices = batch[low:high]
            else:
                loads_so_far = loads if number % self.window else None
                shares, loads = self._split(self._costs[batch].tolist(), self.world_size, loads_so_far, speeds)
                indices = batch[shares[self.rank]]
            if number >= start:
                yield Slice(indices.tolist(), epoch, number, self.rank)

    def __iter__(self) -> Iterator[list[int]]:
        self.begin()
        for indices in self._tickets_by_rank():
            self._fetched += 1
            data_position.hand_over(self)
            yield indices
        self._fetched = 0
        if not self._reported and (self.epoch, self.position) == self._started:
            self.finish()
            self._assumed = True

    def begin(self, virtual_ranks: int | None = None) -> None:
        """Start a pass; see :meth:`Position.begin`."""
        super().begin(virtual_ranks)
        self._fetched = 0
        if self.position == 0:
            self._read_size()

    def advance(self, batches: int = 1) -> None:
        """Report that this many more global batches were consumed; see :meth:`Position.advance`."""
        if self._assumed:  # the pass was fetched ahead to its end, but the script does report consumed batches
            self._move(*self._started)
        super().advance(batches)

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the epoch, the position and the settings that give them meaning; the same for any number of ranks.

        Args:
            consumed: for loaders that do not report consumed batches: the number of batches that the script has
                taken since it began the latest pass. None uses the reported position.

        Raises:
            UsageError: if batches were fetched in this pass but none were reported as consumed.
        """
        if consumed is None and self._fetched and not self._reported:
            raise UsageError(
                f"rank {self.rank}: this loader took {self._fetched} batches of epoch {self.epoch} but reported none "
                "as consumed; use paceline.data.DataLoader, sampler.advance() after each batch, or "
                "state_dict(consumed=k)"
            )
        return super().state_dict(consumed)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was called; the number of ranks may differ.

        Raises:
            CheckpointMismatch: if batch size, seed, number of samples or order differ, because the position would refer
                to different samples.
        """
        previous = (self.epoch, self.position)
        super().load_state_dict(state)
        if self.position == 0:
            return
        length, digest = self.length, self._order.fingerprint(self.epoch)
        if self.position > length or state.get("order") != digest:
            epoch, position = self.epoch, self.position
            self._move(*previous)  # a rejected state must not change anything
            raise CheckpointMismatch(
                f"rank {self.rank}: the order of epoch {epoch} ({length} batches, digest {digest}) differs from the "
                f"checkpoint's (position {position}, digest {state.get('order')}); give the same function of the epoch "
                "as order in every run, or start over without the saved position"
            )

    def _order_digest(self, epoch: int) -> int:
        order = self._order.digest(epoch)
        if self._costs is not None:  # slices would overlap if costs differed between ranks
            kind = "cost" if self._split is split_by_cost else "padded cost"
            return data_position.short(derive_seed(kind, order, int(quick_digest(self._costs)), self.window))
        return order

    def _identity(self) -> dict[str, Any]:
        self._read_size_between_epochs()
        return {**super()._identity(), "size": self.size, "shuffle": self.shuffle}

    def _mark(self, epoch: int, position: int) -> dict[str, Any]:
        # Not at the start of an epoch: after the last epoch the user's order may raise.
        return {"order": self._order.fingerprint(epoch) if position else None}

    def _move(self, epoch: int, position: int, length: int | None = None) -> None:
        super()._move(epoch, position, length)
        self._fetched = 0
        self._assumed = False


def size_of(dataset: Sized | int) -> int:
    """Return the number of samples in a dataset; a number is returned unchanged."""
    if isinstance(dataset, int):
        return at_least("the number of samples", dataset, 1)
    name = type(dataset).__name__
    try:
        size = len(dataset)
    except TypeError:
        raise UsageError(f"{name} has no length; use paceline.data.GlobalBatchStream for an IterableDataset") from None
    if size < 1:
        raise UsageError(f"{name} has no samples; give a dataset with at least one")
    return size
