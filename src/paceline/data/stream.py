"""Streams of samples without indices, cut into global batches.

Every process reads the same stream, counts global batches, and keeps its rank's slice of each. So ranks agree on the
end of the stream without communication, and a position is valid for any number of ranks and workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from paceline.core.data_position import short
from paceline.core.rng import derive_seed, seed_cpu
from paceline.core.torch_internals import hide_worker_info
from paceline.core.virtual_ranks import seed_of_slice
from paceline.data.dataset_digest import outline_digest
from paceline.data.fetch import Collate, Failure, gathered, own_streams, with_empty
from paceline.data.position import Position
from paceline.data.slices import slice_bounds
from paceline.errors import CheckpointMismatch, UsageError

PROBES = 4
"""Number of samples per global batch to compare between ranks."""


class GlobalBatchStream(Position):
    """An ``IterableDataset`` split by rank and worker, with a position that survives a restart.

    Give it to :class:`paceline.data.DataLoader`. Every sample reaches exactly one rank, and all ranks yield the same
    number of batches; a rank whose slice of the last batch is empty gets an empty batch.

    The dataset must yield the same stream in every process, so it must not split itself by rank. (It cannot split
    itself by worker, because worker information is hidden from it.) It may draw from the global generators, which have
    the same seed in every process, and its ``set_epoch`` is called. Every worker of every rank reads the whole stream,
    and a resumed run reads up to its position again. So costly work such as decoding belongs in ``collate_fn``, which
    gets only this rank's samples.

    In every step a digest of some samples is compared between ranks and between the workers of a rank. If samples are
    meant to differ, for example because the dataset has a private random generator, give it a string as
    ``fingerprint``; then only the fingerprint is compared.

    Args:
        dataset: an iterable that starts from the beginning at each ``iter()``.
        batch_size: samples in a *global* batch, all ranks together.
        seed: determines the random streams that the dataset sees.
        drop_last: whether to drop a short last batch.
        speed: as for :class:`GlobalBatchSampler`.
        rank: this rank; by default the process group's, or 0 without one.
        world_size: the number of ranks; by default the process group's, or 1 without one.

    Raises:
        UsageError: if a value is out of range, or the data can be iterated only once.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int,
        *,
        seed: int = 0,
        drop_last: bool = False,
        speed: Sequence[float] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed, drop_last, (rank, world_size), speed)
        self.dataset = reiterable(dataset)
        self.describe(dataset)

    def tickets(self) -> Iterator[Ticket]:
        """Yield an endless sequence of tickets for global batches, because only a reader sees the end of the stream."""
        (epoch, start), shares = self._started, self.slicing.shares(self._virtual_ranks)
        is_cut = self._virtual_ranks is not None
        # Set the epoch before workers do: torch requests the first ticket while all workers are idle. Hugging Face data
        # sets keep their epoch in shared memory and add the difference, which two concurrent workers would add twice.
        set_epoch_of(self.dataset, epoch)
        if start != self.length:  # the length is known only after a pass has reached the end
            for number in count(start):
                yield Ticket(epoch, number, shares, is_cut)

    @property
    def samples_consumed(self) -> int:
        """Number of samples of the current epoch that all ranks have consumed; a short last batch counts as a full
        one."""
        return self.position * self.batch_size

    def begin(self, virtual_ranks: int | None = None) -> None:
        """Start a pass; see :meth:`Position.begin`."""
        super().begin(virtual_ranks)
        self._stream_digest = -1

    def note_read(self, read: Read) -> None:
        """Record the digest of the samples up to the next batch; raise an error if workers disagree."""
        if self._stream_digest not in (-1, read.digest_before):
            raise UsageError(
                f"rank {self.rank}: {type(self.dataset).__name__} gave different samples in two workers before batch "
                f"{self.position} of epoch {self.epoch}; draw from the global generators, which have the same seed in "
                "every process, or, if only augmentation differs, give it a string as fingerprint"
            )
        self._stream_digest = read.digest

    def end(self, batches: int) -> None:
        """Record that the stream ended after this number of global batches."""
        self._end = batches

    def _mark(self, epoch: int, position: int) -> dict[str, Any]:
        return {"length": self._end if epoch == self.epoch else None}


@dataclass(frozen=True)
class Ticket:
    """A request to read one global batch of an epoch."""

    epoch: int
    number: int
    shares: tuple[int, Sequence[int]]
    """The number of slices, and the numbers of this rank's slices."""
    is_cut: bool
    """Whether the batch is cut for virtual ranks, so that this rank gets a list of slices."""


class Read(NamedTuple):
    """A batch that was read from a stream."""

    batch: Any
    digest: int
    """Digest of the epoch's samples up to the last one of this batch; -1 if samples are not compared."""
    digest_before: int
    """Digest of the epoch's samples up to the previous batch."""


class End:
    """Represents a batch beyond the end of the stream."""


