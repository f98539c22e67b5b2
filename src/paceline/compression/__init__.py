"""Communication hooks that send less than the gradients: fewer bits, low rank, or the largest elements only.

::

    state = compression.PowerSGD(model, rank=4)
    model.register_comm_hook(state, compression.hook)

This works in both Paceline's and torch's DDP. ``docs/compression.md`` describes each compressor.
"""

from paceline.compression.compressor import Compressor, hook
from paceline.compression.low_precision import Cast, Int8
from paceline.compression.powersgd import PowerSGD
from paceline.compression.topk import TopK

__all__ = ["Cast", "Compressor", "Int8", "PowerSGD", "TopK", "hook"]
