"""Steps inside ``join``: ranks with data announce each collective to ranks that have run out.

A message is one int64 vector, reduced to its maximum over the ranks in a separate collective:

    [ event, layer, code | the same negated | wrapper, negated | 1 for each rank that has data ]

The maximum of a negated number gives the minimum, which reveals any difference between ranks. A rank that has run out
of data contributes numbers that are smaller than any message's.

Decision 0008 says why.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable

from paceline.core.torch_internals import class_never_compiled, queue_callback
from paceline.core.unwrapping import Communicates
from paceline.ddp.backward import Backward
from paceline.ddp.channel import Channel
from paceline.ddp.extension_points import Extension
from paceline.errors import DesyncError, UsageError

NOTHING = -(2**62)
"""Smaller than any number in a message, negated or not, so a message always determines the maximum."""
_HEAD = 8  # event, layer, code and their negations; the wrapper's number and its negation


class Stage(Enum):
    """A rank's stage inside ``join``.

    A rank with data goes from IDLE to ALL_HAVE_DATA or FOLLOWED and back to IDLE; a rank without data is SHADOWING.
    """

    IDLE = "between steps"
    ALL_HAVE_DATA = "in a step in which every rank has data"
    FOLLOWED = "in a step that ranks without data shadow"
    SHADOWING = "this rank has run out of data and shadows the others' steps"


class Event(IntEnum):
    """The next collective, or the end of a step."""

    FORWARD = 0
    """Start of a step; no collective follows immediately."""
    BUFFERS = 1
    """Broadcast of buffers."""
    LAYER = 2
    """Collective of a layer."""
    BACKWARD = 3
    """Synchronized backward pass: its buckets and its control block."""
    END = 4
    """End of the step after a synchronized backward pass: no more collectives, only the wait for the buckets."""
    LOCAL = 5
    """End of the step after a backward pass under ``no_sync``."""


class JoinEvents(Protocol):
    """Announces this rank's next event to ranks that have run out of data inside ``join``."""

    enabled: bool
    """Whether the wrapper is inside ``join``. Outside, all ranks have data and events are not sent."""

    @property
    def source(self) -> int:
        """The rank whose buffers all ranks copy: the first one with data; rank 0 outside ``join``."""

    def announce(self, event: Event) -> bool:
        """Announce the collective that comes next; returns whether ranks without data take part in it."""


@dataclass(frozen=True)
class Message:
    """An event; for a layer's collective, also the layer's number and a code for the collective's arguments."""

    event: Event
    layer: int = 0
    code: int = 0

    def __str__(self) -> str:
        return f"{self.event.name} of layer {self.layer}" if self.event is Event.LAYER else self.event.name


def event_number(name: str) -> int:
    """Return a number that identifies the wrapper whose channel is called `name`, the same on every rank."""
    return zlib.crc32(name.encode())  # not hash(), which differs between processes


def encode(message: Message | None, wrapper: int, rank: int, size: int) -> list[int]:
    """Return the numbers that rank `rank` of `size` contributes; `message` is None if it has run out of data."""
    if message is None:
        return [*[NOTHING] * 6, wrapper, -wrapper, *[0] * size]
    values = message.event, message.layer, message.code
    return [*values, *(-value for value in values), wrapper, -wrapper, *(int(index == rank) for index in range(size))]


def decode(vector: Tensor) -> tuple[Message | None, list[int]]:
    """Return the message of the ranks that have data (None if no rank has any), and the list of those ranks."""
    values: list[int] = vector.tolist()
    present = [rank for rank, has_data in enumerate(values[_HEAD:]) if has_data]
    # If the largest and the smallest wrapper number differ, ranks are in the steps of two different wrappers.
    if values[6] != -values[7]:
        raise UsageError(
            "inside join(), one wrapper's step began before another's had ended, and a rank without data cannot follow "
            "both; finish one wrapper's backward pass before another wrapper's forward pass"
        )
    if not present:
        return None, present
    largest, smallest = values[:3], [-value for value in values[3:6]]
    high, low = (Message(Event(event), layer, code) for event, layer, code in (largest, smallest))
    if largest != smallest:
        raise DesyncError(
            f"inside join(), ranks that have data are at different points of their step ({low} and {high}); run the "
            "same forward and backward passes in the same order on all of them"
        )
    return high, present


