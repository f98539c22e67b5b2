"""The compute check: every k steps, a second rank computes the same slice, and the gradients are compared bit by bit.

    send the slice ──► the neighbor computes it ──► compare ──► the last slice, which synchronizes, and the step
                       the owner does so as usual       │
                                    they differ: every rank computes it several times ──► an error on every rank

Averaging a wrong gradient would make every replica equally wrong, so the error must be found first: the whole check
runs before a rank's last slice. :func:`paceline.accumulate` yields the slice to the training loop once more, like any
other slice, so the check does not need to know the loss. The resulting gradients, weights and buffers are dropped.

If the slice to check is its rank's only slice, the rank computes it an extra time before the step's own computation. In
the first step every rank repeats the slice, to find models that do not reproduce their own bits.

Decision 0056 says why.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import socket
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.digests import quick_digest
from paceline.core.messages import counted
from paceline.core.missing_ranks import named_ranks
from paceline.core.rng import seed_all
from paceline.core.torch_distributed import local_of
from paceline.core.virtual_ranks import Slices
from paceline.ddp.arrivals import digest_of
from paceline.ddp.channel import Channel
from paceline.ddp.reducer import Reducer
from paceline.ddp.running_statistics import REPEAT
from paceline.ddp.virtual_ranks import Begin, SavedBuffers, VirtualRanks, in_order
from paceline.errors import UsageError, WrongComputation

REPEATS = 3
"""Number of times that every rank repeats a slice to find out which rank is wrong."""
_REFUSED = -1
"""Sent instead of the size if a slice cannot be pickled."""


class Fault(Enum):
    """The reason why several computations of a slice gave different bits."""

    DEVICE = "most computations agree, so the ranks with different bits computed wrong results"
    UNDECIDED = "each rank reproduces its own bits, but ranks differ and no value has a majority"
    MODEL = "ranks do not reproduce their own bits, so the computation is nondeterministic"


def judge(
    repeats: Sequence[Sequence[int]], earlier: Iterable[tuple[int, int]] = ()
) -> tuple[Fault, tuple[int, ...]] | None:
    """Return the fault and the affected ranks, given digests of one slice's result; None if all digests are equal.

    Args:
        repeats: for each rank, the digests of its repetitions, at least two.
        earlier: rank and digest of earlier computations of the slice.
    """
    unsteady = tuple(rank for rank, digests in enumerate(repeats) if len(set(digests)) > 1)
    values = Counter(digests[0] for rank, digests in enumerate(repeats) if rank not in unsteady)
    if unsteady:
        # A nondeterministic kernel is unlikely to agree with itself on half of the ranks several times in a row.
        is_a_device = len(values) == 1 and 2 * len(unsteady) <= len(repeats)
        return Fault.DEVICE if is_a_device else Fault.MODEL, unsteady
    value, count = values.most_common(1)[0]
    if count < len(repeats) and 2 * count <= len(repeats):
        return Fault.UNDECIDED, tuple(range(len(repeats)))
    lasting = {rank for rank, digests in enumerate(repeats) if digests[0] != value}
    wrong = lasting or {rank for rank, digest in earlier if digest != value}
    return (Fault.DEVICE, tuple(sorted(wrong))) if wrong else None


class ComputeCheck:
    """Checks one slice every `every` steps, rotating through the ranks.

    Args:
        every: number of steps between two checks.
        reducer: averages the wrapper's gradients.
        slices: adds up the gradients of this rank's slices.
    """

    def __init__(self, every: int, reducer: Reducer, slices: VirtualRanks) -> None:
        self._every, self._reducer, self._slices = every, reducer, slices
        self._channel, self._ledger = reducer.channel, reducer.ledger
        self._checked_at = -1
        """Number of synchronizations when the latest check began."""
        self._repeats_itself = False
        """Whether every rank has been found to reproduce its own bits."""
        self._is_awaited = False
        """Whether the other ranks are waiting for this rank's digests."""

    @property
    def is_due(self) -> bool:
        """Whether the step that is about to begin checks a slice; the same on every rank."""
        step = self._ledger.synchronizations
        return self._is_awaited or (step % self._every == 0 and step != self._checked_at)

    def go_through(
        self, begin: Begin, batches: Slices, filled: Sequence[int], is_latest: Callable[[], bool]
    ) -> Iterator[Any]:
        """Yield this rank's slices of a step, including repetitions of the checked slice.

        Args:
            begin: begins a slice.
            batches: this rank's slices.
            filled: the numbers of slices with samples.
            is_latest: returns whether this is still the loop that began a slice last.
        """
        self._slices.is_repeat = False
        if self._is_awaited:  # this rank left a check because of an exception in the loop
            self._gather(None)
        if self._checked_at == self._ledger.synchronizations:
            yield from in_order(begin, batches, filled)
            return
        self._checked_at = self._ledger.synchronizations
        first = filled[0] if filled else 0
        begin(first, filled)  # refuses gradients that are left over from the previous step
        sent = _send(self._channel, self._turns()[0], (batches[first], batches.seeds[first]) if filled else None)
        if sent is None:  # the owner has no samples in this step
            yield from in_order(begin, batches, filled)
            return
        buffers = SavedBuffers(self._reducer.watch.module)
        try:
            yield from self._check(begin, batches, filled, sent, buffers)
        except BaseException:  # also when the caller leaves the loop
            if is_latest() and self._slices.leave_step():
                buffers.restore()
                self._reducer.buffers.restored()
            raise
        finally:
            if is_latest():
                self._slices.is_repeat = False

    def _check(
        self, begin: Begin, batches: Slices, filled: Sequence[int], sent: bytes, buffers: SavedBuffers
    ) -> Iterator[Any]:
        """Yield this rank's slices, and repetitions of the slice `sent`; `buffers` holds the values before the step."""
        owner, checker, is_owner = self._turns()
        first, last = (filled[0], filled[-1]) if filled else (0, 0)
        expected = 0
        if not self._repeats_itself:
            expected, *more = yield from self._repeat(sent, buffers, REPEATS)
            if (rows := self._gather([expected, *more])) is None:  # a rank has left the check
                yield from in_order(begin, batches, filled)
                return
            self._conclude(rows)
            self._repeats_itself = True
        elif checker == self._channel.rank:
            [expected] = yield from self._repeat(sent, buffers, 1)
        self._is_awaited = True
        own_digest = 0
        if is_owner and first == last:  # the step's own computation synchronizes, so repeat the slice before it
            [own_digest] = yield from self._repeat(sent, buffers, 1)
        for number in filled[:-1]:
            begin(number, filled)
            # The owner also computes an unpickled copy, because pickling does not preserve views and pinned memory.
            yield _unpacked(sent) if is_owner and number == first else batches.seeded(number)
            if is_owner and number == first:
                own_digest = self._digest(self._slices.statistics.parts_of(number))
        yield from self._compare(sent, buffers, (owner, own_digest), (checker, expected))
        begin(last, filled)
        yield batches.seeded(last)

    def _turns(self) -> tuple[int, int, bool]:
        """Return the rank that owns the checked slice, the rank that repeats it, and whether this rank is the owner."""
        owner = self._checked_at // self._every % self._channel.size
        return owner, (owner + 1) % self._channel.size, owner == self._channel.rank

    def _repeat(self, sent: bytes, buffers: SavedBuffers, times: int) -> Generator[Any, None, list[int]]:
        """Yield the slice `times` times, and return digests of its results, which are dropped."""
        digests = []
        self._is_awaited = True
        for _ in range(times):
            self._slices.begin_repeat()
            yield _unpacked(sent)
            digests.append(self._digest(self._slices.statistics.parts_of(REPEAT)))
            self._slices.drop()
            self._ledger.forget_local()
            buffers.restore()
        self._slices.is_repeat = False
        return digests

    def _digest(self, statistics: Sequence[Tensor]) -> int:
        """Return a 63-bit digest of all gradients and of the changes to BatchNorm's statistics."""
        gradients = [parameter.grad for parameter in self._reducer.trained.parameters]
        numbers = [*map(digest_of, gradients), *(int(quick_digest(tensor)) for tensor in statistics)]
        return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "big") >> 1

    def _gather(self, digests: Sequence[int] | None) -> list[list[int]] | None:
        """Gather every rank's `digests`, at most :data:`REPEATS`; returns None if a rank has left the check.

        A rank that leaves the check passes None.
        """
        row = torch.zeros(1 + REPEATS, dtype=torch.int64, device="cpu")
        if digests is not None:
            row[0] = 1
            row[1 : 1 + len(digests)] = torch.tensor(digests, device="cpu")
        rows: list[list[int]] = self._channel.gathered_rows(row, "comparison of a slice").tolist()
        self._is_awaited = False
        return [row[1:] for row in rows] if all(row[0] for row in rows) else None

    def _compare(
        self, sent: bytes, buffers: SavedBuffers, actual: tuple[int, int], expected: tuple[int, int]
    ) -> Iterator[Any]:
        """Compare the digests of the owner (`actual`) and the checker (`expected`), each given as its rank and digest.

        The digest is 0 on all other ranks.
        """
        rows = self._gather([actual[1], expected[1]])
        if rows is None:
            return
        earlier = [(actual[0], rows[actual[0]][0]), (expected[0], rows[expected[0]][1])]
        if earlier[0][1] == earlier[1][1]:
            return
        self._slices.drop()  # the optimizer step is skipped
        buffers.restore()
        digests = yield from self._repeat(sent, buffers, REPEATS)
        if (rows := self._gather(digests)) is None:
            # A rank has left the check, so there are no further exchanges.
            wrong = tuple(self._channel.members[rank] for rank in sorted({actual[0], expected[0]}))
            raise self._error(
                f"in step {self._ledger.steps_of_job + 1}, {named_ranks(wrong)} computed different gradients for one "
                "slice, but an exception interrupted the repetitions that would show which is wrong; the step was "
                "not taken; see the error of the rank that raised, and start again from the last checkpoint",
                wrong,
            )
        self._conclude(rows, earlier)

    def _conclude(self, rows: Sequence[Sequence[int]], earlier: Iterable[tuple[int, int]] = ()) -> None:
        if (verdict := judge(rows, earlier)) is None:
            return
        fault, ranks = verdict
        step, members = self._ledger.steps_of_job + 1, self._channel.members
        if fault is Fault.MODEL:
            raise UsageError(
                f"in step {step}, computing a slice again gave different gradients on the same rank "
                f"({named_ranks([members[rank] for rank in ranks])}), so neither virtual_ranks nor check_compute_every "
                "can work; call torch.use_deterministic_algorithms(True), which names nondeterministic kernels, and "
                "look for a forward that draws from a private generator, or uses a clock or values from an earlier "
                "forward"
            )
        devices = self._channel.all_gather_object(_device_of(self._reducer.trained.parameters[0].device))
        changed: list[str] = []
        if len(set(map(tuple, rows))) > 1:  # otherwise all ranks agree by now, and so do their weights
            held = self._channel.all_gather_object(_bits_of(self._reducer.watch.module))
            changed = [name for name in held[0] if len({bits.get(name) for bits in held}) > 1]
        wrong = tuple(members[rank] for rank in ranks)
        who = " and ".join(f"{named_ranks([members[rank]])} ({devices[rank]})" for rank in ranks)
        # If every rank may be wrong, either their weights are equal, or it is unknown which weights are right.
        are_alike = len(wrong) == len(members) and not changed
        raise self._error(f"in step {step}, {who} {describe(fault, changed)}", wrong, are_alike=are_alike)

    def _error(self, message: str, wrong: tuple[int, ...], *, are_alike: bool = False) -> WrongComputation:
        """Return the error to raise on this rank; `are_alike` if all ranks may be `wrong` but have the same weights."""
        error, is_wrong = WrongComputation(message, wrong), self._channel.members[self._channel.rank] in wrong
        error.may_save = are_alike or not is_wrong
        return error if is_wrong else error.because_of(wrong)


