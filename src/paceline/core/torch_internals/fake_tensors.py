"""Tensors that have a shape, a dtype and a device, but neither values nor memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # calls a function for every operator


@contextmanager
def without_memory() -> Iterator[None]:
    """Run operations without memory for results; other tensors are treated in the same way.

    torch also logs the errors of such operations; the block disables logging.
    """
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        logging.disable(level)