@class_never_compiled
class JoinedSteps(Extension):
    """Announces the collectives in one wrapper's steps to ranks that have run out of data.

    Args:
        wrapper: provides the group and the device for ``Join``'s own messages.
        channel: the wrapper's channel.
        module: returns the wrapper's module.
    """

    enabled = False
    """Whether the wrapper is inside ``join``; set by :meth:`enable`. Outside, events are not sent."""

    channel: Channel
    """The wrapper's channel. Events are sent over the same process group as the channel's collectives."""
    stage: Stage
    """This rank's stage; ``IDLE`` outside ``join``."""
    present: Sequence[int]
    """The ranks of the group that had data when the step began; ``(0,)`` outside ``join``."""

    def __init__(self, wrapper: Joinable, channel: Channel, module: Callable[[], nn.Module]) -> None:
        self._wrapper = weakref.ref(wrapper)  # weak, because the wrapper holds this object
        self.channel, self._module = channel, module
        self.reset()

    def enable(self, enabled: bool) -> None:
        self.enabled = enabled
        self.mark_stale()

    def is_active(self) -> bool:
        return self.enabled

    def check_change(self) -> None:
        if self.enabled:
            raise UsageError(
                f"rank {self.channel.rank}: parameters of the module were added or unfrozen inside join(), but ranks "
                "without data cannot follow; change the module before join()"
            )

    def begin(self, backward: Backward) -> None:
        """Announce a synchronized backward pass with an exchange of control blocks."""
        # A rank without data has no gradients to base a decision on, so blocks are always exchanged and read in
        # backward.
        backward.sends_block = True
        backward.is_shadowed = self.announce(Event.BACKWARD)

    def begin_local(self) -> None:
        """Announce the end of the step after a local backward pass."""
        if self.enabled:
            queue_callback(partial(self.announce, Event.LOCAL))

    def backward_ended(self, backward: Backward) -> None:
        """Announce that no more collectives of layers follow."""
        self.announce(Event.END)

    def reset(self) -> None:
        """Forget earlier steps; called when ``join`` begins or ends."""
        self.stage, self.present = Stage.IDLE, (0,)

    @property
    def source(self) -> int:
        """The rank whose buffers all ranks copy: the first one with data; rank 0 outside ``join``."""
        return self.present[0]

    def forward_begins(self) -> None:
        """Begin a step unless the forward pass belongs to a step that is already shadowed; only inside ``join``."""
        if self.stage in (Stage.IDLE, Stage.ALL_HAVE_DATA):
            self._open_step()

    def announce(self, event: Event, layer: int = 0, code: int = 0) -> bool:
        """Announce the next collective to ranks that have run out of data; returns whether there are any."""
        if not self.enabled or self.stage is Stage.SHADOWING:
            return self.stage is Stage.SHADOWING
        ends = event in (Event.END, Event.LOCAL)
        if self.stage is Stage.IDLE:
            if ends:
                return False
            self._open_step()
        if is_followed := self.stage is Stage.FOLLOWED:
            self.exchange(Message(event, layer, code))
        if ends:
            self.stage = Stage.IDLE
        return is_followed

    def exchange(self, message: Message | None) -> Message | None:
        """Exchange the next event and the ranks that have data; a rank that has run out of data passes None."""
        wrapper, channel = self._wrapper(), self.channel
        assert wrapper is not None
        values = encode(message, event_number(channel.name), channel.rank, channel.size)
        vector = torch.tensor(values, device=wrapper.join_device)
        # Use the group of Join's own messages, which all wrappers share: interleaved steps are detected and refused,
        # and collectives of layers and communication hooks on that group stay in order with the events.
        dist.all_reduce(vector, dist.ReduceOp.MAX, group=wrapper.join_process_group)
        message, self.present = decode(vector)
        if message is not None and message.event is Event.FORWARD and len(self.present) < channel.size:
            _check_shadowable(self._module())
        return message

    def _open_step(self) -> None:
        wrapper = self._wrapper()
        assert wrapper is not None
        work = Join.notify_join_context(wrapper)
        if work is not None:
            work.wait()
        self.exchange(Message(Event.FORWARD))
        self.stage = Stage.ALL_HAVE_DATA if len(self.present) == self.channel.size else Stage.FOLLOWED


def _check_shadowable(module: nn.Module) -> None:
    """Refuse layers with collectives that a rank without data cannot take part in."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and layer.training and not isinstance(layer, Communicates):
            raise UsageError(
                f"a rank ran out of data inside join() and cannot take part in torch's SyncBatchNorm {name!r}; "
                "use paceline.SyncBatchNorm.convert_sync_batchnorm(model)"
            )
