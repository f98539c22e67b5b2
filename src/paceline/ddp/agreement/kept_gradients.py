"""Gradients that were in ``p.grad`` before a weighted step; the step adds its mean to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from paceline.core.state.device_streams import is_queued
from paceline.core.torch_internals.autograd import GraphTask, is_accumulated, queue_callback
from paceline.core.torch_internals.tensors import has_overlap, multiply_each
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
        self._copies: list[tuple[Tensor, Tensor]] | None = None
        self._weight = 0.0
        self._is_settled = False

    def look(self, parameters: Sequence[Tensor]) -> None:
        """Record the gradients that exist before a backward pass; called after each forward in a block."""
        if self._copies is not None:
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
        if self._copies is None:
            self._copies, kept, new = [], [], []
            for index, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
                if parameter.grad is not None and index not in elsewhere:
                    if self._is_new(parameter) and parameter.requires_grad and is_accumulated(parameter):
                        new += [parameter] if _may_count(parameter.grad) else []
                    elif self._is_kept(name, parameter):
                        kept.append(parameter)
            if kept or new:
                self._weight = weight()
                self._keep(kept, is_last=is_last)
                self._keep_if_more_arrives(new, is_last=is_last)
        elif self._copies:
            previous, self._weight = self._weight, weight()
            for parameter, gradient in self._copies:
                if parameter.grad is not None:
                    more = gradient * (self._weight - previous)
                    parameter.grad = parameter.grad + more if more.is_sparse else parameter.grad.add_(more)
            self._is_settled = is_last

    def _is_new(self, parameter: Tensor) -> bool:
        """Return whether the gradient is a different tensor from the one recorded at the forward."""
        if self.found is None:
            return False
        found = self.found.get(id(parameter))
        return found is None or found.tensor() is not parameter.grad

    def _is_kept(self, name: str, parameter: Tensor) -> bool:
        gradient = parameter.grad
        if gradient is None or self._is_new(parameter) or self.found is None:
            return gradient is not None
        if self.found[id(parameter)].is_unchanged(gradient):
            return True
        if _is_any(gradient):
            raise UsageError(
                f"{name!r} had a gradient before this weighted step, and it has changed since the forward pass, so the "
                "wrapper cannot tell which part this step added; call optimizer.zero_grad() before the forward pass"
            )
        return False  # optimizer.zero_grad(set_to_none=False)

    @torch.no_grad()
    def _keep(self, parameters: Sequence[Tensor], *, is_last: bool) -> None:
        if parameters:
            assert self._copies is not None
            if not is_last:
                self._copies += [(param, param.grad.clone()) for param in parameters if param.grad is not None]
            self._is_settled = is_last
            multiply(parameters, self._weight)

    def _keep_if_more_arrives(self, parameters: Sequence[Tensor], *, is_last: bool) -> None:
        """Keep gradients that appeared between the forward and the backward pass that is starting.

        If the gradient was computed by this backward pass itself before it reached an output (a head outside the
        forward), no other gradient arrives, and it is not kept.
        """
        if not parameters:
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

        task = weakref.ref(running, ended)  # on an exception, autograd drops the callback without calling it
        queue_callback(partial(ended, running))
        for parameter in parameters:
            handles[parameter] = parameter.register_hook(partial(arrives, parameter))

    def check_no_more(self) -> None:
        """Refuse another weight once the kept gradients have been multiplied by the final sum."""
        if self._is_settled:
            raise UsageError(
                "one backward pass covers several model.weight() blocks, but p.grad already held gradients, which must "
                "be multiplied by the sum of all weights before the pass begins; run one backward pass per block, or "
                "call optimizer.zero_grad() first"
            )


class LocalGradients:
    """Detects that the program has dropped the gradients of weighted micro-batches under ``no_sync``."""

    def __init__(self) -> None:
        self._recorded: list[tuple[str, Tensor, Seen]] = []

    def forget(self) -> None:
        """Forget the gradients, because they are averaged or dropped."""
        self._recorded = []

    def record(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Record the gradients in ``p.grad``; called at the end of each of these backward passes."""
        self._recorded = [
            (name, parameter, Seen.of(parameter.grad))
            for name, parameter in zip(names, parameters, strict=True)
            if parameter.grad is not None
        ]

    def are_dropped(self) -> bool:
        """Return whether all recorded gradients are None or zero now.

        Raises:
            UsageError: if some are and others are unchanged.
        """
        untouched, dropped = [], []
        for name, parameter, recorded in self._recorded:
            if recorded.is_unchanged(parameter.grad):
                untouched.append(name)
            elif parameter.grad is None or not _is_any(parameter.grad):
                dropped.append(name)
        # If all gradients have changed, the program may have clipped them, and the zero ones may have been zero before.
        if dropped and untouched:
            raise UsageError(
                f"the gradient of {dropped[0]!r} was set to None or zero after a micro-batch inside model.weight() and "
                f"no_sync(), but the gradient of {untouched[0]!r} was not, so the wrapper cannot tell whether this "
                "micro-batch still counts; to drop it, call model.zero_grad() on the wrapper; to keep it, set "
                "gradients to None only after the step's last backward pass"
            )
        return bool(dropped) and len(dropped) == len(self._recorded)


def _may_count(gradient: Tensor) -> bool:
    """Return whether the gradient may be nonzero; does not wait for the device."""
    return is_queued(gradient.device) or _is_any(gradient)


def _is_any(gradient: Tensor) -> bool:
    return bool((gradient._values() if gradient.is_sparse else gradient).any())


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
