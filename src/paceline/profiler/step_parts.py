"""The parts of a step, which add up to its length on each rank.

    data           the loop waits for a batch
    forward        the model's forward
    backward       backward, without the other parts
    communication  copying, launching and reducing buckets in backward, and waiting for a collective after the last
                   rank has arrived: an infinitely fast network would save it
    bubble         waiting in a collective until the last rank has arrived: equally fast ranks would save it
    optimizer      optimizer steps
    checkpoint     saves
    collector      Python's garbage collector, which may pause any other part
    other          everything else in the loop: metrics, logging, schedulers

:mod:`paceline.core.spans` defines the labels of spans.
"""

from __future__ import annotations

DATA, FORWARD, BACKWARD, COMMUNICATION, BUBBLE = "data", "forward", "backward", "communication", "bubble"
OPTIMIZER, CHECKPOINT, COLLECTOR, OTHER = "optimizer", "checkpoint", "collector", "other"
ALL = (DATA, FORWARD, BACKWARD, COMMUNICATION, BUBBLE, OPTIMIZER, CHECKPOINT, COLLECTOR, OTHER)
COMPUTE = (FORWARD, BACKWARD)
WAITING = (COMMUNICATION, BUBBLE)

NAMES = {part: part for part in ALL} | {COMMUNICATION: "exposed communication", COLLECTOR: "garbage collection"}
"""Names of the parts in columns and legends."""
MEANINGS = {
    DATA: "the loop waits for a batch",
    FORWARD: "the model's forward",
    BACKWARD: "backward, without the parts listed separately",
    COMMUNICATION: "an infinitely fast network would save it",
    BUBBLE: "idle until the last rank arrives; equally fast ranks would save it",
    OPTIMIZER: "optimizer steps",
    CHECKPOINT: "saves",
    COLLECTOR: "pauses of Python's garbage collector",
    OTHER: "everything else in the loop: metrics, logging, schedulers",
}
"""A one-line description of each part."""
