"""Forward passes that await their backward pass, and the state of one synchronized backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from paceline.core.stacks import warn
from paceline.core.torch_internals import (
    GraphTask,
    backward_call,
    class_never_compiled,
    current_task,
    never_compiled,
    queue_callback,
)
from paceline.ddp.channel import Launched, Pausing
from paceline.ddp.control_block import Status
from paceline.ddp.ledger import Ledger
from paceline.ddp.weights import Block
from paceline.errors import PacelineError


class Forward:
    """One forward pass. It lives as long as its autograd graph, because only the graph's hooks reference it."""

    block: Block | None = None
    """The ``model.weight()`` block around the forward pass."""
    counts_if_averaged = False
    """Whether the forward pass was counted, but must not count if its backward pass stays local (``no_sync``)."""
    is_empty = False
    """Whether it ran on the empty batch of a rank without samples."""


@class_never_compiled
class PendingForwards:
    """The forward passes that await their backward pass.

    Args:
        ledger: counts the steps.
        parameters: returns the averaged parameters.
        reached: called as ``reached(forward, gradient)`` when a backward pass reaches an output.
    """

    is_unseen: bool
    """Whether a forward pass without an output to hook is waiting, such as one that stored its loss in the module."""
    may_be_empty = False
    """Whether a forward pass on an empty batch may be waiting."""
    ignored: weakref.ref[GraphTask] | None = None
    """The latest backward pass whose gradients are ignored; the reference restores ``p.grad`` after an exception."""

    def __init__(
        self, ledger: Ledger, parameters: Callable[[], Sequence[Tensor]], reached: Callable[[Forward, Tensor], None]
    ) -> None:
        self.is_unseen = False
        self._ledger, self._parameters = ledger, parameters
        self.differentiated_in = -1
        """Number of optimizer steps when derivatives were last taken."""
        self.reached = reached
        """The function that hooks of outputs call."""
        self._has_warned = False
        # Weak, so that the forward pass of a dropped loss does not wait forever.
        self.waiting: set[weakref.ref[Forward]] = set()
        """The forward passes whose backward pass has not begun."""
        # Forwards inside weight blocks that have no hooked output; without this list they would be garbage collected.
        self._unseen: list[Forward] = []

    def __bool__(self) -> bool:
        """Return whether a forward pass with hooked outputs, or derivatives of one, may still get a backward pass."""
        return bool(self.waiting) or self.are_differentiated

    def hook(self, outputs: Sequence[Tensor], *, counts_if_averaged: bool) -> None:
        """Hook the outputs of a forward pass, because the backward pass reaches them before any parameter."""
        forward, reached, blocks = Forward(), None, self._ledger.blocks
        if (blocks.open or blocks.unused) and (block := blocks.forward_ended()) is not None:
            forward.block = block
            self._ledger.kept.look(self._parameters())
        if counts_if_averaged:
            forward.counts_if_averaged = True
        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(reached := reached or partial(self.reached, forward))
        if self._ledger.is_on_empty_slice:
            self.may_be_empty = forward.is_empty = True
        if reached is not None:
            self.waiting.add(weakref.ref(forward, self.waiting.discard))
        else:
            self.is_unseen = True
            if forward.block is not None:
                self._unseen = [item for item in self._unseen if item.block is not None and not item.block.is_claimed]
                self._unseen.append(forward)

    def may_have_ended_in(self, *, is_common: bool) -> bool:
        """Return whether a gradient may come from a backward pass that reached no hooked output.

        If the parameter `is_common` to several wrappers, the gradient may also come from another wrapper's backward
        pass.
        """
        return self.is_unseen or (bool(self) and (not is_common or self.are_differentiated))

    @property
    def are_differentiated(self) -> bool:
        """Whether derivatives were taken with ``create_graph`` since the last step, for example for a gradient penalty.

        A backward pass through these derivatives need not reach an output, and their graph may outlive the outputs'
        graph. But it cannot outlive an optimizer step, which changes the parameters saved in it.
        """
        return self.differentiated_in == self._ledger.status.optimizer_steps

    def backward_began(self, forward: Forward | None) -> None:
        """Stop waiting for the backward pass of `forward`, which has begun and creates no graph."""
        if forward is not None:
            self.waiting.discard(weakref.ref(forward))

    def are_empty(self) -> bool:
        """Return whether all waiting forward passes ran on empty batches, so that their gradients do not count."""
        kinds = {forward.is_empty for forward in self._forwards()}
        self.may_be_empty = True in kinds
        return kinds == {True}

    def ignore_gradients(self, parameters: Sequence[Tensor], elsewhere: Collection[int] = ()) -> None:
        """Restore each ``p.grad``, except of parameters `elsewhere`, when the running backward pass has ended."""
        kept = [(parameter, parameter.grad) for index, parameter in enumerate(parameters) if index not in elsewhere]
        for parameter, _ in kept:
            parameter.grad = None

        def ended(_: object) -> None:
            while kept:
                parameter, gradient = kept.pop()
                parameter.grad = gradient

        task = GraphTask()
        self.ignored, self._ledger.task = weakref.ref(task, ended), task.number
        queue_callback(partial(ended, task))

    def are_ignored(self) -> bool:
        """Whether gradients of the running backward pass are ignored."""
        task = None if self.ignored is None else self.ignored()
        return task is not None and task.number == current_task()

    def waiting_in(self, block: Block | None) -> int:
        return sum(forward.block is block for forward in self._forwards())

    def _forwards(self) -> list[Forward]:
        return [forward for reference in list(self.waiting) if (forward := reference()) is not None]

    def differentiated(self) -> None:
        self.differentiated_in = self._ledger.status.optimizer_steps

    def warn_of_graph(self) -> None:
        """Warn once about a synchronized ``backward(create_graph=True)``: averages have no graph, as in torch's DDP."""
        call = None if self._has_warned else backward_call()
        if call is None:
            return
        self._has_warned = True
        message = (
            "after backward(create_graph=True) p.grad is the average over the ranks, which has no graph and cannot be "
            "differentiated; take the derivatives first with torch.autograd.grad(loss, parameters, create_graph=True), "
            "and call backward() on the loss computed from them"
        )
        warn(message, call=call)

    def close(self) -> None:
        """Drop the references to the reducer's functions."""
        self.reached, self._parameters = (lambda _forward, _gradient: None), (lambda: ())


