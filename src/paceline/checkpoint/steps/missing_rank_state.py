"""Reconstructs the states at the end of a step for a rank that was lost after the step's barrier.

The sources are the lost rank's states at the barrier, and a survivor's states at the barrier and at the end of the
step. A value that the survivor did not change is taken to be unchanged on the lost rank. A value that was equal on both
ranks at the barrier, such as an update counter, is taken to be equal at the end. Other values cannot be known: for
example, the random generators after the second forward of a GAN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.checkpoint.captures import Capture
from paceline.checkpoint.format.safetensors_file import bytes_view
from paceline.checkpoint.steps.rank_states import OwnStates


def carry_over(rank: int, lost: OwnStates, before: OwnStates, after: OwnStates) -> OwnStates:
    """Return the states of the lost `rank` at the end of the step; raise a ValueError if one is unknown.

    Args:
        rank: the lost rank. Buffers are reconstructed only for rank 0, because no others are saved.
        lost: its states at the barrier.
        before: a survivor's states at the barrier.
        after: the survivor's states at the end of the step.
    """
    generators = dict(lost.generators)
    for name, at_end in after.generators.items():
        states = generators.get(name), before.generators.get(name), at_end
        generators[name] = _at_end(*states, f"random generator {name!r} of rank {rank}")
    buffers = list(lost.buffers)
    if rank == 0 and len(buffers) == len(before.buffers) == len(after.buffers):
        columns = zip(lost.buffers, before.buffers, after.buffers, strict=True)
        buffers = [_at_end(*column, f"buffer {number} of rank 0") for number, column in enumerate(columns)]
    return replace(lost, generators=generators, objects=_objects_at_end(rank, lost, before, after), buffers=buffers)


def _objects_at_end(rank: int, lost: OwnStates, before: OwnStates, after: OwnStates) -> Capture:
    nodes, tensors = dict[str, Any](), dict[str, torch.Tensor]()
    captures = lost.objects, before.objects, after.objects
    for name in lost.objects.nodes:
        states = [(capture.nodes.get(name), _tensors_of(name, capture)) for capture in captures]
        nodes[name], object_tensors = _at_end(states[0], states[1], states[2], f"{name!r} of rank {rank}")
        tensors |= object_tensors
    return Capture(nodes, tensors, {**lost.objects.aliases, **after.objects.aliases})


def _tensors_of(name: str, capture: Capture) -> dict[str, torch.Tensor]:
    """Return one object's tensors; each tensor belongs to the object whose name is its key's longest prefix."""
    owners = {key: max((node for node in capture.nodes if key.startswith(node)), key=len) for key in capture.tensors}
    return {key: tensor for key, tensor in capture.tensors.items() if owners[key] == name}


def _at_end(lost: Any, before: Any, after: Any, name: str) -> Any:
    if are_equal(before, after):
        return lost
    if are_equal(lost, before):
        return after
    raise ValueError(f"{name} changed between the optimizer and the end of the step, and its new state is lost")


def are_equal(first: Any, second: Any) -> bool:
    """Return whether nested values are bitwise equal."""
    if isinstance(first, torch.Tensor):
        return (
            isinstance(second, torch.Tensor)
            and (first.dtype, first.shape) == (second.dtype, second.shape)
            and bool(torch.equal(bytes_view(first.contiguous()), bytes_view(second.contiguous())))
        )
    if isinstance(first, Mapping):
        return (
            isinstance(second, Mapping)
            and first.keys() == second.keys()
            and all(are_equal(value, second[key]) for key, value in first.items())
        )
    if isinstance(first, Sequence) and not isinstance(first, str | bytes):
        return isinstance(second, Sequence) and len(first) == len(second) and all(map(are_equal, first, second))
    return bool(first == second)
