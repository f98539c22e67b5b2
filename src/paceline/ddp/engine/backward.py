"""One synchronized backward under way: what this rank launched, what it lacked, and what came back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from paceline.buckets import Bucket
from paceline.ddp.agreement.control_block import ControlBlock, Status
from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.engine.bucket_set import BucketSet
from paceline.ddp.engine.shared_parameters import Share, Sharing
from paceline.ddp.engine.sparse import elements_of
from paceline.ddp.transport.channel import Channel, Launched
from paceline.ddp.transport.finisher import Finisher
from paceline.errors import UsageError
from paceline.tracing import Recorder


@dataclass(frozen=True)
class Gear:
    """What every backward of a wrapper works with."""

    names: list[str]
    parameters: list[nn.Parameter]
    storage: BucketSet
    channel: Channel
    ledger: Ledger
    control: ControlBlock
    recorder: Recorder
    check_finite: bool
    finisher: Finisher
    sharing: Sharing


@dataclass
class Backward:
    """From the first gradient to the scaled sums. Buckets are launched in order, each once."""

    gear: Gear
    clear: bool
    """Whether no parameter had a gradient when it began."""
    share: Share = field(default_factory=Share)
    """The parameters that other wrappers have, too."""
    at_end: bool = False
    """Whether buckets are launched when backward has ended rather than as they fill."""
    absent: list[int] = field(default_factory=list)
    """Parameters for which this rank had no gradient."""
    held: dict[int, Tensor] = field(default_factory=dict)
    """Gradients that were there before, and were launched; they come back if an exception ends backward."""
    exposed_seconds: float = 0.0
    """Time waited for communication."""
    _launched: list[Launched] = field(default_factory=list)
    _non_finite: list[int] = field(default_factory=list)
    _left_out: list[int] = field(default_factory=list)
    """Parameters in buckets whose gradient was found to be sparse, so that zeros were launched."""

    @property
    def next(self) -> int:
        """The bucket to be launched next; their number when all are."""
        return len(self._launched)

    @torch.no_grad()
    def launch(self, bucket: Bucket) -> None:
        """Move the gradients in, free the parameters' own, and hand the bucket to communication."""
        gear = self.gear
        with gear.recorder.span("launch"):
            gear.storage.claim(self.next, self.share.elsewhere.keys())
            parameters = [gear.parameters[index] for index in bucket.indices]
            gradients = [parameter.grad for parameter in parameters]
            dense = [one for one in gradients if one is not None and one.layout is torch.strided]
            if self.clear and not self.share.elsewhere and len(dense) == len(gradients):
                torch._foreach_copy_(bucket.views, dense)
                for parameter in parameters:
                    parameter.grad = None
            else:
                self._move_in_one_by_one(bucket)
            if gear.check_finite and not torch.isfinite(bucket.flat.sum()):
                pairs = zip(bucket.indices, bucket.views, strict=True)
                self._non_finite += [index for index, view in pairs if not torch.isfinite(view).all()]
            last = self.next == len(gear.storage) - 1
            self._launched.append(gear.finisher.launch(bucket, self.next, last=last))

    def _move_in_one_by_one(self, bucket: Bucket) -> None:
        """Where gradients are absent, sparse, or were there before."""
        sources, targets = [], []
        for index, view in zip(bucket.indices, bucket.views, strict=True):
            if index in self.share.elsewhere:
                view.zero_()
                continue
            gradient = self.gear.parameters[index].grad
            if gradient is None:
                self.absent.append(index)
                view.zero_()
                continue
            if gradient.is_sparse:
                self._left_out.append(index)
                view.zero_()
                continue
            if gradient is not view:
                self._expect_dense(index, gradient)
                sources.append(gradient)
                targets.append(view)
                if not self.clear:
                    self.held[index] = gradient
            self.gear.parameters[index].grad = None
        if sources:
            torch._foreach_copy_(targets, sources)

    def _expect_dense(self, index: int, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"rank {self.gear.channel.rank}: parameter {self.gear.names[index]!r} has a {gradient.layout} "
                "gradient, which buckets cannot hold; use a layer with dense gradients"
            )

    def launch_rest(self, *, aborted: bool, order: Sequence[int] = ()) -> dict[int, Tensor]:
        """Launch what is left, then the control block; returns this rank's gradients that are in no bucket.

        `order` is the order of arrival that the control block is to tell, where it still does.

        These are, by parameter, late deltas and sparse gradients.
        """
        gear = self.gear
        for bucket in gear.storage.buckets[self.next :]:
            self.launch(bucket)
        gradients = enumerate(parameter.grad for parameter in gear.parameters)
        elsewhere = self.share.elsewhere
        apart = {index: gradient for index, gradient in gradients if gradient is not None and index not in elsewhere}
        if gear.sharing:
            self._take_common(apart)
        # A sparse gradient that comes after a dense one was launched is a late delta as any other.
        alone = {*self.absent, *self._left_out, *gear.storage.outside}
        sparse = [index for index, gradient in apart.items() if gradient.is_sparse and index in alone]
        late = [index for index in apart if index not in sparse] if len(sparse) < len(apart) else []
        if gear.check_finite:
            finite = {index: bool(torch.isfinite(elements_of(gradient)).all()) for index, gradient in apart.items()}
            self._non_finite += [index for index in apart if not finite[index]]
        # What comes late is present, too: its parameter must not end as None.
        outside = [index for index in gear.storage.outside if index not in elsewhere]
        self.absent = [index for index in (*self.absent, *outside) if index not in apart]
        self.absent += [index for index in elsewhere if gear.sharing.lacks(index, self.share)]
        status = gear.ledger.report(gear.control.size, aborted=aborted, hook_failed=gear.finisher.failed)
        block = gear.control.fill(self.absent, self._non_finite, late, status, sparse, order)
        self._launched.append(gear.channel.all_reduce(block))
        return apart

    def _take_common(self, apart: dict[int, Tensor]) -> None:
        """Leave no gradient of `apart` where another wrapper could take it for its own."""
        for index in self.gear.sharing.common & apart.keys():
            self.gear.parameters[index].grad = None

    def wait(self) -> list[Status]:
        """Wait for everything launched, and scale the sums; returns what every rank reported.

        Raises:
            CommunicationError: if a rank ended or did not come.
            HookError: if a communication hook failed here.
            DesyncError: if one failed on another rank.
        """
        gear = self.gear
        with gear.recorder.span("wait"):
            start = time.perf_counter()
            *buckets, block = self._launched
            gear.finisher.wait(buckets, block, gear.channel, gear.control)
            self.exposed_seconds = time.perf_counter() - start
        statuses = gear.control.statuses()
        notes = [status.note for status in statuses]
        for bucket in gear.storage.buckets:
            gear.finisher.scale(bucket.flat, notes)
        return statuses