@never_compiled
def tensors_in(output: Any) -> list[Tensor]:
    """Return all tensors in a forward's output; searches nested containers, dataclasses and plain objects."""
    tensors: list[Tensor] = []
    # `visited` is needed because an object may contain itself.
    stack, visited = [output], set()
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple | set | frozenset):
            stack.extend(value)
        elif isinstance(value, dict):
            stack.extend(value.values())
        elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module) and id(value) not in visited:
            visited.add(id(value))
            stack.extend(vars(value).values())
    return tensors


class Phase(Enum):
    """Phase of a backward pass; :data:`NEXT` lists the phases that may follow each one."""

    LAUNCHING = "gradients arrive, complete buckets are launched"
    WAITING = "everything is launched, results are awaited"
    UNREAD = "averages are published, the other ranks' reports are not read yet"
    ABORTED = "an exception ended backward; collectives that the other ranks wait for are still owed"
    BROKEN = "a collective or a communication hook failed"
    OVER = "averages are published, and ranks agree"


NEXT = {
    Phase.LAUNCHING: {Phase.WAITING, Phase.ABORTED, Phase.BROKEN},
    Phase.WAITING: {Phase.OVER, Phase.UNREAD, Phase.ABORTED, Phase.BROKEN},
    Phase.UNREAD: {Phase.WAITING, Phase.OVER, Phase.BROKEN},
    Phase.ABORTED: {Phase.LAUNCHING, Phase.WAITING},  # when the owed collectives run
    Phase.BROKEN: set[Phase](),
    Phase.OVER: set[Phase](),
}
_NONE: Mapping[int, Any] = MappingProxyType({})


