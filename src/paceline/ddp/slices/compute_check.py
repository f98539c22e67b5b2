"""The compute check: once in so many steps, a second rank computes a slice, too, and gradients are compared bit by bit.

    send the slice ──► the neighbour computes it ──► compare ──► the last slice, which synchronizes, and the step
                       the owner does so as usual       │
                                    they differ: every rank computes it several times ──► an error on every rank

A wrong gradient that is averaged makes every replica equally wrong, so it must be found before: all of this comes
before a rank's last slice. :func:`paceline.accumulate` gives the loop's body the slice once more, as any other, so no
loss has to be known here. Its gradients, weights and buffers are dropped.

A rank whose only slice is to be checked computes it without synchronization, and, once it is found right, again to
synchronize the gradients of the first time. In the first step every rank repeats the slice, which finds models that do
not repeat their own bits.

Decision 0056 says why.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.output.wording import counted
from paceline.core.processes.missing_ranks import named_ranks
from paceline.core.state.digests import quick_digest
from paceline.core.state.virtual_ranks import Slices
from paceline.core.torch_internals.distributed.dtensor import local_of
from paceline.ddp.consistency.gradient_check import digest_of
from paceline.ddp.reducer.reducer import Reducer
from paceline.ddp.slices.gradients import Begin, VirtualRanks, in_order
from paceline.ddp.slices.saved_buffers import SavedBuffers
from paceline.ddp.slices.sending import Sent, send
from paceline.ddp.slices.statistics import REPEAT
from paceline.ddp.slices.trace import Call, Trace, find_difference, kinds_of
from paceline.ddp.slices.verdict import Fault, Verdict, describe, judge
from paceline.errors import UsageError, WrongComputation

REPEATS = 3
"""Times that every rank repeats a slice to find out who is wrong."""
_WHAT = "comparison of a slice"


class ComputeCheck:
    """Checks one slice every `every` steps; each rank's device comes by turns.

    Args:
        every: steps from one check to the next.
        reducer: averages the wrapper's gradients.
        slices: adds up those of this rank's slices.
        module: returns the wrapped module.
    """

    is_repeat = False
    """Whether the present slice is computed a second time, and counts nowhere."""

    def __init__(self, every: int, reducer: Reducer, slices: VirtualRanks, module: Callable[[], nn.Module]) -> None:
        self._every, self._reducer, self._slices, self._module = every, reducer, slices, module
        self._channel, self._ledger = reducer.channel, reducer.ledger
        self._checked_at = -1
        """Synchronizations before the step of the latest check."""
        self._repeats_itself = False
        """Whether every rank was found to repeat its own bits."""
        self._is_awaited = False
        """Whether the other ranks wait for digests of this one."""

    @property
    def is_due(self) -> bool:
        """Whether a slice of the step that begins now is to be checked; the same on every rank."""
        step = self._ledger.synchronizations
        return self._is_awaited or (step % self._every == 0 and step != self._checked_at)

    def go_through(
        self, begin: Begin, batches: Slices, filled: Sequence[int], is_latest: Callable[[], bool]
    ) -> Iterator[Any]:
        """Yield this rank's slices of a step, with repeats of the one that is checked.

        Args:
            begin: begins a slice.
            batches: this rank's slices.
            filled: the numbers of those that have samples.
            is_latest: returns whether no other loop has begun a slice since this one has.
        """
        self.is_repeat = False
        if self._is_awaited:  # an exception in the loop has made this rank leave a check
            self._gather(None)
        if self._checked_at == self._ledger.synchronizations:
            yield from in_order(begin, batches, filled)
            return
        self._checked_at = self._ledger.synchronizations
        first = filled[0] if filled else 0
        begin(first, filled)  # refuses gradients that the step before has left
        sent = send(self._channel, self._turns()[0], (batches[first], batches.seeds[first]) if filled else None)
        if sent is None:  # the owner has no samples in this step
            yield from in_order(begin, batches, filled)
            return
        buffers = SavedBuffers(self._module())
        try:
            yield from self._check(begin, batches, filled, sent, buffers)
        except BaseException:  # also where the caller leaves the loop
            if is_latest() and self._slices.leave_step():
                buffers.restore()
                self._reducer.buffers.restored()
            raise
        finally:
            if is_latest():
                self.is_repeat = False

    def _check(
        self, begin: Begin, batches: Slices, filled: Sequence[int], sent: Sent, buffers: SavedBuffers
    ) -> Iterator[Any]:
        """Yield this rank's slices, with repeats of the slice that was `sent`; `buffers` are those from before."""
        owner, checker, is_owner = self._turns()
        first, last = (filled[0], filled[-1]) if filled else (0, 0)
        expected = 0
        if not self._repeats_itself:
            expected = yield from self._test(sent, buffers)
            if not self._repeats_itself:  # a rank has left the check
                yield from in_order(begin, batches, filled)
                return
        elif checker == self._channel.rank:
            [expected] = yield from self._repeat(sent, buffers, 1)
        self._is_awaited = True
        own, is_only = 0, is_owner and first == last
        for number in [first] if is_only else filled[:-1]:
            begin(number, filled)
            self._reducer.sync_enabled = False
            # The owner computes a copy, too: views and pinned memory are not sent as such.
            yield sent.unpacked() if is_owner and number == first else batches.seeded(number)
            if is_owner and number == first:
                own = self._digest(self._slices.statistics.parts_of(number))
        yield from self._compare(sent, buffers, (owner, own), (checker, expected))
        if is_only:
            self._ledger.forget_local()  # its weight counts when it is synchronized
            self._slices.begin_again(SavedBuffers(self._module()).restore)
            self._reducer.sync_enabled = self.is_repeat = True
        else:
            begin(last, filled)
        yield batches.seeded(last)

    def _turns(self) -> tuple[int, int, bool]:
        """Return the rank whose slice is checked, the one that computes it, too, and whether the first is this one."""
        owner = self._checked_at // self._every % self._channel.size
        return owner, (owner + 1) % self._channel.size, owner == self._channel.rank

    def _repeat(self, sent: Sent, buffers: SavedBuffers, times: int) -> Generator[Any, None, list[int]]:
        """Yield the slice so many `times`, and return digests of what it left, which is dropped."""
        digests = []
        self._is_awaited = self.is_repeat = True
        for _ in range(times):
            self._slices.statistics.begin_repeat()
            self._reducer.sync_enabled = False
            yield sent.unpacked()
            digests.append(self._digest(self._slices.statistics.parts_of(REPEAT)))
            self._slices.drop()
            self._ledger.forget_local()
            buffers.restore()
        self.is_repeat = False
        return digests

    def _digest(self, statistics: Sequence[Tensor]) -> int:
        """Return 63 bits that depend on every gradient, and on what was added to BatchNorm's statistics."""
        gradients = [parameter.grad for parameter in self._reducer.trained.parameters]
        self._reducer.extensions.inspect_module()
        if (change := self._slices.watch.change) is not None:
            new = change.gradients()
            gradients += [new.get(index) for index in range(len(change.new))]
        return _number([*map(digest_of, gradients), *(int(quick_digest(each)) for each in statistics)])

    def _gather(self, digests: Sequence[int] | None) -> list[list[int]] | None:
        """Gather every rank's `digests`, at most :data:`REPEATS`; returns None if a rank has left the check.

        That rank gives None.
        """
        row = torch.zeros(1 + REPEATS, dtype=torch.int64)
        if digests is not None:
            row[0] = 1
            row[1 : 1 + len(digests)] = torch.tensor(digests)
        table, launched = self._channel.gather_rows(row)
        self._channel.meet(launched, _WHAT)
        self._is_awaited = False
        rows: list[list[int]] = table.tolist()
        return [row[1:] for row in rows] if all(row[0] for row in rows) else None

    # -- comparisons ----------------------------------------------------------------------------------------------

    def _test(self, sent: Sent, buffers: SavedBuffers) -> Generator[Any, None, int]:
        """Have every rank repeat the slice, as the first thing in a training; returns this rank's digest."""
        digests = yield from self._repeat(sent, buffers, REPEATS)
        if (rows := self._gather(digests)) is not None:
            yield from self._conclude(sent, buffers, judge(rows))
            self._repeats_itself = True
        return digests[0]

    def _compare(
        self, sent: Sent, buffers: SavedBuffers, own: tuple[int, int], expected: tuple[int, int]
    ) -> Iterator[Any]:
        """Compare the owner's digest with the checker's, each given with its rank, 0 on other ranks."""
        rows = self._gather([own[1], expected[1]])
        if rows is None:
            return
        earlier = [(own[0], rows[own[0]][0]), (expected[0], rows[expected[0]][1])]
        if earlier[0][1] == earlier[1][1]:
            return
        self._slices.drop()  # the step is not taken
        buffers.restore()
        digests = yield from self._repeat(sent, buffers, REPEATS)
        if (rows := self._gather(digests)) is None:
            # A rank has left the check, so nothing is exchanged any more.
            wrong = tuple(self._channel.members[rank] for rank in sorted({own[0], expected[0]}))
            raise self._error(
                f"in step {self._ledger.steps_of_job + 1}, {named_ranks(wrong)} computed different gradients for one "
                "slice, and an exception on a rank ended the repetitions that would tell which is wrong; the step is "
                "not taken; see that rank's own error, and start again from the last checkpoint",
                wrong,
            )
        yield from self._conclude(sent, buffers, judge(rows, earlier))

    def _error(self, message: str, wrong: tuple[int, ...], *, are_alike: bool = False) -> WrongComputation:
        """Return the error to raise on this rank; `are_alike` if all ranks may be `wrong`, with the same weights."""
        error, is_wrong = WrongComputation(message, wrong), self._channel.members[self._channel.rank] in wrong
        error.may_save = are_alike or not is_wrong
        return error if is_wrong else error.because_of(wrong)

    def _conclude(self, sent: Sent, buffers: SavedBuffers, verdict: Verdict | None) -> Iterator[Any]:
        """Raise the error of a verdict, if there is one, on all ranks."""
        if verdict is None:
            return
        step = self._ledger.steps_of_job + 1
        if verdict.fault is Fault.MODEL:
            place = yield from self._find_place(sent, buffers)
            raise UsageError(
                f"in step {step}, a slice that is computed again gives other gradients on the same rank, so neither "
                f"virtual_ranks nor check_compute_every can hold; {place}"
            )
        devices = self._channel.all_gather_object(_device_of(self._reducer.trained.parameters[0].device))
        changed: list[str] = []
        if verdict.fault in (Fault.LASTING, Fault.UNDECIDED):
            held = self._channel.all_gather_object(_bits_of(self._module()))
            changed = [name for name in held[0] if len({bits.get(name) for bits in held}) > 1]
        members = self._channel.members
        named = {members[rank]: device for rank, device in enumerate(devices)}
        wrong = Verdict(verdict.fault, tuple(members[rank] for rank in verdict.ranks))
        # Where all may be wrong, each has the same weights, or nobody knows whose are right.
        are_alike = len(wrong.ranks) == len(members) and not changed
        raise self._error(describe(wrong, step, named, changed, times=REPEATS), wrong.ranks, are_alike=are_alike)

    def _find_place(self, sent: Sent, buffers: SavedBuffers) -> Generator[Any, None, str]:
        """Repeat the slice twice, operator by operator, and say where the two begin to differ."""
        traces: list[list[Call]] = []
        for _ in range(2):
            with Trace() as trace:
                yield from self._repeat(sent, buffers, 1)
            traces.append(trace.calls)
        place = find_difference(traces[0], traces[1], kinds_of(self._module()))
        if self._gather([]) is not None:
            place = next(filter(None, self._channel.all_gather_object(place)), None)
        return place or "no operator differed when each was looked at, so look for kernels that differ seldom"


def _bits_of(module: nn.Module) -> dict[str, int]:
    """Return digests of parameters and buffers, by name."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: int(quick_digest(local_of(tensor))) for name, tensor in named}


def _device_of(device: torch.device) -> str:
    """Name a device, what its bits depend on, and its host."""
    is_gpu = device.type == "cuda"
    kind = torch.cuda.get_device_name(device) if is_gpu else counted(torch.get_num_threads(), "thread")
    return f"{device}, {kind}, host {socket.gethostname()}"


def _number(numbers: Sequence[int]) -> int:
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "big") >> 1
