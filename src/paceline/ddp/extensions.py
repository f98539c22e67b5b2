"""Extensions for single steps: checks for NaN, graph capture, late and sparse gradients, unused parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.core.device_streams import is_capturing, is_queued
from paceline.core.missing_ranks import named_ranks
from paceline.core.stacks import warn
from paceline.core.torch_internals import norm_each, stored_elements
from paceline.ddp.backward import Backward
from paceline.ddp.buckets import Bucket, BucketSet
from paceline.ddp.channel import Channel, Pausing
from paceline.ddp.extension_points import Exchanged, Extension
from paceline.ddp.module_changes import Trained
from paceline.ddp.options import UnusedParameters as UnusedParameterMode
from paceline.ddp.sparse import as_dense, average_sparse
from paceline.errors import UnusedParameterWarning, UsageError


class FiniteCheck(Extension):
    """Looks for NaN and Inf in this rank's gradients, reading them from the buckets.

    Args:
        is_wanted: returns whether the check is on.
    """

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        self._is_wanted = is_wanted
        self._checked = Magnitudes()

    def is_active(self) -> bool:
        return self._is_wanted()

    def begin(self, backward: Backward) -> None:
        """Forget magnitudes left over from an earlier backward pass that an exception may have interrupted."""
        self._checked = Magnitudes()

    def bucket_ready(self, backward: Backward, bucket: Bucket) -> None:
        """Check the gradients in `bucket`, which are local until the bucket is launched."""
        self._checked.add_bucket(bucket)

    def has_report(self, backward: Backward) -> bool:
        """Record the parameters with non-finite gradients, including gradients outside the buckets."""
        self._checked.add(backward.out_of_bucket.keys(), list(map(stored_elements, backward.out_of_bucket.values())))
        backward.non_finite = self._checked.found()
        return bool(backward.non_finite)


class Magnitudes:
    """The largest magnitudes of one step's gradients; gradients may be changed or dropped after they were added.

    The host waits for the device only once, in :meth:`found`.
    """

    def __init__(self) -> None:
        # For each device, the parameters added and the largest magnitude in each gradient.
        self._largest: dict[torch.device, tuple[list[int], list[Tensor]]] = {}

    def add_bucket(self, bucket: Bucket) -> None:
        # On a CPU, reading a value is free, and a finite sum shows that all gradients are finite. On a GPU, reading
        # would make the host wait, so magnitudes are computed for all gradients and read once at the end.
        if is_queued(bucket.flat.device) or not torch.isfinite(bucket.flat.sum()):
            self.add(bucket.indices, bucket.views)

    def add(self, indices: Collection[int], gradients: Collection[Tensor]) -> None:
        """Add the `gradients` of the parameters `indices`; for a sparse gradient, pass its stored values."""
        pairs = [(index, gradient) for index, gradient in zip(indices, gradients, strict=True) if gradient.numel()]
        if not pairs:
            return
        for (index, gradient), largest in zip(pairs, norm_each([gradient for _, gradient in pairs]), strict=True):
            places, norms = self._largest.setdefault(gradient.device, ([], []))
            places.append(index)
            norms.append(largest)

    def found(self) -> list[int]:
        """Return the parameters whose gradient is not finite; waits for each device that holds magnitudes."""
        return [
            index
            for places, norms in self._largest.values()
            for index, is_finite in zip(places, torch.stack(norms).isfinite().tolist(), strict=True)
            if not is_finite
        ]


CHECK_FINITE = "check_finite=True, because the host reads the result"


class GraphCapture(Extension):
    """Refuses to capture a backward pass that needs the host, because a graph replays only device operations.

    Args:
        device: the device of the gradients.
        rank: this rank.
        unfit: functions that return whether a feature is in use, keyed by the feature's name in the error.
    """

    def __init__(self, device: torch.device, rank: int, unfit: Mapping[str, Callable[[], bool]]) -> None:
        self._device, self._rank, self._unfit = device, rank, unfit

    def is_active(self) -> bool:
        """Return whether a CUDA graph can be captured on the device."""
        return self._device.type == "cuda"

    def check_change(self) -> None:
        if is_capturing(self._device):
            raise cannot_capture("the first step after parameters were added or unfrozen", self._rank)

    def begin(self, backward: Backward) -> None:
        """Refuse to capture the backward pass if a feature is in use that a graph cannot replay."""
        if is_capturing(self._device):
            for name, is_used in self._unfit.items():
                if is_used():
                    raise cannot_capture(name, self._rank)


def cannot_capture(name: str, rank: int) -> UsageError:
    """Return the error for a feature that a CUDA graph cannot capture."""
    return UsageError(
        f"rank {rank}: a CUDA graph cannot capture {name}; leave it out, or train this step without a graph; see "
        "docs/gpu.md"
    )


class OutOfBucket(Extension):
    """Averages gradients that are sparse or arrived too late for a bucket, after the buckets are averaged.

    The control block lists the affected parameters.
    """

    def __init__(self, trained: Trained, buckets: BucketSet, channel: Channel) -> None:
        self._trained, self._buckets, self._channel = trained, buckets, channel

    def after_averages(self, backward: Backward, exchanged: Exchanged) -> Pausing[None]:
        """Average late deltas and sparse gradients; a late delta is added to the average in its bucket."""
        sparse, late = exchanged.control.second_pass()
        # All ranks read the same lists from the summed block; a rank without such a gradient contributes zeros.
        trained, local, scale = self._trained, backward.out_of_bucket, exchanged.scale
        targets = {index: self._target(index) for index in late}
        if late:
            dense = {index: as_dense(local[index]) for index in late if index in local}
            yield from _add_late(dense, targets, scale, self._channel)
        averages = {index: target for index, target in targets.items() if index in self._buckets.unbucketed}
        if sparse:
            pending = average_sparse(sparse, local, trained.parameters, trained.names, scale, self._channel)
            averages |= yield from pending
        backward.out_of_bucket_averages = averages

    def _target(self, index: int) -> Tensor:
        """Return the tensor that holds the sum of late deltas."""
        if index in self._buckets.unbucketed:
            return torch.zeros_like(self._trained.parameters[index].detach())
        return self._buckets.views[index]


def _add_late(
    local: Mapping[int, Tensor], targets: Mapping[int, Tensor], scale: float, channel: Channel
) -> Pausing[None]:
    """Sum the ranks' deltas (`local` holds this rank's), scale them, and add them to the averages in `targets`."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, target in targets.items():
        kinds.setdefault((target.dtype, target.device), []).append(index)
    launched = []
    for same in kinds.values():
        parts = [local[index] if index in local else torch.zeros_like(targets[index]) for index in same]
        # Sum half precision in single precision: the sum over N ranks may overflow even if the mean does not.
        dtype = torch.promote_types(targets[same[0]].dtype, torch.float32)
        flat = torch.cat([part.detach().reshape(-1).to(dtype) for part in parts])
        launched.append((same, flat, channel.all_reduce(flat)))
    yield True
    for same, flat, work in launched:
        channel.meet(work, "all-reduce of late gradients")
        sums = flat.split([targets[index].numel() for index in same])
        for index, total in zip(same, sums, strict=True):
            targets[index].add_(total.view(targets[index].shape), alpha=scale)