class Backward:
    """One synchronized backward pass of one wrapper on this rank, from the first gradient to the averages.

    Attributes that matter only in rare cases have their default value on the class, so that a step creates few objects.
    """

    phase = Phase.LAUNCHING
    """The current phase. :meth:`enter` changes it; the frozen step and ``read_late`` set it, to save a call."""
    grads_were_none = True
    """Whether every ``p.grad`` was None at the beginning, so that this backward pass produced all gradients."""
    owns_all_grads = True
    """Whether, in addition, no other wrapper averages any of these gradients in this backward pass."""
    is_traced = False
    """Whether a span is recorded for each bucket."""
    buckets_unreferenced = False
    """Whether no user held a reference to the buckets' memory when backward began. This stays true until averages are
    published, because until then no ``p.grad`` is a bucket view."""
    is_shared = False
    """Whether other wrappers also have some of the parameters."""
    is_shadowed = False
    """Whether ranks that ran out of data inside ``join`` take part."""
    sends_block = False
    """Whether all ranks launch control blocks at the end of the backward pass, regardless of the digests."""
    launches_at_end = False
    """Whether buckets are launched when backward has ended rather than as they fill."""
    averaged_elsewhere: Collection[int] = frozenset()
    """Parameters whose gradients another wrapper averages in this backward pass; our buckets hold zeros for them."""
    launched: list[Launched]
    """The collectives of the buckets, in the order of launch."""
    absent: Sequence[int] = ()
    """Parameters without a gradient on this rank."""
    saved_gradients: Mapping[int, Tensor] = _NONE
    """Gradients from before backward, by parameter, that have been copied into launched buckets. They are restored to
    ``p.grad`` if an exception ends backward."""
    sparse_in_buckets: Sequence[int] = ()
    """Parameters with a place in a bucket but a sparse gradient; zeros were launched for them."""
    out_of_bucket: Mapping[int, Tensor] = _NONE
    """This rank's gradients outside buckets, by parameter: late deltas and sparse gradients."""
    late: Sequence[int] = ()
    """Parameters with a late delta: a gradient that arrived after its bucket was launched."""
    sparse: Sequence[int] = ()
    """Parameters with a sparse gradient."""
    non_finite: Sequence[int] = ()
    """Parameters whose gradient on this rank contains NaN or Inf, if the check is on."""
    content = 0
    """What this rank has posted on the board."""
    position: tuple[int, ...] | None = None
    """The numbers whose digest this rank has reported; None if it has more to report."""
    status: Status | None = None
    """This rank's status when it posted its report, if the position does not tell it."""
    is_early = False
    """Whether averages were published before the ranks' reports were compared."""
    block: Launched | None = None
    """The control block, from its launch until it has been waited for."""
    digests_agree: bool | None = None
    """Whether the ranks' digests in the last bucket agreed; None before they were read, and if there are none."""
    exchange: Pausing[None] | None = None
    """The exchange of control blocks at the end of backward; None in an ordinary step."""
    new_order: Sequence[int] = ()
    """The order of arrival that rank 0 has reported, if it was not known; the next step's buckets follow it."""
    is_abandoned = False
    """Whether some rank reported changed parameters, so that this backward pass averages nothing."""
    out_of_bucket_averages: Mapping[int, Tensor] = _NONE
    """Averages of all ranks' :attr:`out_of_bucket` gradients that are not bucket views, by parameter."""
    deferred: Sequence[Callable[[], None]] = ()
    """Functions to call in order once averages are published, which may raise an error on all ranks; not called if an
    exception has ended backward."""
    is_cut_short = False
    """Whether an exception ended backward before everything was launched; the control block reports it."""
    is_resyncing = False
    """Whether this backward pass is being completed after an exception, which the user has already seen."""
    task: weakref.ref[Any] | None = None
    """Weak reference to a callback that lives exactly as long as autograd's graph task. None without a task
    (``sync_gradients()``) and after backward has ended."""
    task_number = -1
    """Number of the graph task."""

    def __init__(self, *, sends_block: bool = False, launches_at_end: bool = False) -> None:
        self.sends_block, self.launches_at_end, self.launched = sends_block, launches_at_end, []

    def enter(self, phase: Phase) -> None:
        if phase not in NEXT[self.phase]:
            raise AssertionError(f"a backward pass cannot go from {self.phase.name} to {phase.name}")
        self.phase = phase

    @property
    def is_under_way(self) -> bool:
        """Whether this backward pass has neither ended nor failed."""
        return self.phase in (Phase.LAUNCHING, Phase.WAITING)

    def defer(self, function: Callable[[], None]) -> None:
        """Call `function` once averages are published, after the functions deferred before it."""
        # A new list, because all backward passes share the class's default.
        self.deferred = [*self.deferred, function]

    def defer_error(self, error: PacelineError) -> None:
        self.defer(partial(_raise, error))

    def end_arrival_span(self) -> None:
        """End the span that covers the gradients' arrival; replaced on the instance if a span was opened."""


def _raise(error: PacelineError) -> None:
    raise error
