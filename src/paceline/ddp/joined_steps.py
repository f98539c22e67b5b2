"""Steps inside ``join``: ranks with data announce each collective to ranks that have run out.

Decision 0008 says why; :mod:`paceline.ddp.agreement.join_events` defines the messages.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable

from paceline.core.state.unwrapping import Communicates
from paceline.core.torch_internals.autograd import queue_callback
from paceline.core.torch_internals.compile import class_never_compiled
from paceline.ddp.agreement.join_events import Event, Message, Stage, decode, encode, event_number
from paceline.ddp.reducer.backward import Backward
from paceline.ddp.reducer.extension import Extension
from paceline.ddp.transport.channel import Channel
from paceline.errors import UsageError


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

    launches_at_end: Callable[[bool], bool] = staticmethod(bool)
    """Function that returns whether buckets are launched after backward; its argument is whether ranks without data
    follow."""

    def __init__(self, wrapper: Joinable, channel: Channel, module: Callable[[], nn.Module]) -> None:
        self._wrapper = weakref.ref(wrapper)  # weak, because the wrapper holds this object
        self.channel, self._module = channel, module
        self.reset()

    def enable(self, enabled: bool) -> None:
        self.enabled = enabled
        self.mark_stale()

    def close(self) -> None:
        """Drop the function that refers back to the reducer."""
        self.launches_at_end = bool

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
        backward.sends_block = backward.reads_in_backward = True
        backward.launches_at_end = self.launches_at_end(self.announce(Event.BACKWARD))

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