class UnusedParameters(Extension):
    """Reports each unused parameter once in a warning on rank 0, or every time in an error on every rank.

    For each parameter, the control block contains the number of ranks that have a gradient. The ranks that lack it are
    determined only the first time that the parameter is missing. A rank without any gradients had no data and does not
    count. Frozen parameters do not count either.
    """

    def __init__(self, mode: UnusedParameterMode, trained: Trained, channel: Channel) -> None:
        self._mode, self._trained, self._channel = mode, trained, channel
        self.parameters_changed()

    def parameters_changed(self) -> None:
        everything = range(len(self._trained.names))
        # Once a parameter has been reported, a step without its gradient needs no control blocks.
        self._expected = set(everything if self._mode == "allow" else ())

    def reports_absent(self, absent: Sequence[int]) -> bool:
        """Return whether a parameter that has not been reported yet is `absent`."""
        return not self._expected.issuperset(absent)

    def after_averages(self, backward: Backward, exchanged: Exchanged) -> Pausing[None]:
        """Find out which ranks lack gradients for parameters that are missing somewhere and not yet reported."""
        missing = exchanged.control.missing_somewhere(exchanged.statuses)
        unexpected = [index for index in missing if index not in self._expected]
        if not unexpected or self._mode == "allow":
            return
        if self._mode == "warn":  # errors are raised every time
            self._expected.update(unexpected)
        names, parameters = self._trained.names, self._trained.parameters
        is_idle = len(backward.absent) == len(names)  # this rank has no data, so all parameters are absent
        lacking = set() if is_idle else set(backward.absent)
        lacks = [int(index in lacking and parameters[index].requires_grad) for index in unexpected]
        without = yield from self._channel.gather_numbers(lacks, "exchange of unused parameters")
        message = unused_message([names[index] for index in unexpected], list(zip(*without, strict=True)))
        if message is not None:
            backward.defer(partial(self._report, message))

    def _report(self, message: str) -> None:
        if self._mode == "error":
            raise UsageError(f"{message}; use every parameter in every step, or pass unused_parameters='allow'")
        if self._channel.rank == 0:
            message += "; missing gradients count as zero; pass unused_parameters='allow' if that is intended"
            warn(message, UnusedParameterWarning)


def unused_message(names: Sequence[str], without: Sequence[Sequence[int]]) -> str | None:
    """Return a sentence that lists the unused parameters and the ranks without a gradient; None if there are none.

    ``without[i][rank]`` is 1 if that rank had no gradient for parameter i.
    """
    groups: dict[str, list[str]] = {}
    for name, marks in zip(names, without, strict=True):
        if ranks := [rank for rank, mark in enumerate(marks) if mark]:
            where = "every rank" if len(ranks) == len(marks) else named_ranks(ranks)
            groups.setdefault(where, []).append(name)
    if not groups:
        return None
    parts = [f"{', '.join(map(repr, group))} on {where}" for where, group in groups.items()]
    count = sum(map(len, groups.values()))
    return f"{count} parameter{'s' * (count > 1)} had no gradient in a synchronized backward: {'; '.join(parts)}"
