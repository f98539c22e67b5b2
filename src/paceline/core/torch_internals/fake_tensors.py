"""Tensors that have a shape, a dtype and a device, but neither values nor memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # calls a function for every operator


@contextmanager
def without_memory() -> Iterator[None]:
    """Surround operations whose results have no memory; other tensors that meet them are taken as such, too.

    torch logs an error of such an operation before it raises it; here nothing is logged.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        logging.disable(before)
