"""Virtual ranks: a step sums its gradient over slices in a binary tree that is the same for any number of ranks.

The global batch is split into V slices. Each of the N ranks computes V/N of them, one after another, and adds up their
gradients like a binary counter: sums of 1, 2, 4, … neighboring slices are kept until their neighbor is ready, so a rank
holds about log₂(V/N) gradients at once. With the last slice, the rank's sum is put into the buckets, and the ranks'
sums are added pairwise in the same tree (:func:`paceline.comm.arithmetic.reduce_into`). For every N that divides V,
each floating-point addition has the same two operands, so the result is bit-identical. V must be a power of two,
because only then do the slices of a rank form a subtree for every such N.

EasyScale (Li et al., SC '23) trains with logical workers in a similar way.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from paceline.core.torch_internals import add_each, queue_callback
from paceline.core.unwrapping import Communicates
from paceline.ddp.arrivals import gradient_of
from paceline.ddp.backward import Backward
from paceline.ddp.buckets import Bucket
from paceline.ddp.channel import Pausing
from paceline.ddp.extension_points import Exchanged, Extension
from paceline.ddp.module_changes import ModuleWatch
from paceline.ddp.reducer import Reducer
from paceline.errors import UsageError


class SavedBuffers:
    """A snapshot of the buffers of `module`.

    A forward pass may write to buffers in place or replace them with other tensors; :meth:`restore` undoes both.

    Args:
        module: the module.
        left_out: buffers to leave out of the snapshot, each as the ``id`` of its submodule and its name.
    """

    _places: list[tuple[dict[str, Tensor | None], str, Tensor | None, Tensor | None]]
    """For each buffer: the dict that holds it, its name, the tensor, and a copy of its values."""

    def __init__(self, module: nn.Module, left_out: Collection[tuple[int, str]] = ()) -> None:
        self._places = [
            (part._buffers, name, buffer, None if buffer is None else buffer.detach().clone())
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if (id(part), name) not in left_out
        ]

    def restore(self) -> None:
        """Put the saved values back into the original tensors, and these into the module."""
        for held, name, buffer, value in self._places:
            if buffer is not None and value is not None:
                buffer.data.copy_(value)  # through .data, because autograd may have saved the buffer
            held[name] = buffer


class SliceBuffers:
    """The buffers of one wrapper's module during a step.

    Each slice begins with the values from before the step::

        before ──► slice 0 ──► kept
        before ──► slice 1 ──► dropped          after the step, on every rank: the buffers of slice 0
        before ──► slice 2 ──► dropped

    A module with buffers that a forward pass changes (BatchNorm, spectral norm, a counter) therefore trains as it would
    on as many ranks as there are slices, with one slice per rank, and ends the step with rank 0's buffers. A rank with
    only one slice per step makes no copies, because rank 0's buffers are broadcast anyway.
    """

    def __init__(self, watch: ModuleWatch) -> None:
        self._watch = watch
        self._before: SavedBuffers | None = None
        """The buffers from before the step; None between steps, and on a rank with one slice."""
        self._kept: SavedBuffers | None = None
        """The buffers after this rank's first slice; set when the second slice begins."""

    def begin_slice(self, *, is_first: bool, is_only: bool) -> None:
        """Begin a slice with the buffers from before the step; `is_only` if this rank has no other slice."""
        if is_first:
            self._kept = None
            self._before = None if is_only else SavedBuffers(self._watch.module)
        elif self._before is not None:
            if self._kept is None:
                self._kept = SavedBuffers(self._watch.module)
            self._before.restore()

    def leave_step(self) -> None:
        """Restore the buffers from before a step that is abandoned.

        This cannot wait until the next step, because a checkpoint may be loaded before it.
        """
        if self._before is not None:
            self._before.restore()
        self._before = self._kept = None

    def end_step(self) -> None:
        """Restore the buffers that the first slice produced."""
        if self._kept is not None:
            self._kept.restore()
        self._before = self._kept = None