def describe(fault: Fault, changed: Sequence[str]) -> str:
    """Return the end of a sentence that starts with the wrong ranks; `changed` tensors differ between ranks."""
    remedy = "the step was not taken; start again from the last checkpoint"
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return (
            f"computed different gradients for a slice, and ranks hold different bits in {changed[0]!r}{more}; "
            f"{remedy}, and look for a forward, a hook or a backward outside the wrapper that changes weights "
            "based on one rank's samples, or for faulty memory"
        )
    if fault is Fault.UNDECIDED:
        return (
            "computed different gradients for one slice from the same weights, and no majority shows which are right; "
            f"{remedy}, with a third rank to decide, or with devices of one kind"
        )
    return (
        f"computed different gradients for a slice than most of its {REPEATS} repetitions on each rank, from the same "
        f"weights, so the device erred; {remedy}, without that device if it errs again, or with devices of one kind"
    )


def _bits_of(module: nn.Module) -> dict[str, int]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: int(quick_digest(local_of(tensor))) for name, tensor in named}


def _device_of(device: torch.device) -> str:
    """Describe a device: its name, the properties that its bits depend on, and its host."""
    is_gpu = device.type == "cuda"
    kind = torch.cuda.get_device_name(device) if is_gpu else counted(torch.get_num_threads(), "thread")
    return f"{device}, {kind}, host {socket.gethostname()}"


