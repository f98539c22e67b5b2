"""Random streams for one fetch: seeded before it, and nobody else's draws disturbed by it.

Only the CPU's generators are touched; what a data set draws on a GPU comes from the GPU's stream of the rank.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

TWISTER_BYTES = 624 * 4 + 4  # its words and the place among them, as NumPy lays them out


def sow(seed: int) -> None:
    """Seed Python's, NumPy's (where it is loaded) and torch's CPU generators."""
    random.seed(seed)
    # torch.manual_seed would also visit every accelerator: 90 µs in place of 1.
    torch.default_generator.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@contextmanager
def preserved() -> Iterator[None]:
    """Bring the generators back, after the block, to where they were before it."""
    numpy = sys.modules.get("numpy")
    in_torch, in_python = torch.get_rng_state(), random.getstate()
    put_back = _numpy_kept(numpy.random) if numpy else None
    try:
        yield
    finally:
        torch.set_rng_state(in_torch)
        random.setstate(in_python)
        if put_back:
            put_back()


def _numpy_kept(generator: Any) -> Callable[[], None]:
    """Note NumPy's global stream, `generator`; calling the result brings it back.

    ``get_state`` and ``set_state`` would do, and take longer than fetching a small batch: measured with NumPy 2.4 on
    two cores, :func:`preserved` with :func:`sow` in it takes 138 µs with them and 24 µs as it is (459 and 86 µs with
    both cores busy). So the Mersenne twister's
    words are copied, and the one thing that is kept elsewhere, the second of a pair of normal numbers, is asked for:
    drawing it moves no word.
    """
    own = generator.get_bit_generator() if hasattr(generator, "get_bit_generator") else None
    if not isinstance(own, generator.MT19937):
        return partial(generator.set_state, generator.get_state(legacy=False))
    address = own.ctypes.state_address
    words = ctypes.string_at(address, TWISTER_BYTES)
    second = generator.standard_normal()
    held = ctypes.string_at(address, TWISTER_BYTES) == words

    def put_back() -> None:
        ctypes.memmove(address, words, TWISTER_BYTES)
        generator.set_bit_generator(own)  # drops the second number that the block may have left
        if held:
            generator.set_state({**generator.get_state(legacy=False), "has_gauss": 1, "gauss": second})

    return put_back
