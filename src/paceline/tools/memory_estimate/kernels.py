"""The memory of a rank beside its tensors: workspaces of kernels, blocks that malloc keeps, and libraries.

A dry run does not show it. The constants are those of torch 2.13 on x86-64 with glibc 2.36, from the resident memory
of ranks that train the models of ``benchmarks/estimated_models.py``; decision 0052 has where each comes from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from paceline.core.state.buckets import MIB
from paceline.errors import UsageError

_CHANNELS = 16
"""Channels that oneDNN's layouts have in a block; a tensor's own are filled up."""
_FEWEST_CHANNELS = 4
"""Channels from which a tensor is copied into blocks: the first convolution takes pictures as they are."""
_LSTM_WRITTEN, _LSTM_FIXED, _LSTM_BY_WIDTH = 5.0, 9.0, 6.3
"""Tensors as large as an LSTM layer's output that its forward writes to oneDNN's workspace, and those of the whole
workspace: some of the hidden size, others of the hidden size or the input's, whichever is larger."""
_LSTM_RESIDENT = 0.5
"""Share of the rest of it that is resident all the same: backward writes to it, and earlier blocks of the heap did."""
_GATES = 4
"""Tensors of that size in which oneDNN has the gates of all steps, beside the workspace, while a layer runs."""


@dataclass(frozen=True)
class Device:
    """A kind of device, with its memory beside tensors."""

    name: str
    has_flash: bool
    """Whether it has flash attention with dropout."""
    has_foreach: bool
    """Whether optimizers update all parameters at once, unless they are told otherwise."""
    libraries: tuple[int, int, int]
    """Bytes that libraries take when they are first used: lowest, usual and highest."""
    convolutions: int
    """Bytes that the first convolution adds to them."""
    convolution: int
    """Bytes of the kernels that are compiled for each convolution of another shape, forward and backward."""
    group: int
    """Bytes that the connections to other ranks take."""
    kept: tuple[float, float, float]
    """Bytes that the allocator loses in gaps, as multiples of those that are usual on a CPU."""

    def beside_tensors(self, func: Any, args: tuple[Any, ...], result: Any) -> tuple[int, int]:
        """Return bytes that an operator has while it runs, and bytes that its results keep."""
        # What follows is oneDNN's, on a CPU; workspaces of a GPU's kernels were not measured.
        if self.has_flash:
            return 0, 0
        if func is torch.ops.aten.convolution.default:
            return _blocked(args[0]) * (1 + args[6]) + _blocked(args[1]) + _blocked(result), 0
        if func is torch.ops.aten.convolution_backward.default:  # a transposed one copies its first argument twice
            return sum(map(_blocked, args[:3])) + _blocked(args[0]) * args[7], 0
        if func is torch.ops.aten.mkldnn_rnn_layer.default:
            output = _nbytes(result[:1])
            return _GATES * output + _nbytes(args[1:3]), _workspace_of_lstm(args[0], result[0])
        if func is torch.ops.aten.mkldnn_rnn_layer_backward.default:
            return _GATES * _nbytes(args[7:8]) + 2 * _nbytes(args[1:3]), 0
        return 0, 0


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _workspace_of_lstm(x: Tensor, output: Tensor) -> int:
    """Return the bytes of an LSTM layer's workspace that are resident from its forward to the end of its backward."""
    whole = _LSTM_FIXED + _LSTM_BY_WIDTH * max(1.0, x.shape[-1] / output.shape[-1])
    return int((_LSTM_WRITTEN + _LSTM_RESIDENT * (whole - _LSTM_WRITTEN)) * _nbytes([output]))


def _blocked(tensor: Tensor) -> int:
    """Return the bytes of `tensor` in a layout of blocks of channels."""
    batch, channels, *rest = tensor.shape
    if channels < _FEWEST_CHANNELS:
        return 0
    return batch * -(-channels // _CHANNELS) * _CHANNELS * prod(rest) * tensor.element_size()


_CPU = Device("cpu", False, False, (26 * MIB, 31 * MIB, 45 * MIB), 7 * MIB, 2 * MIB // 5, 6 * MIB, (0.0, 1.0, 2.5))
_CUDA = Device("cuda", True, True, (0, 8 * MIB, 32 * MIB), 0, 0, 0, (0.0, 0.0, 0.1))
DEVICES = {device.name: device for device in (_CPU, _CUDA)}


def device_of(name: str) -> Device:
    """Return the device of that name.

    Raises:
        UsageError: if there is none.
    """
    if name not in DEVICES:
        raise UsageError(f"--device {name}: choose one of {', '.join(DEVICES)}")
    return DEVICES[name]
