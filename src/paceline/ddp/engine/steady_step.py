"""The steady step: all that an ordinary backward does, in the order in which it does it.

    output reached ──► _begin_steadily ──► _launch_full (every bucket but the last) ──► _launch_last ──► _wait

Ordinary: one wrapper, gradients that are dense, all there and new, averaged by one all-reduce for each bucket, without
weights, and nobody records. Anything else is for the general path (:mod:`.reducer`), which launches the same
collectives and gives the same bits, so a rank takes this path or that one without asking the others. It may leave this
one before the last bucket, which holds the digest, and after all ranks have read that digests differ.

What runs once a step is not in the processor's caches, so it costs several times its warm time: fewer calls and fewer
objects count here more than clever ones.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.core.telemetry.failpoints import strike
from paceline.core.telemetry.spans import BACKWARD, WAIT
from paceline.core.torch_internals.autograd import GraphTask, is_plain_backward, queue_callback
from paceline.core.torch_internals.profiler import is_profiling
from paceline.core.torch_internals.tensors import copy_each, multiply_each
from paceline.ddp.agreement.weighting import UNWEIGHTED
from paceline.ddp.engine.backward.backward import Backward
from paceline.ddp.engine.backward.concurrent_wrappers import is_alone
from paceline.ddp.engine.backward.finish import Ending
from paceline.ddp.engine.backward.pending_forwards import Forward, PendingForwards
from paceline.ddp.engine.backward.phase import Outcome, Phase
from paceline.ddp.engine.backward.restore import restore_gradients
from paceline.ddp.engine.backward.resync import Settling
from paceline.ddp.engine.gradients.bulk_checks import are_dense, gradients_of, none_has_gradient
from paceline.ddp.engine.parameters.optimizer_in_backward import OptimizersInBackward
from paceline.ddp.transport.channel import Pausing

NOTE = (0.0, float(UNWEIGHTED))
"""Weight and weighting that travel with a bucket in shared memory."""


class SteadyStep(Settling):
    """The part of the reducer that carries out ordinary steps."""

    _forwards: PendingForwards
    """The forwards whose backward has not come yet."""
    _in_backward: OptimizersInBackward
    """Optimizers that step at the end of backward."""

    # -- 1. backward reaches an output ---------------------------------------------------------------------------

    def _begin_steadily(self, forward: Forward | None) -> bool:
        """Begin the backward that has reached the output of `forward`; returns False where it is not ordinary.

        The general path then begins it, and nothing has happened.
        """
        parts = self._parts
        if (
            self._backward.phase is not Phase.IDLE
            or not self.sync_enabled
            or self._in_backward
            or forward is None
            or forward.block is not None
            or torch.is_grad_enabled()  # create_graph=True
            or not is_plain_backward()
            or is_profiling()
            or not is_alone()
            or self._forwards.are_differentiated
        ):
            return False
        self._detect_new_parameters()
        if not (
            parts.is_ordinary
            and any(parameter.requires_grad for parameter in parts.given)  # else the module is only passed through
            and none_has_gradient(parts.parameters)
            and parts.storage.is_untouched()
            and parts.ledger.begin_unweighted()
        ):
            return False
        parts.channel.check_open()
        self._backward = backward = Backward(
            parts, untouched=True, always_exchanges=False, is_steady=True, on_abort=restore_gradients
        )
        backward.gradients_came = parts.recorder.open(BACKWARD)
        backward.ending = self._end_steadily(backward)
        backward.enter(Phase.LAUNCHING)
        self._follow_task()
        self._forwards.steady_backward_began(forward)
        parts.arrivals.begin(clear=True)
        return True

    # -- 2. a gradient arrives: buckets that are full are launched ------------------------------------------------

    def _launch_full(self, backward: Backward, index: int) -> None:
        """The gradient of parameter `index` has arrived, which is the last of its bucket as a rule."""
        arrivals, launched, last = self._parts.arrivals, backward.launched, len(self._parts.storage.buckets) - 1
        while (
            len(launched) < last
            and (gradients := arrivals.complete(len(launched))) is not None
            and arrivals.comes_last(index)
        ):
            self._launch(backward, gradients)
        self._parts.channel.progress()

    def _launch(self, backward: Backward, gradients: Sequence[Tensor | None]) -> None:
        parts, number = self._parts, len(backward.launched)
        bucket = parts.storage.buckets[number]
        if not are_dense(gradients):
            backward.launch(bucket)
            return
        if number == 1:
            strike("bucket")
        copy_each(bucket.views, gradients)
        for parameter in parts.storage.owned[number]:
            parameter.grad = None
        channel = parts.channel
        backward.launched.append(channel.all_reduce(bucket.memory, NOTE if channel.scales else None))

    # -- 3. backward ends: the last bucket is launched, all ranks wait, and read the same digests -----------------

    def _end_steadily(self, backward: Backward) -> Pausing[None]:
        try:
            is_launched = not backward.is_cut_short and self._launch_last(backward)
            if is_launched:
                backward.enter(Phase.WAITING)
                yield True
                agree = self._wait(backward)
        except BaseException:  # KeyboardInterrupt, too: the others' collectives are not met any more
            backward.enter(Phase.BROKEN)
            raise
        if not is_launched:
            yield from self._end(backward, Ending(backward).run())
        elif not agree:
            yield from self._end(backward, Ending(backward).exchange({}))
        else:
            backward.enter(Phase.IDLE)
            backward.launched.clear()  # which lets go of their memory
            backward.forget_task()

    def _launch_last(self, backward: Backward) -> bool:
        """Launch what is left, the last bucket with a digest; not that where this rank has something to report."""
        parts, storage = backward.parts, backward.parts.storage
        last = len(storage.buckets) - 1
        while len(backward.launched) < last:
            self._launch(backward, gradients_of(storage.owned[len(backward.launched)]))
        gradients = gradients_of(storage.owned[last])
        # A gradient that is there now and belongs in an earlier bucket has come late.
        if backward.absent or backward.has_sparse or not are_dense(gradients) or not none_has_gradient(storage.early):
            return False
        parts.digest.write(storage.buckets[last].tail, parts.ledger.position(parts.channel.size))
        self._launch(backward, gradients)
        backward.gradients_came()
        parts.buffers.launch()
        return True

    def _wait(self, backward: Backward) -> bool:
        """Wait for the sums; publish the averages if digests agree, and return whether they do."""
        parts, channel, buckets = backward.parts, backward.parts.channel, backward.parts.storage.buckets
        began = time.perf_counter()
        with parts.recorder.span(WAIT):  # the black box tells what a rank did when another one failed
            parts.finisher.wait(backward.launched, None, parts.control)
        parts.exposed_time.add(time.perf_counter() - began)
        if not parts.digest.all_agree(buckets[-1].tail):
            return False
        if not channel.scales:
            multiply_each([bucket.flat for bucket in buckets], 1 / channel.size)
        parts.buffers.wait()
        parts.published.publish_all(parts.storage.averages({}, {}))
        parts.ledger.synchronized()
        return True

    # -- with both paths ----------------------------------------------------------------------------------------

    def _follow_task(self) -> None:
        """Notice how autograd ends the backward that has begun; run its end there, and other wrappers' at pauses."""
        task = GraphTask()
        self._backward.follow(task)
        queue_callback(partial(self._advance_and_queue, task))

    def _advance_and_queue(self, task: GraphTask) -> None:
        if self._backward.advance():
            queue_callback(partial(self._advance_and_queue, task))

    # -- the general path's --------------------------------------------------------------------------------------

    def _end(self, backward: Backward, ending: Pausing[Outcome]) -> Pausing[None]:
        """Carry `backward` to its end by `ending`."""
        raise NotImplementedError

    def _detect_new_parameters(self) -> None:
        """Notice parameters that the module got since it was looked at last."""
        raise NotImplementedError
