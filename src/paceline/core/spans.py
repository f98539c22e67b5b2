"""Spans: named parts of a training step on one rank, recorded on request.

While a torch profiler runs, the same labels appear in its trace, through ``torch.profiler.record_function``. Traces,
messages and docs use the same labels. One step, in order:

    data wait    the loop waits for a batch from a Paceline DataLoader
    forward      the wrapped module's forward pass
    backward     from the start of a backward pass until its last gradient has arrived
    launch       bucket `bucket` is complete and handed to communication (usually inside ``backward``)
    control      the control block is filled and launched
    wait         the end of backward waits for everything that was launched
    bucket wait  the wait for bucket `bucket` (inside ``wait``)
    reduce       this rank reduces its share of a bucket in shared memory (inside ``backward`` or ``wait``)
    optimizer    an optimizer updates the wrapper's parameters
    checkpoint   a Checkpointer saves, waits for a save, restores, or reads its folder
    outer step   LocalSGD or DiLoCo waits for the mean of all islands (inside ``optimizer``)

and, while a profiler records, ``collective``, a function of ``torch.distributed`` that the program calls, and ``garbage
collection``, a run of Python's garbage collector. A detailed recorder also records marks, which are spans of zero
length: ``gradient`` when the gradient of parameter `bucket` arrives, ``sent`` when this rank has filled bucket `bucket`
and begins its all-reduce (inside ``launch``), and ``done`` when the all-reduce is finished.

Under our launcher, a rank always writes its current span to its black box, even if spans are not recorded; see
:mod:`paceline.core.black_box`.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.profiler import record_function

from paceline.core.black_box import WRITERS, BlackBox, open_box
from paceline.core.torch_internals import class_never_compiled, is_profiling, never_compiled

DATA_WAIT, FORWARD, BACKWARD = "data wait", "forward", "backward"
LAUNCH, CONTROL, WAIT, BUCKET_WAIT = "launch", "control", "wait", "bucket wait"
REDUCE, OPTIMIZER, CHECKPOINT, COLLECTIVE = "reduce", "optimizer", "checkpoint", "collective"
COLLECTOR, OUTER_STEP = "garbage collection", "outer step"
GRADIENT, SENT, DONE = "gradient", "sent", "done"
_IN_BACKWARD = LAUNCH, CONTROL, WAIT, BUCKET_WAIT, REDUCE
LABELS = (DATA_WAIT, FORWARD, BACKWARD, *_IN_BACKWARD, OPTIMIZER, CHECKPOINT, COLLECTIVE, OUTER_STEP)
"""Labels of spans, without marks."""
COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)
"""Collective functions of ``torch.distributed``."""


class Span(NamedTuple):
    """A period of time; ``start`` and ``end`` are seconds of ``time.perf_counter``."""

    label: str
    start: float
    end: float
    bucket: int | None = None
    """Number of the bucket in launch order, if any; in a ``gradient``, number of the parameter."""
    group: str | None = None
    """Name of the group whose ranks wait for each other here, if known; see :attr:`Recorder.groups`."""
    events: tuple[Any, Any] | None = None
    """Device events of its start and end, if recorded."""

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end - self.start


class BucketWatch(Protocol):
    """Measures the gradients of a step, bucket by bucket, before and after they are averaged."""

    def launched(self, flat: Tensor, factor: float) -> None:
        """Inspect a bucket before its all-reduce; it holds `factor` times the mean over this rank's samples."""

    def averaged(self, flat: Tensor) -> None:
        """Inspect a bucket after its gradients are averaged."""