class VirtualRanks(Extension):
    """Adds up the gradients of this rank's slices.

    Args:
        reducer: averages the wrapper's gradients.
        count: the number of virtual ranks, a multiple of the number of ranks.
    """

    def __init__(self, reducer: Reducer, count: int) -> None:
        self._reducer, self.count = reducer, count
        self._check_module()
        self.slices = count // reducer.channel.size
        """Number of slices that this rank computes in a step."""
        self._buffers = SliceBuffers(reducer.watch)
        self._is_in_step = False
        """Whether a slice has begun, and the step's synchronized backward pass has not ended."""
        self.number = 0
        """Number of the current slice."""
        self._filled: Sequence[int] = ()
        """Numbers of the slices in this step that have samples."""
        self._is_last = False
        """Whether the next backward pass should be the synchronized one."""
        self._counts = (0, 0)
        """The ledger's counts of forward passes before the step."""
        self._sums: list[tuple[int, dict[int, Tensor]]] = []
        """Sums that wait for their neighbor, the smallest last: for each, its number of slices and the gradients by
        parameter."""
        self._left: list[tuple[int, int]] | None = None
        """Id and version of each gradient at the end of the slice's backward pass; None before it ends."""

    def begin_slice(self, number: int, filled: Sequence[int]) -> None:
        """Begin this rank's slice `number` of a step; gradients are synchronized in the last slice.

        Args:
            number: counted from 0.
            filled: the slices of the step that have samples, ascending. If it is empty, the gradients are synchronized
                without a backward pass.
        """
        self._reducer.resync_aborted()
        ledger, trained = self._reducer.ledger, self._reducer.trained
        is_first = number in filled[:1] or not filled
        if is_first:
            self._forget()
            self._reducer.follow_module()
            self._check_no_gradients()
            ledger.forget_dropped(trained.parameters, in_backward=False)
            self.number = 0
            self._reducer.buffers.begin_step()
            self._counts = ledger.forward_counts
        self._is_in_step = True
        self._buffers.begin_slice(is_first=is_first, is_only=self.slices == 1)
        for _ in range(self.number, number):  # the previous slice, and empty ones in between
            self._check_unchanged()
            self._add(self._take())
            ledger.gradients_are_set_aside = True
        self.number, self._filled = number, filled
        self._is_last = number in filled[-1:] or not filled
        self._reducer.set_sync(self._is_last)

    def end_step(self) -> None:
        """Raise if the last slice skipped its backward pass, because the other slices' gradients would be lost."""
        if not self._is_last:  # usual case: the last slice's backward pass has ended the step
            return
        parameters = self._reducer.trained.parameters
        if any(sums for _, sums in self._sums) or any(parameter.grad is not None for parameter in parameters):
            raise UsageError(
                f"rank {self._reducer.channel.rank}: the last slice of a step did not run backward, so the gradients "
                "of the other slices were not synchronized; if you skip its backward, call model.sync_gradients()"
            )

    def leave_step(self) -> bool:
        """Abandon a step in the middle; returns whether there was one.

        Buffers are restored to their values from before the step; gradients stay in ``p.grad``.
        """
        if is_under_way := self._leave_step():
            self._reducer.ledger.take_back_forwards(self._counts)
            if self.slices > 1:
                self._reducer.buffers.restored()
        return is_under_way

    def _leave_step(self) -> bool:
        is_under_way, self._is_in_step = self._is_in_step, False
        if is_under_way:
            self._buffers.leave_step()
        self._forget()
        return is_under_way

    def begin_local(self) -> None:
        """At the end of a slice's backward pass, record the gradients that it produced."""
        queue_callback(self._note_left)

    def _note_left(self) -> None:
        self._left = self._present()

    def _present(self) -> list[tuple[int, int]]:
        gradients = map(gradient_of, self._reducer.trained.parameters)
        return [(0, 0) if gradient is None else (id(gradient), gradient._version) for gradient in gradients]

    def _check_unchanged(self) -> None:
        expected, self._left = self._left, None
        if expected is None or expected == (present := self._present()):
            return
        names = self._reducer.trained.names
        name = next(name for name, old, new in zip(names, expected, present, strict=True) if old != new)
        raise UsageError(
            f"rank {self._reducer.channel.rank}: the gradient of {name!r} was changed after a slice's backward, by "
            f"another backward or by the program; with virtual_ranks={self.count} the result would depend on the "
            "number of ranks; add that loss to the slice's own, or change gradients only when model.do_sync is true"
        )

    def begin(self, backward: Backward) -> None:
        """Refuse a synchronization before the step's last slice, or with parameters that another wrapper shares."""
        rank = self._reducer.channel.rank
        if not self._is_last:
            raise UsageError(
                f"rank {rank}: with virtual_ranks={self.count} gradients are synchronized once per step, by one "
                f"backward in the last of {self.slices} slices on each rank; loop over paceline.accumulate(model, "
                "loader), and add up the losses of a slice before its one backward()"
            )
        if backward.is_shared:
            name = self._reducer.trained.names[min(self._reducer.shared.common(), default=0)]
            raise UsageError(
                f"rank {rank}: virtual_ranks={self.count} cannot sum the gradient of {name!r}, which another wrapper "
                "also has; wrap one module that contains both, or delete the other wrapper"
            )

    def backward_ended(self, backward: Backward) -> None:
        """Restore the buffers of the first slice before they are broadcast."""
        self._is_in_step = False
        self._buffers.end_step()

    def bucket_ready(self, backward: Backward, bucket: Bucket) -> None:
        for _, sums in reversed(self._sums):
            places = [place for place, index in enumerate(bucket.indices) if index in sums]
            earlier = [sums.pop(bucket.indices[place]) for place in places]
            present = {bucket.indices[place] for place in places}
            backward.absent = [index for index in backward.absent if index not in present]
            if len(places) == len(bucket.views):
                add_each(bucket.views, earlier)
                continue
            for place, gradient in zip(places, earlier, strict=True):
                bucket.views[place].add_(gradient)
            for place in set(range(len(bucket.views))) - set(places):
                bucket.views[place].add_(0.0)  # as on a rank without a gradient: turns -0.0 into 0.0
        if len(self._filled) < self.slices:  # empty slices count as zeros, as on a rank with only empty slices
            bucket.flat.add_(0.0)

    def has_report(self, backward: Backward) -> bool:
        """Give each slice with samples a weight of 1, so that the sum becomes a mean; the program's own weights win."""
        self._reducer.ledger.count_slices(len(self._filled))
        self._is_last = False
        return False

    def after_averages(self, backward: Backward, exchanged: Exchanged) -> Pausing[None]:
        """Refuse gradients outside the buckets on all ranks, because they are not summed in the tree."""
        sparse, late = exchanged.control.second_pass()
        names = self._reducer.trained.names
        if late:
            backward.defer_error(
                UsageError(
                    f"parameter {names[min(late)]!r} got its gradient in several parts in one backward (is a layer "
                    f"with reentrant checkpointing used twice?), and virtual_ranks={self.count} cannot sum these in a "
                    "tree; use checkpoint(…, use_reentrant=False)"
                )
            )
        elif sparse:
            backward.defer_error(UsageError(self._not_dense(names[min(sparse)], torch.sparse_coo)))
        yield from ()

    def abort(self, backward: Backward) -> None:
        """Abandon a step after an exception; its forward passes still count, because the other ranks continue."""
        self._leave_step()

    def check_change(self) -> None:
        if self._is_in_step:
            raise UsageError(
                f"rank {self._reducer.channel.rank}: parameters of the module were added or unfrozen in the middle of "
                f"a step with virtual_ranks={self.count}; change the module between steps"
            )

    def parameters_changed(self) -> None:
        """Drop the sums, which belong to the previous parameters."""
        self._forget()
        self._check_module()

    def _forget(self) -> None:
        self._sums.clear()
        self._is_last, self._left = False, None
        self._reducer.ledger.gradients_are_set_aside = False

    def _check_module(self) -> None:
        for name, layer in self._reducer.watch.module.named_modules():
            if isinstance(layer, nn.SyncBatchNorm | Communicates):
                raise UsageError(
                    f"{name!r} is a {type(layer).__name__}, which normalizes over all ranks at once, but with "
                    "virtual_ranks a rank computes its slices one after another; use BatchNorm, or no virtual_ranks"
                )
        buffers = self._reducer.buffers
        if buffers.buffers.places and not buffers.is_wanted:
            raise UsageError(
                "virtual_ranks needs broadcast buffers, because each slice changes its own; leave out "
                "broadcast_buffers=False"
            )
        if (name := self._reducer.watch.untrained()) is not None:
            raise UsageError(
                f"parameter {name!r} is trained but not averaged (_ddp_params_and_buffers_to_ignore), so it differs "
                f"between ranks; with virtual_ranks={self.count}, do not ignore it, or freeze it"
            )
        for name, view in zip(self._reducer.trained.names, self._reducer.buckets.views, strict=True):
            if view.dtype is torch.float16:
                raise UsageError(
                    f"parameter {name!r} is float16, whose gradients are divided by the number of ranks before they "
                    f"are summed; give reduce_dtype=torch.float32 with virtual_ranks={self.count}"
                )

    def _check_no_gradients(self) -> None:
        for name, parameter in zip(self._reducer.trained.names, self._reducer.trained.parameters, strict=True):
            if parameter.grad is not None:
                if bool(parameter.grad.any()):
                    raise UsageError(
                        f"rank {self._reducer.channel.rank}: parameter {name!r} has a gradient when a step begins, and "
                        "every slice would count it again; call optimizer.zero_grad() after each step"
                    )
                parameter.grad = None

    def _take(self) -> dict[int, Tensor]:
        """Remove the slice's gradients from the parameters, and return them in the dtype of their buckets."""
        trained, gradients = self._reducer.trained, {}
        for index, parameter in enumerate(trained.parameters):
            if (gradient := parameter.grad) is None:
                continue
            if gradient.layout is not torch.strided:
                raise UsageError(
                    f"rank {self._reducer.channel.rank}: {self._not_dense(trained.names[index], gradient.layout)}"
                )
            gradients[index] = gradient.to(self._reducer.buckets.views[index].dtype)
            parameter.grad = None
        return gradients

    def _not_dense(self, name: str, layout: torch.layout) -> str:
        return (
            f"parameter {name!r} has a {layout} gradient, which virtual_ranks={self.count} cannot sum in a tree; use a "
            "layer with dense gradients"
        )

    def _add(self, gradients: dict[int, Tensor]) -> None:
        size = 1
        while self._sums and self._sums[-1][0] == size:
            _, earlier = self._sums.pop()
            gradients = _sum(earlier, gradients)
            size *= 2
        self._sums.append((size, gradients))


def _sum(left: dict[int, Tensor], right: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return the sum of two sets of gradients, using the memory of `left`; a missing gradient counts as zero."""
    common = left.keys() & right.keys()
    if common:
        add_each([left[index] for index in common], [right[index] for index in common])
    for part in (left, right):
        for index in part.keys() - common:
            left[index] = part[index].add_(0.0)  # as on a rank without a gradient: turns -0.0 into 0.0
    return left
