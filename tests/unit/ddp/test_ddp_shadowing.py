"""Messages from ranks with data to ranks that ran out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.ddp.joined_steps import Event, Message, decode, encode, event_number
from paceline.errors import DesyncError, UsageError

BACKWARD, LAYER = Message(Event.BACKWARD), Message(Event.LAYER, 3, 17)
WRAPPER = event_number("12")


def maximum(*messages: Message | None, wrappers: list[int] | None = None) -> Tensor:
    """Simulate the collective on the messages of all ranks."""
    size = len(messages)
    wrappers = wrappers or [WRAPPER] * size
    rows = [encode(message, wrappers[rank], rank, size) for rank, message in enumerate(messages)]
    return torch.tensor(rows).amax(0)


@pytest.mark.parametrize(
    ("messages", "expected", "present"),
    [
        ((BACKWARD, BACKWARD), BACKWARD, [0, 1]),
        ((None, LAYER, LAYER), LAYER, [1, 2]),
        ((Message(Event.FORWARD), None), Message(Event.FORWARD), [0]),
        ((None, Message(Event.LAYER, 0, 2**40), None), Message(Event.LAYER, 0, 2**40), [1]),
        ((None, None), None, []),
    ],
)
def test_ranks_learn_the_next_event_and_who_has_data(
    messages: tuple[Message | None, ...], expected: object, present: object
) -> None:
    assert decode(maximum(*messages)) == (expected, present)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ((BACKWARD, Message(Event.LOCAL)), "BACKWARD and LOCAL"),
        ((LAYER, None, Message(Event.LAYER, 2, 17)), "LAYER of layer 2 and LAYER of layer 3"),
        ((Message(Event.LAYER, 1, 5), Message(Event.LAYER, 1, 6)), "LAYER of layer 1 and LAYER of layer 1"),
    ],
)
def test_conflicting_messages_raise_desync_error(messages: tuple[Message | None, ...], words: str) -> None:
    with pytest.raises(DesyncError, match=words):
        decode(maximum(*messages))


def test_overlapping_steps_of_two_wrappers_are_refused() -> None:
    with pytest.raises(UsageError, match="one wrapper's step began before another's had ended"):
        decode(maximum(BACKWARD, None, wrappers=[WRAPPER, event_number("13")]))
