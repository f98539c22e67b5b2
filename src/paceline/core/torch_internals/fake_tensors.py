"""Tensors that have a shape, a dtype and a device, but neither values nor memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # intercepts every operator


@contextmanager
def without_memory() -> Iterator[None]:
    """Run operations without allocating memory for results; inputs may be ordinary tensors.

    Logging is disabled in the block, because torch would also log the errors of such operations.
    """
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        logging.disable(level)