@dataclass
class Recorder:
    """Collects spans while ``on``. While off, and without a torch profiler, a span costs three attribute lookups.

    With a black box, it costs one or two microseconds.
    """

    on: bool = False
    detailed: bool = False
    """Whether marks are also recorded, which needs a hook on every parameter."""
    spans: list[Span] = field(default_factory=list)
    skipped: set[str] = field(default_factory=set)
    """Labels that are currently not recorded, except as phases in the black box: nested spans, and details."""
    groups: dict[str, list[int]] = field(default_factory=dict)
    """World ranks of each group that is named in a span."""
    bucket_watch: BucketWatch | None = None
    """Object that measures the buckets of this step; None in steps without measurements."""
    make_event: Callable[[], Any] | None = None
    """Function that records an event on the device's current stream, and returns it; None on CPUs."""

    @functools.cached_property
    def box(self) -> BlackBox | None:
        """Black box for the phases, if our launcher made one for this rank. The first use opens it, not an import."""
        return open_box()

    @never_compiled
    def span(self, label: str, bucket: int | None = None, group: str | None = None) -> AbstractContextManager[None]:
        """Record the block under `label`."""
        phase = None if self.box is None else self.box.span(label, bucket)
        if is_profiling():
            timed = _Timed(self, label, bucket, group, phase)
            return _labelled(timed, label if bucket is None else f"{label} {bucket}")
        if self.on and label not in self.skipped:
            return _Timed(self, label, bucket, group, phase)
        return _OFF if phase is None else phase

    def mark(self, label: str, number: int) -> None:
        """Record that something happened now; called only while :attr:`detailed`."""
        now = time.perf_counter()
        self.spans.append(Span(label, now, now, number))

    @never_compiled
    def open(self, label: str, owner: int = 0, group: str | None = None) -> Callable[[], object]:
        """Begin a span without a ``with`` block; return the function that ends it. A span that never ends is dropped.

        During the span, the ranks of `group` wait for each other. `owner` is a number that identifies the wrapper in
        the black box.
        """
        if owner and self.box is not None:
            self.box.owner = owner
        if self.on or is_profiling():
            block = self.surround(label, group)
        else:  # no further calls, because every step gets here several times
            block = _OFF if self.box is None else self.box.span(label) or _OFF
        block.__enter__()
        return functools.partial(block.__exit__, None, None, None)

    @never_compiled
    def surround(self, label: str, group: str | None = None) -> AbstractContextManager[None]:
        """Record the block under `label`, without nested blocks of the same label."""
        if self.on and label not in self.skipped and not is_profiling():
            phase = None if self.box is None else self.box.span(label)
            return _Timed(self, label, None, group, phase, is_alone=True)
        return self.span(label, group=group)


@class_never_compiled
class _Timed:
    """Records one span. This is a class because a step has dozens of spans, and a generator would be slower.

    If `is_alone`, nested spans of the same label are not recorded.
    """

    __slots__ = ("_bucket", "_event", "_group", "_is_alone", "_label", "_phase", "_recorder", "_start")

    def __init__(
        self,
        recorder: Recorder,
        label: str,
        bucket: int | None,
        group: str | None,
        phase: AbstractContextManager[None] | None,
        is_alone: bool = False,
    ) -> None:
        self._recorder, self._label, self._bucket, self._group = recorder, label, bucket, group
        self._phase = phase  # phase of the black box
        self._is_alone = is_alone

    def __enter__(self) -> None:
        if self._is_alone:
            self._recorder.skipped.add(self._label)
        if self._phase is not None:
            self._phase.__enter__()
        make_event = self._recorder.make_event
        self._event = None if make_event is None else make_event()
        self._start = time.perf_counter()

    def __exit__(self, *error: Any) -> None:
        end, recorder = time.perf_counter(), self._recorder
        if self._is_alone:
            recorder.skipped.discard(self._label)
        if recorder.on:
            events = (self._event, recorder.make_event()) if recorder.make_event is not None else None
            recorder.spans.append(_span((self._label, self._start, end, self._bucket, self._group, events)))
        if self._phase is not None:
            self._phase.__exit__(*error)


@contextmanager
def _labelled(timed: _Timed, label: str) -> Iterator[None]:
    """Also show `timed` under `label` in the trace of torch's profiler."""
    with timed, record_function(label):
        yield


_OFF: AbstractContextManager[None] = nullcontext()
_span: Callable[[tuple[Any, ...]], Span] = functools.partial(tuple.__new__, Span)
"""Creates a span from a tuple in half the time of the constructor."""


for _writer in WRITERS:  # not marked in their own module, which does not import torch
    class_never_compiled(_writer)
recorder = Recorder()
"""This process's recorder, which wrappers, loaders and checkpoints use."""


def waiting() -> AbstractContextManager[None]:
    """In the block, show in an open black box that the main thread waits for other ranks."""
    box: BlackBox | None = vars(recorder).get("box")  # not recorder.box, which would open it
    if box is None or threading.current_thread() is not threading.main_thread():
        return _OFF
    return box.span(COLLECTIVE) or _OFF
