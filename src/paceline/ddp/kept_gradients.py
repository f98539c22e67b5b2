"""Gradients that were in ``p.grad`` before a weighted step; the step adds its mean to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from paceline.core.device_streams import is_queued, read_later
from paceline.core.torch_internals import (
    GraphTask,
    has_nonzero,
    has_overlap,
    is_accumulated,
    multiply_each,
    norm_each,
    queue_callback,
    stored_elements,
)
from paceline.errors import UsageError


class Seen(NamedTuple):
    """A gradient as it was at one moment; does not keep it alive."""

    tensor: weakref.ref[Tensor]
    version: int

    @classmethod
    def of(cls, gradient: Tensor) -> Seen:
        return cls(weakref.ref(gradient), gradient._version)

    def is_unchanged(self, gradient: Tensor | None) -> bool:
        """Return whether `gradient` is the same tensor with the same version, which every change in place increases."""
        return gradient is not None and gradient is self.tensor() and gradient._version == self.version


class KeptGradients:
    """Preserves gradients from before a weighted step.

    At the end of the step, ``p.grad`` is divided by the sum of the weights over all ranks. To compensate, a rank of
    weight w multiplies its kept gradients by w. The division then yields their weighted average, which is equal on
    every rank.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget the kept gradients, because the step is over or they were dropped."""
        self.found: dict[int, Seen] | None = None
        """For each parameter id, the gradient that existed at the latest forward; None before the first forward."""
        # None before the first backward. Copies are needed only if more weights may follow, under no_sync().
        self.copies: list[tuple[Tensor, Tensor]] | None = None
        self._weight = 0.0
        self._is_settled = False

    def look(self, parameters: Sequence[Tensor]) -> None:
        """Record the gradients that exist before a backward pass; called after each forward in a block."""
        if self.copies is not None:
            return
        self.found = {}
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and _may_count(gradient):
                self.found[id(parameter)] = Seen.of(gradient)

    def multiply(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        weight: Callable[[], float],
        elsewhere: Collection[int],
        *,
        is_last: bool,
    ) -> None:
        """Multiply the kept gradients by the sum of this rank's weights; called when a backward begins.

        Args:
            names: names of the parameters.
            parameters: the parameters.
            weight: returns the sum of this rank's weights.
            elsewhere: parameters that another wrapper averages in the backward.
            is_last: whether the backward is synchronized, so that no other backward follows.
        """
        if self.copies is None:
            self.copies, kept, changed = [], [], {}
            for index, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
                if parameter.grad is not None and index not in elsewhere:
                    seen = None if self.found is None else self.found.get(id(parameter))
                    is_unchanged = self.found is None or (seen is not None and seen.is_unchanged(parameter.grad))
                    if is_unchanged or not (parameter.requires_grad and is_accumulated(parameter)):
                        kept.append(parameter)
                    elif _may_count(parameter.grad):
                        changed[parameter] = name if seen is not None and seen.tensor() is parameter.grad else ""
            if kept or changed:
                self._weight = weight()
                self._keep(kept, is_last=is_last)
                self._keep_if_more_arrives(changed, is_last=is_last)
        elif self.copies:
            previous, self._weight = self._weight, weight()
            for parameter, gradient in self.copies:
                if parameter.grad is not None:
                    more = gradient * (self._weight - previous)
                    parameter.grad = parameter.grad + more if more.is_sparse else parameter.grad.add_(more)
            self._is_settled = is_last

    @torch.no_grad()
    def _keep(self, parameters: Sequence[Tensor], *, is_last: bool) -> None:
        if parameters:
            assert self.copies is not None
            if not is_last:
                self.copies += [(param, param.grad.clone()) for param in parameters if param.grad is not None]
            self._is_settled = is_last
            multiply(parameters, self._weight)

    def _keep_if_more_arrives(self, names: Mapping[Tensor, str], *, is_last: bool) -> None:
        """Keep gradients that appeared or changed between the forward and the backward pass that is starting.

        If the change was made by this backward pass itself before it reached an output (a head outside the forward), no
        other gradient arrives. Then a new tensor is not kept, and one that existed at the forward is refused; `names`
        has an empty name for a new one.
        """
        if not names:
            return
        handles: dict[Tensor, RemovableHandle] = {}
        running = GraphTask()

        def arrives(parameter: Tensor, _gradient: Tensor) -> None:
            handles.pop(parameter).remove()
            if task() is not None:
                self._keep([parameter], is_last=is_last)

        def ended(_: object) -> None:
            while handles:
                handles.popitem()[1].remove()

        def check(_running: GraphTask) -> None:
            mixed = [name for parameter in handles if (name := names[parameter])]
            ended(None)
            if mixed:
                raise UsageError(
                    f"{mixed[0]!r} had a gradient before this weighted step, and this backward pass added to it before "
                    "it reached an output of the wrapper, so the wrapper cannot separate the two; call "
                    "optimizer.zero_grad() before the forward pass"
                )

        task = weakref.ref(running, ended)  # on an exception, autograd drops the callback without calling it
        queue_callback(partial(check, running))
        for parameter in names:
            handles[parameter] = parameter.register_hook(partial(arrives, parameter))

    def check_no_more(self) -> None:
        """Refuse another weight once the kept gradients have been multiplied by the final sum."""
        if self._is_settled:
            raise UsageError(
                "one backward pass covers several model.weight() blocks, but p.grad already held gradients, which must "
                "be multiplied by the sum of all weights before the pass begins; run one backward pass per block, or "
                "call optimizer.zero_grad() first"
            )


Answer: TypeAlias = bool | Callable[[], bool]
"""A value, or a function that waits for the device and returns it."""


class LocalGradients:
    """Detects that the program has dropped the gradients of weighted micro-batches under ``no_sync``.

    They count as dropped if all gradients of the wrapper are None or zero now, although one was nonzero when the latest
    of these backward passes ended. Only values decide: a program may drop gradients without raising a version
    (``p.grad.data.zero_()``), and it may clip or mask the gradients of micro-batches that still count.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget the gradients, because they are averaged or dropped."""
        self._existed = True
        self._were_nonzero: Answer = False

    def record(self, parameters: Sequence[Tensor]) -> None:
        """Record whether ``p.grad`` holds nonzero gradients; called at the end of each of these backward passes."""
        self._existed = any(parameter.grad is not None for parameter in parameters)
        self._were_nonzero = _are_nonzero(parameters)

    def are_dropped(self, parameters: Sequence[Tensor]) -> Answer:
        if all(parameter.grad is None for parameter in parameters):
            return self._existed  # None drops gradients that were zero, too
        were = self._were_nonzero
        are = were is not False and _are_nonzero(parameters)
        if callable(were) or callable(are):
            return lambda: read(were) and not read(are)
        return were and not are


def read(answer: Answer) -> bool:
    return answer() if callable(answer) else answer


def _are_nonzero(parameters: Iterable[Tensor]) -> Answer:
    """Return whether any gradient is nonzero now."""
    queued: dict[torch.device, list[Tensor]] = {}
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        if not is_queued(gradient.device):
            if has_nonzero(gradient):
                return True
        elif (elements := stored_elements(gradient)).numel():
            queued.setdefault(gradient.device, []).append(elements)
    answers = [read_later(torch.stack(norm_each(gradients)).any()) for gradients in queued.values()]
    return bool(answers) and (lambda: any(answer() for answer in answers))


def _may_count(gradient: Tensor) -> bool:
    """Return whether the gradient may be nonzero; does not wait for the device."""
    return is_queued(gradient.device) or has_nonzero(gradient)


def multiply(parameters: Iterable[Tensor], weight: float) -> None:
    """Multiply the gradients of `parameters`; not in place if a gradient's elements may overlap in memory."""
    dense = []
    for parameter in parameters:
        assert parameter.grad is not None
        if parameter.grad.is_sparse or has_overlap(parameter.grad):
            parameter.grad = parameter.grad * weight
        else:
            dense.append(parameter.grad)
    if dense:
        multiply_each(dense, weight)
