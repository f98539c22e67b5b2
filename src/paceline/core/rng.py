"""Random streams: equal on all ranks while the model is built, different afterwards, and resumable."""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist

from paceline.core.option_rules import whole_number
from paceline.errors import UsageError


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit hash of `parts`, so that neighboring ranks, epochs and batches get unrelated streams."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def epoch_order(size: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the permutation of `size` indices for a seed and epoch, int64."""
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    return torch.randperm(size, generator=generator, device="cpu")


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy (if imported) and torch, including accelerators."""
    seed_cpu(seed)
    if torch.accelerator.is_available():
        torch.manual_seed(torch.initial_seed())


def seed_cpu(seed: int) -> None:
    """Seed the CPU generators of Python, NumPy (if imported) and torch."""
    random.seed(seed)
    # Not torch.manual_seed, which also seeds accelerators, and records the stack for each kind of them.
    torch.default_generator.manual_seed(seed if seed < 2**64 else derive_seed("large", seed))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


class set_seed:
    """Seed this rank's generators so that dropout and augmentation differ by rank.

    As a context manager, it seeds all ranks identically in the block and differently after it. Build the model inside::

        with paceline.set_seed(7):
            model = Net()

    Nested blocks and calls inside a block also seed all ranks identically. At the end of an inner block, the streams of
    the outer block continue. A checkpoint includes the streams (:func:`rng_state`). Before :func:`paceline.init`, the
    rank is read from the environment variable ``RANK``.

    Args:
        seed: a whole number >= 0, which may be a NumPy integer.

    Raises:
        UsageError: if `seed` or ``RANK`` is negative or not a whole number.
    """

    def __init__(self, seed: SupportsIndex) -> None:
        self._seed = whole_number("seed", seed, minimum=0)
        # Keep the streams of the surrounding block, in case this object is used as a context manager.
        self._around = rng_state() if _blocks else None
        if _blocks:
            seed_all(self._seed)
        else:
            self._differ()

    def _differ(self) -> None:
        seed_all(derive_seed("rank", self._seed, _rank()))

    def __enter__(self) -> None:
        around = (self._around or rng_state()) if _blocks else None
        self._around = None
        _blocks.append(around)
        seed_all(self._seed)

    def __exit__(self, *_: object) -> None:
        if (around := _blocks.pop()) is not None:
            set_rng_state(around)
        else:
            self._differ()


_blocks: list[dict[str, Any] | None] = []
"""The streams to restore after each open ``set_seed`` block, innermost last; None for the outermost."""


def _rank() -> int:
    """Return this process's rank in the process group, or the launcher's ``RANK`` before the group exists."""
    if dist.is_initialized():
        return dist.get_rank()
    rank_text = os.environ.get("RANK", "0")
    if not rank_text.isdecimal():
        raise UsageError(f"RANK={rank_text!r} is not a whole number >= 0; unset it to run as one process")
    return int(rank_text)


def rng_state() -> dict[str, Any]:
    """Return the state of this rank's generators, as tensors and plain values."""
    numpy = sys.modules.get("numpy")
    in_numpy = numpy.random.get_state() if numpy else None
    in_cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return rng_state_of(torch.get_rng_state(), random.getstate(), in_numpy, in_cuda)


def rng_state_of(
    in_torch: torch.Tensor, in_python: tuple[Any, ...], in_numpy: tuple[Any, ...] | None, in_cuda: torch.Tensor | None
) -> dict[str, Any]:
    """Assemble the result of :func:`rng_state`; the state of an unavailable generator is None."""
    version, words, gauss = in_python
    state: dict[str, Any] = {"torch": in_torch, "python": {"version": version, "words": list(words), "gauss": gauss}}
    if in_numpy is not None:
        kind, keys, position, has_gauss, cached = in_numpy
        state["numpy"] = {
            "kind": kind,
            "keys": torch.from_numpy(keys.astype("int64")),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        }
    if in_cuda is not None:
        state["cuda"] = in_cuda
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the generators to a `state` that :func:`rng_state` returned."""
    torch.set_rng_state(state["torch"])
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    if "numpy" in state:
        import numpy  # NumPy is not imported yet, but the saved run used it

        saved = state["numpy"]
        keys = saved["keys"].numpy().astype("uint32")
        numpy.random.set_state((saved["kind"], keys, saved["position"], saved["has_gauss"], saved["cached"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def fork_cpu_rng() -> Iterator[None]:
    """After the block, restore the CPU generators to their state before it.

    GPU generators are not restored, so a dataset that draws on a GPU uses the rank's stream.
    """
    numpy = sys.modules.get("numpy")
    in_torch, in_python = torch.get_rng_state(), random.getstate()
    in_numpy = numpy.random.get_state(legacy=False) if numpy else None
    try:
        yield
    finally:
        torch.set_rng_state(in_torch)
        random.setstate(in_python)
        if numpy and in_numpy is not None:
            numpy.random.set_state(in_numpy)