class Reader(Dataset[Any]):
    """Reads a stream in one process, forward only; a ticket for an earlier batch reopens the stream."""

    def __init__(self, stream: GlobalBatchStream, collate_fn: Collate, workers: int = 0) -> None:
        self.dataset: Any = stream.dataset
        self.collate_fn = collate_fn
        self.batch_size, self.drop_last, self.seed = stream.batch_size, stream.drop_last, stream.seed
        self.rank, self._speeds = stream.rank, stream.slicing.speeds
        is_alone = stream.world_size == 1 and workers <= 1
        self._is_compared = not is_alone and not isinstance(getattr(self.dataset, "fingerprint", None), str)
        self._digest = self._digest_before = -1
        self._samples: Iterator[Any] | None = None
        self._epoch = 0
        self._next = 0  # number of the next global batch to read
        self._seen = 0  # samples read

    def __getitem__(self, ticket: Ticket) -> Any:
        batch_name = f"batch {ticket.number} of epoch {ticket.epoch}"
        with own_streams():
            try:
                with hide_worker_info():  # many datasets split themselves by worker
                    batch = self._read(ticket)
            except Exception as error:
                self._samples = None  # an iterator that raised is exhausted; the next ticket reads from the start
                return Failure.of(error, self.rank, f"sample {self._seen} of the stream ({batch_name} was due)")
            if not batch or (self.drop_last and len(batch) < self.batch_size):
                return End()
            batches = [self._collated(batch, ticket, share) for share in ticket.shares[1]]
            fetched: Any = batches[0]
            if ticket.is_cut:
                seeds = [seed_of_slice(self.seed, ticket.epoch, ticket.number, share) for share in ticket.shares[1]]
                fetched = gathered(batches, seeds)
            if all(part is None for part in batches):
                fetched = with_empty(fetched, self.collate_fn, partial(batch.__getitem__, 0))
            return fetched if isinstance(fetched, Failure) else Read(fetched, self._digest, self._digest_before)

    def _collated(self, batch: list[Any], ticket: Ticket, share: int) -> Any:
        """Return the slice `share` of a global batch, collated; None if it is empty."""
        low, high = slice_bounds(len(batch), share, ticket.shares[0], self._speeds)
        if low == high:
            return None
        # Seeded by slice from here on, because every process read the stream with the same seed, but augmentation must
        # differ.
        seed_cpu(derive_seed("batch", self.seed, ticket.epoch, ticket.number, share))
        try:
            return self.collate_fn(batch[low:high])
        except Exception as error:
            first = ticket.number * self.batch_size
            where = f"batch {ticket.number} of epoch {ticket.epoch}"
            samples = f"samples {first + low} to {first + high - 1} of the stream ({where})"
            return Failure.of(error, self.rank, samples)

    def _read(self, ticket: Ticket) -> list[Any]:
        """Read the whole global batch; it is short or empty at the stream's end."""
        if self._samples is None or self._epoch != ticket.epoch or self._next > ticket.number:
            self._samples, self._epoch, self._next, self._seen, self._digest = None, ticket.epoch, 0, 0, -1
        while True:
            # Seeded by batch, not by rank: every process must see the same stream, at any position.
            seed_cpu(derive_seed("stream", self.seed, self._epoch, self._next))
            if self._samples is None:
                set_epoch_of(self.dataset, self._epoch)
                self._samples = iter(self.dataset)
            batch = []
            for sample in islice(self._samples, self.batch_size):
                batch.append(sample)
                self._seen += 1
            if self._is_compared:
                self._digest_before = self._digest
                probes = batch[:: -(-len(batch) // PROBES) or 1]
                self._digest = short(derive_seed("stream", self._digest, outline_digest(probes)))
            self._next += 1
            if self._next > ticket.number or not batch:
                return batch


def reiterable(dataset: Any) -> Iterable[Any]:
    """Check that each ``iter()`` of `dataset` starts from the beginning, and return it."""
    name = type(dataset).__name__
    if isinstance(dataset, Iterator):
        raise UsageError(
            f"{name} is an iterator, which can be read only once; give an IterableDataset whose __iter__ starts from "
            "the beginning"
        )
    if not isinstance(dataset, Iterable):
        raise UsageError(f"{name} cannot be iterated; give an IterableDataset")
    return dataset


def set_epoch_of(dataset: Any, epoch: int) -> None:
    """Call the dataset's own ``set_epoch``, if it has one."""
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def with_last(batches: Iterator[Read], stream: GlobalBatchStream) -> Iterator[tuple[Read, bool]]:
    """Yield each batch of a stream with a flag for the last one; fetches one batch ahead."""
    number = stream.position
    batch = next(batches, None)
    if batch is None and number != stream.length:
        raise _ended_early(stream)
    while batch is not None:
        following = next(batches, None)
        number += 1
        if following is None:
            stream.end(number)
        yield batch, following is None
        batch = following


def _ended_early(stream: GlobalBatchStream) -> UsageError:
    name, start = type(stream.dataset).__name__, stream.position
    if start == 0:
        return UsageError(f"rank {stream.rank}: {name} gave no batch in epoch {stream.epoch}; check its source")
    return CheckpointMismatch(
        f"rank {stream.rank}: {name} ended before batch {start} of epoch {stream.epoch}, so the run cannot resume "
        "there; restore the data, or start the epoch again with restart()"
    )
