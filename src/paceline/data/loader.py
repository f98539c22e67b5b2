"""torch's DataLoader, with a position that counts consumed batches, and with resumable random streams.

position ──tickets──► torch's DataLoader, whose workers fetch ──► count the batch, yield it
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import IterableDataset, default_collate

from paceline.core import data_position
from paceline.core.messages import with_article
from paceline.core.rng import derive_seed
from paceline.core.spans import DATA_WAIT, recorder
from paceline.core.stacks import warn
from paceline.core.virtual_ranks import Slices
from paceline.data.balance import Cost
from paceline.data.fetch import Collate, Failure, Fetch, WithEmpty
from paceline.data.position import find_place
from paceline.data.sampler import GlobalBatchSampler
from paceline.data.stream import End, GlobalBatchStream, Reader, with_last
from paceline.data.workers import OutliveStop, begin, end_workers, lost_worker
from paceline.errors import DataError, UsageError

MOST_UNSYNCHRONIZED = 16
"""After this many optimizer steps without a synchronized backward pass, the model must be outside our wrapper."""
REFUSED = {
    "sampler": "give batch_sampler=GlobalBatchSampler(dataset, batch_size, order=…), or use torch's DataLoader",
    "generator": "give seed=, which decides the order and all random streams",
    "in_order": "leave it out, because the order of batches must not depend on the workers' speed",
}

_UNSET = [("seed", 0), ("accumulate", 1)]
"""Values that count as not given, like None and False."""


class DataLoader(torch.utils.data.DataLoader[Any]):
    """A ``torch.utils.data.DataLoader`` over global batches. Each rank gets its slice.

    ::

        sampler = GlobalBatchSampler(dataset, batch_size=256)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
        for x, y in loader:                  # the rest of the epoch
            ...

    It differs from torch's loader as follows:

    - The position advances when a step consumes batches. After a ``break`` or :meth:`load_state_dict`, iteration
      continues after the last batch that was followed by an optimizer step or a synchronized backward. So
      ``next(iter(loader))`` does not move the position, and a pass that you leave before its first step starts over. To
      change the position, call the sampler's ``set_epoch`` or ``restart``. After the last batch, the next pass is the
      next epoch.
    - If ranks disagree on size, data, seed or order, every rank raises a :class:`paceline.errors.DesyncError` in the
      first synchronized backward pass of an epoch.
    - For every fetch, the CPU generators of Python, NumPy and torch are seeded from (seed, epoch, batch, rank); the
      rank's own random streams do not change. So augmentation is the same with any number of workers and after a
      resume.
    - If a batch has fewer samples than there are ranks, a rank without a sample gets an empty batch: the structure of
      its other batches, with tensors of 0 rows. The wrapper ignores the gradients, weights and buffers of such a batch,
      so the loop needs no special case. To make it, one sample is fetched once more. If a batch cannot be emptied, for
      example because it is a list of images, the loader warns at the beginning and yields ``None``; for ``None``,
      call ``model.sync_gradients()``.
    - ``loader.batch_size`` is the size of the global batch; ``loader.sampler`` is the sampler of global batches or the
      stream. Scripts may call ``loader.sampler.set_epoch(epoch)``, but do not have to.
    - An error in a sample raises a :class:`paceline.errors.DataError` that names rank, worker and sample.

    Args:
        dataset: a map-style dataset, or a :class:`GlobalBatchStream` around an iterable dataset.
        batch_size: samples in a *global* batch; the loader then creates the sampler. Required by `shuffle`, and by the
            arguments from `drop_last` to `speed`.
        shuffle: as in torch, off by default.
        batch_sampler: a :class:`GlobalBatchSampler`, instead of `batch_size`.
        drop_last: whether to drop a short last batch.
        seed: decides the order and all random streams.
        cost, padded, accumulate: for slices of equal cost, see :class:`GlobalBatchSampler`.
        speed: for slices in proportion to the ranks' speed, see :class:`GlobalBatchSampler`.
        collate_fn: as in torch; it runs with the same seeds as the fetch.
        options: ``num_workers``, ``pin_memory``, ``prefetch_factor`` and the other options of torch's DataLoader.

    Raises:
        UsageError: if arguments contradict each other, or if an iterable dataset is not split among ranks.
    """

    progress: GlobalBatchSampler | GlobalBatchStream  # this loader's position in the data
    at_last = False
    """Whether the latest batch is the last of its pass; the same on every rank."""
    slice_is_empty = False
    """Whether this rank has no samples in the latest batch."""
    _empty: Any = None  # the batch to yield in that case

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        shuffle: bool = False,
        *,
        batch_sampler: GlobalBatchSampler | None = None,
        drop_last: bool = False,
        seed: int = 0,
        cost: Cost | None = None,
        padded: bool = False,
        accumulate: int = 1,
        speed: Sequence[float] | None = None,
        collate_fn: Collate | None = None,
        **options: Any,
    ) -> None:
        for name in REFUSED.keys() & options.keys():
            raise UsageError(f"paceline.data.DataLoader takes no {name}=: {REFUSED[name]}")
        collate = collate_fn or default_collate
        shared_options = {"seed": seed, "drop_last": drop_last, "speed": speed}
        of_samplers = {"shuffle": shuffle, "cost": cost, "padded": padded, "accumulate": accumulate}
        if batch_size is None:
            self.progress = _given(dataset, batch_sampler, shared_options | of_samplers)
        elif batch_sampler is not None or isinstance(dataset, GlobalBatchStream):
            raise UsageError("batch_size belongs to the sampler or the stream; give it only there")
        else:
            self.progress = _made(dataset, batch_size, shared_options, of_samplers)
        self.progress.describe(dataset)
        has_unequal_slices = self.progress.world_size > 1 and self.progress.slicing.unequal_by
        self._weight_check = WeightCheck(self.progress.rank) if has_unequal_slices else None
        fetch: Fetch | Reader
        if is_stream := isinstance(self.progress, GlobalBatchStream):
            fetch = Reader(self.progress, collate, options.get("num_workers", 0))
        else:
            fetch = Fetch(dataset, collate, self.progress.seed, self.progress.rank)
        self._tickets = _Tickets(self.progress)
        # torch draws a seed for its workers from this generator, not from the rank's global one.
        self._worker_seed = torch.Generator()
        self._torch_loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            fetch,
            batch_size=None,
            sampler=self._tickets,
            collate_fn=_as_it_is,
            generator=self._worker_seed,
            **options | {"worker_init_fn": OutliveStop(options.get("worker_init_fn"))},
        )
        # Expose the inner loader's options, but with the user's dataset, sampler and functions. Set them through
        # vars(), because torch refuses assignments to a fully built loader.
        vars(self).update(
            vars(self._torch_loader),
            dataset=fetch.dataset,
            batch_size=self.progress.batch_size,
            sampler=self.progress,
            batch_sampler=None if is_stream else self.progress,
            drop_last=self.progress.drop_last,
            collate_fn=collate,
            generator=None,
            worker_init_fn=options.get("worker_init_fn"),
        )

    def __getattr__(self, name: str) -> Any:
        # Accelerator.prepare() reads this attribute first. It would split this rank's slices again and drop samples.
        if name == "_is_accelerate_prepared":
            raise UsageError(
                "accelerator.prepare() was given a paceline.data.DataLoader, which already splits each batch among the "
                "ranks; prepare only the other objects, or use torch's DataLoader"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def in_slices(self, virtual_ranks: int) -> Iterator[Slices]:
        """Iterate as a plain loop does, with each global batch cut into `virtual_ranks` slices, equally many per rank.

        Yields this rank's slices as a list with their ``seeds``; random streams are seeded by slice, not by rank. If a
        model has virtual ranks, :func:`paceline.accumulate`, the Trainer, :func:`paceline.train.evaluate` and
        :func:`paceline.train.predict` iterate in this way. Other passes over the loader are not affected.
        """
        return self._iterate(virtual_ranks)

    def __len__(self) -> int:
        """Return the number of global batches in an epoch."""
        if isinstance(self.progress, GlobalBatchSampler):
            return len(self.progress)
        raise TypeError("a stream has no length; iterate it, or use a map-style dataset")

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the position; see :meth:`GlobalBatchSampler.state_dict`."""
        return self.progress.state_dict(consumed)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position; see :meth:`GlobalBatchSampler.load_state_dict`."""
        self.progress.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._iterate(None)

    def _iterate(self, virtual_ranks: int | None) -> Iterator[Any]:
        progress = self.progress
        progress.begin(virtual_ranks)
        if (check := self._weight_check) is not None:
            check.begin_step()
        self._worker_seed.manual_seed(derive_seed("workers", progress.seed, progress.epoch, progress.rank))
        this_pass, is_exiting = progress.passes, sys.is_finalizing  # a local, because modules are gone at exit
        try:
            for fetched, last in self._batches():
                batch = self._keep_empty(fetched) if isinstance(fetched, WithEmpty) else fetched
                if is_empty := batch is None:
                    batch = copy.deepcopy(self._empty)  # a copy, because the script may change it
                elif virtual_ranks is not None and (is_empty := not batch.filled):
                    batch.empty = copy.deepcopy(self._empty)
                progress.hand_over()
                data_position.taken.empty_slices.discard(progress.key)
                if is_empty:
                    data_position.taken.empty_slices.add(progress.key)
                self.at_last, self.slice_is_empty = last, is_empty
                expected = (progress.epoch, progress.position)
                if check is not None:
                    check.begin_batch(is_empty=is_empty)
                yield batch
                if this_pass != progress.passes:
                    raise UsageError(
                        f"rank {progress.rank}: another pass over the same loader or sampler has begun before the end "
                        f"of this one (epoch {expected[0]}, batch {expected[1]}); iterate once at a time"
                    )
                if expected != (progress.epoch, progress.position):
                    if last:  # set_epoch wins
                        return
                    raise UsageError(
                        f"rank {progress.rank}: the position moved from epoch {expected[0]}, batch {expected[1]} to "
                        f"epoch {progress.epoch}, batch {progress.position} during a pass; leave the loop before "
                        "load_state_dict or set_epoch, and do not call advance"
                    )
                if check is not None:
                    check.end_batch()
            progress.finish()
        finally:
            if not is_exiting() and this_pass == progress.passes:
                self.at_last = self.slice_is_empty = False
                progress.leave()

    def _keep_empty(self, fetched: WithEmpty) -> Any:
        """Keep the empty batch, or warn that there is none; returns the batch that came with it."""
        self._tickets.needs_example, self._empty = False, fetched.empty
        if fetched.reason:
            warn(
                f"rank {self.progress.rank}: a batch with fewer samples than ranks leaves ranks without samples, and "
                f"an empty batch cannot be made ({fetched.reason}), so the loader yields None there; write\n"
                "    if batch is None:\n        model.sync_gradients()\n    else: …  # forward and backward\n"
                "or avoid short batches with drop_last=True, which SyncBatchNorm requires"
            )
        return fetched.batch

    def _batches(self) -> Iterator[tuple[Any, bool]]:
        """Yield each batch of a pass, with a flag for the last one."""
        progress, number = self.progress, self.progress.position
        if isinstance(progress, GlobalBatchStream):
            for read, last in with_last(self._fetched(), progress):
                progress.note_read(read)
                yield read.batch, last
            return
        for batch in self._fetched():
            # Do not look ahead, because that would fetch a batch too early.
            number += 1
            yield batch, number == progress.length

    def _fetched(self) -> Iterator[Any]:
        """Yield the results of torch's DataLoader; raise failures."""
        iterator, is_exiting = begin(self._torch_loader, self.progress), sys.is_finalizing
        try:
            yield from self._unwrapped(iterator)
        finally:
            if not is_exiting() and not self._torch_loader.persistent_workers:
                end_workers(iterator)

    def _unwrapped(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield the results of torch's `iterator` until the pass is over; raise failures."""
        awaited = self.progress.position
        while True:
            try:
                with recorder.span(DATA_WAIT):
                    batch = next(iterator)
            except StopIteration:
                return
            # torch reports a dead worker with these errors (see workers.py); other errors of these classes are passed
            # on.
            except (RuntimeError, OSError, EOFError) as error:
                lost = error if isinstance(error, DataError) else lost_worker(iterator, self.progress, awaited, error)
                if lost is None:
                    raise
                end_workers(iterator)
                raise lost from error.__cause__ or error
            if isinstance(batch, End):
                return
            if isinstance(batch, Failure):
                with recorder.span(DATA_WAIT):  # so that the error is reported with this phase
                    batch.throw()
            yield batch
            awaited += 1


class _Tickets:
    """The sampler for torch's loader: yields the tickets for the rest of the pass."""

    def __init__(self, progress: GlobalBatchSampler | GlobalBatchStream) -> None:
        self._progress = progress
        self.needs_example = isinstance(progress, GlobalBatchSampler)
        """Whether to ask for an empty batch if the pass may need one; a stream makes it without being asked."""

    def __iter__(self) -> Iterator[Any]:
        tickets = self._progress.tickets()
        if self.needs_example and (first := next(tickets, None)) is not None:
            first.example = self._progress.example()  # type: ignore[union-attr]
            yield first
        yield from tickets


def _as_it_is(batch: Any) -> Any:
    return batch


class WeightCheck:
    """Warns about unweighted losses if the ranks' slices differ in length: once, on rank 0, at the script's loop."""

    def __init__(self, rank: int) -> None:
        self._has_warned = rank != 0
        self._unsynchronized = 0  # optimizer steps since the last synchronized backward pass
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the batches of a step that a pass left unfinished."""
        self._has_samples = False
        self._synchronizations, self._weights = data_position.taken.synchronizations, data_position.taken.weights
        self._steps = data_position.steps()

    def begin_batch(self, *, is_empty: bool) -> None:
        """Record a batch that is about to be handed over."""
        self._has_samples |= not is_empty

    def end_batch(self) -> None:
        """Check the step, if this batch completed one."""
        if data_position.taken.synchronizations != self._synchronizations:
            if self._has_samples and data_position.taken.weights == self._weights:
                self._warn(
                    "slices by cost= or speed= differ in length, and this step's backward was not weighted, so samples "
                    "in short slices count more; compute a summed loss inside model.weight(len(batch))"
                )
            self._unsynchronized = 0
            self.begin_step()
        elif data_position.steps() != self._steps:
            self._steps = data_position.steps()
            self._unsynchronized += 1
            if self._unsynchronized == MOST_UNSYNCHRONIZED:
                self._warn(
                    f"a loader with slices by cost= or speed= has seen {MOST_UNSYNCHRONIZED} optimizer steps and no "
                    "backward of a paceline.DistributedDataParallel, so samples in short slices count more; wrap the "
                    "model in it and use its weight(), or scale each loss yourself"
                )

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(message)


def _given(
    dataset: Any, sampler: GlobalBatchSampler | None, options: dict[str, Any]
) -> GlobalBatchSampler | GlobalBatchStream:
    """Return the user's stream or sampler; `options` are allowed only if the loader creates it."""
    if isinstance(dataset, GlobalBatchStream) and options["shuffle"]:
        raise UsageError("a loader cannot shuffle a GlobalBatchStream; remove shuffle=, and shuffle in __iter__")
    if any(value is not None and value is not False and (name, value) not in _UNSET for name, value in options.items()):
        raise UsageError(
            "shuffle, drop_last, seed, cost, padded, accumulate and speed need batch_size; give them to the sampler or "
            "the stream"
        )
    if isinstance(dataset, GlobalBatchStream):
        if sampler is not None:
            raise UsageError("a GlobalBatchStream makes its own batches; remove batch_sampler=")
        return dataset
    if isinstance(dataset, IterableDataset):
        name = type(dataset).__name__
        raise UsageError(f"{name} is an IterableDataset; give GlobalBatchStream(dataset, batch_size) instead")
    if not isinstance(sampler, GlobalBatchSampler):
        description = "nothing" if sampler is None else with_article(type(sampler).__name__)
        raise UsageError(
            f"batch_sampler must be a GlobalBatchSampler, not {description}; give batch_size (samples in a global "
            "batch), your order as GlobalBatchSampler(dataset, batch_size, order=…), or use torch's DataLoader"
        )
    if hasattr(dataset, "__len__") and len(dataset) != sampler.size:
        raise UsageError(
            f"the sampler is for {sampler.size} samples but the dataset has {len(dataset)}; create it from this dataset"
        )
    return sampler


def _made(
    dataset: Any, batch_size: int, shared_options: dict[str, Any], of_samplers: dict[str, Any]
) -> GlobalBatchSampler | GlobalBatchStream:
    """Create a source with `batch_size`; an unwrapped iterable dataset works only on a single rank."""
    if not isinstance(dataset, IterableDataset):
        return GlobalBatchSampler(dataset, batch_size, **shared_options, **of_samplers)
    name, (rank, world_size) = type(dataset).__name__, find_place(None, None)
    if world_size > 1:
        raise UsageError(
            f"rank {rank}: {name} is an IterableDataset that is not split among {world_size} ranks, so each would "
            f"train on all of it; give DataLoader(GlobalBatchStream({name}(…), batch_size={batch_size}))"
        )
    if of_samplers["shuffle"]:
        raise UsageError(f"{name} is an IterableDataset, which has no order to shuffle; remove shuffle=")
    if of_samplers["cost"] is not None or of_samplers["padded"]:
        raise UsageError(f"{name} is an IterableDataset, whose costs are unknown in advance; remove cost=")
    return GlobalBatchStream(dataset, batch_size, **shared_options)
