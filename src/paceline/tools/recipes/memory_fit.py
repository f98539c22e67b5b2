"""Finds the number of micro-batches with which a global batch fits into the memory of every rank."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.processes import consensus
from paceline.core.state.rng import rng_state, set_rng_state
from paceline.core.state.saved_buffers import SavedBuffers
from paceline.core.state.unwrapping import Communicates, unwrap
from paceline.errors import UsageError

CPU_MESSAGES = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
"""Parts of the errors by which torch says on the CPU that memory is short."""


def find_accumulation(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], tuple[Tensor, float]],
    batch_of: Callable[[int], Any],
    batch_size: int,
    accumulate: int = 1,
) -> int:
    """Return the smallest number of micro-batches, from `accumulate` on, with which no rank runs out of memory.

    Every rank tries one forward and backward of the module alone, without gradients being averaged; if one of them
    fails, all cut the global batch into at least twice as many. Gradients, buffers and random streams are restored
    afterwards. Layers with collectives of their own run in eval mode meanwhile. The optimizer's state does not count
    unless the optimizer has stepped.

    Args:
        model: the wrapped model, or a bare one.
        loss: the Trainer's; see :data:`paceline.train.trainer.Loss`.
        batch_of: makes a micro-batch of so many samples for this rank, those that take most memory.
        batch_size: the global batch of a step, all ranks.
        accumulate: the number to begin with; divides `batch_size`.

    Raises:
        UsageError: on every rank, if one runs out of memory with a single sample; names it.
    """
    world = consensus.here()
    while True:
        rows = -(-batch_size // accumulate // world.size)  # of the rank that has most
        error = consensus.error_of(try_step, model, loss, batch_of, rows)
        is_short = error is not None and is_out_of_memory(error)
        consensus.agree(world, None if is_short else error)
        error = None  # its traceback holds the tensors of the attempt
        _free_memory()
        short = [rank for rank, fails in enumerate(consensus.gather(world, is_short)) if fails]
        if not short:
            return accumulate
        if rows <= 1:
            raise UsageError(
                f"rank {short[0]} runs out of memory with a micro-batch of one sample, so nothing is left to split; "
                "take a smaller model or shorter samples, compute in bf16, or use a device with more memory"
            )
        accumulate = next_divisor(batch_size, accumulate)
        if world.is_main:
            print(
                f"out of memory on rank {short[0]} with {rows} samples; the global batch of {batch_size} is cut into "
                f"{accumulate} micro-batches",
                flush=True,
            )


def next_divisor(number: int, divisor: int) -> int:
    """Return the smallest divisor of `number` that is at least twice `divisor`; `number` itself at last."""
    return next((each for each in range(2 * divisor, number) if number % each == 0), number)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that memory is short, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in CPU_MESSAGES)


def try_step(model: nn.Module, loss: Any, batch_of: Callable[[int], Any], rows: int) -> None:
    """Run one forward and backward of the module, and restore its gradients, buffers and modes."""
    module = unwrap(model)
    gradients = [parameter.grad for parameter in module.parameters()]
    buffers = SavedBuffers(module)
    modes = {part: part.training for part in module.modules()}
    streams = rng_state()
    try:
        for part in modes:
            if isinstance(part, Communicates | nn.SyncBatchNorm):
                part.eval()  # a rank that runs out of memory before it would leave the others in the collective
        for parameter in module.parameters():
            parameter.grad = None
        loss(module, batch_of(rows))[0].backward()
    finally:
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.grad = gradient
        buffers.restore()
        for part, mode in modes.items():
            part.training = mode
        set_rng_state(streams)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
