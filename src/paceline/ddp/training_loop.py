"""Gradient accumulation in a plain training loop."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.data import IterableDataset

from paceline.core.rng import rng_state, set_rng_state
from paceline.ddp.wrapper import DistributedDataParallel
from paceline.errors import UsageError

Batch = TypeVar("Batch")
_latest: WeakKeyDictionary[nn.Module, object] = WeakKeyDictionary()
"""For each wrapper, the loop over :func:`accumulate` that advanced last. An abandoned loop that is still referenced
(for example by an exception's traceback) may end at any time, and must not affect a step of another loop."""


def accumulate(
    model: DistributedDataParallel, batches: Iterable[Batch], every: int | None = None
) -> Generator[Batch, None, None]:
    """Iterate over `batches` in windows of `every`; only the last batch of each window synchronizes gradients.

    The last window may be short; it is also synchronized, so no batch is lost. If each micro-batch is weighted
    (``model.weight``), a short window is averaged over its own samples::

        for x, y in accumulate(model, loader, every=4):
            with model.weight(len(y)):
                F.cross_entropy(model(x), y, reduction="sum").backward()
            if model.do_sync:
                optimizer.step()
                optimizer.zero_grad()

    To recognize the last batch, this function uses the iterable's ``at_last`` (which :class:`paceline.data.DataLoader`
    has), otherwise its length. An iterable without either (a generator, ``map``, ``enumerate``) is read one batch
    ahead, so a loader inside it counts one batch too many as consumed, and a checkpoint would skip that batch. To avoid
    this, wrap the result instead: ``tqdm(accumulate(model, loader, every=4))``.

    For a model with ``virtual_ranks``, the function iterates over this rank's slices of each global batch, and
    gradients are synchronized in the last slice. Omit `every`; `batches` must be a
    :class:`paceline.data.DataLoader`, whose other passes still yield whole batches. Each slice has separate random
    streams. Empty slices of a short last batch are skipped; if all of a rank's slices are empty, one empty batch is
    yielded.

    Args:
        model: the wrapper; ``model.do_sync`` is true if the current batch is the last of its window.
        batches: any iterable.
        every: number of micro-batches per window, at least 1.

    Raises:
        UsageError: if `every` is less than 1; at the end, if the last window was not synchronized because the number
            of batches did not match the length.
    """
    if (count := model.virtual_ranks) is not None:
        if every is not None:
            raise UsageError(f"a model with virtual_ranks={count} accumulates over its slices; remove every=")
        yield from _slices(model, batches, count)
        return
    yield from _windows(model, batches, every)


def _windows(
    model: DistributedDataParallel, batches: Iterable[Batch], every: int | None
) -> Generator[Batch, None, None]:
    if every is None:
        raise UsageError("pass every= to accumulate(), or virtual_ranks= to the model")
    if every < 1:
        raise UsageError(f"accumulate(every={every}): a window holds at least 1 micro-batch")
    length, pairs = None, _looked_ahead(batches)
    if hasattr(batches, "at_last"):
        pairs = _reported(batches)
    elif (length := _length(batches)) is not None:
        pairs = ((batch, count == length) for count, batch in enumerate(batches, start=1))
    count, synchronized, loop = 0, True, object()
    try:
        for count, (batch, last) in enumerate(pairs, start=1):
            _latest[model] = loop
            model.require_backward_grad_sync = synchronized = last or count % every == 0
            yield batch
    finally:  # also if the caller leaves the loop in the middle of a window
        if _latest.get(model) is loop:
            model.enable_grad_sync()
    if not synchronized:
        raise UsageError(
            f"accumulate expected {length} batches but got {count}, so the last window's gradients were not "
            "synchronized; wrap accumulate's result instead of the loader (for example in tqdm); if the length "
            "of torch's loader is wrong, pass (batch for batch in loader)"
        )


def _slices(model: DistributedDataParallel, loader: Any, count: int) -> Generator[Any, None, None]:
    """Iterate over this rank's slices of each global batch, each with separate random streams."""
    if not hasattr(loader, "in_slices"):
        raise UsageError(
            f"a model with virtual_ranks={count} needs a loader that cuts each batch into that many slices; "
            "pass the paceline.data.DataLoader itself; a progress bar can wrap accumulate's result instead"
        )
    state, virtual_ranks = rng_state(), model._connected().virtual_ranks
    assert virtual_ranks is not None
    loop = _latest[model] = object()
    try:
        for slices in loader.in_slices(count):
            for number in slices.filled or [0]:  # an empty batch if none has samples
                _latest[model] = loop
                virtual_ranks.begin_slice(number, slices.filled)
                yield slices.seeded(number)
            virtual_ranks.end_step()
    finally:  # also if the caller leaves the loop in the middle of a step
        if _latest[model] is loop:
            virtual_ranks.leave_step()
            model.enable_grad_sync()
            set_rng_state(state)


def _length(batches: Any) -> int | None:
    if isinstance(getattr(batches, "dataset", None), IterableDataset):
        return None  # the length of torch's DataLoader over such a dataset is only a guess
    try:
        return len(batches)
    except TypeError:  # no length, or a loader or progress bar around an object without one
        return None


def _reported(batches: Any) -> Iterator[tuple[Any, bool]]:
    for batch in batches:
        yield batch, batches.at_last


def _looked_ahead(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    iterator = iter(batches)
    for current in iterator:
        for following in iterator:
            yield current, False
            current = following
        yield current, True