# -- sending a slice ----------------------------------------------------------------------------------------------


def _send(channel: Channel, source: int, slice_and_seed: tuple[Any, int] | None) -> bytes | None:
    """Send a slice and its seed from rank `source` to all ranks; called by all, with None if the rank has no slice."""
    content, size = b"", 0
    if channel.rank == source and slice_and_seed is not None:
        try:
            content = _pickled(slice_and_seed)
            size = len(content)
        except Exception:  # raised by pickle, or by classes in the batch
            size = _REFUSED
    if (size := int(channel.gathered_rows(torch.tensor(size, device="cpu"), "sending of a slice")[source])) == _REFUSED:
        raise UsageError(
            f"check_compute_every sends slices to other ranks, but a batch of rank {source} cannot be pickled; return "
            "tensors and plain values from the dataset and collate_fn"
        )
    if not size:
        return None
    flat = torch.zeros(size, dtype=torch.uint8, device="cpu")
    if content:
        flat.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    channel.meet(channel.host.all_reduce(flat), "sending of a slice")
    return flat.numpy().tobytes()


def _unpacked(content: bytes) -> Any:
    """Seed the random generators, and return a new copy of the slice, which the loop may modify."""
    batch, seed = pickle.loads(content)
    seed_all(seed)
    return batch


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        # A view would be pickled with its entire storage, possibly the whole dataset.
        if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
            return value.clone().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()
