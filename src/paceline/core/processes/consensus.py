"""Small JSON values that ranks share outside of training steps: a decision of rank 0, an error on any rank.

Whatever goes wrong on one rank becomes an error on all of them, so that none is left waiting. A world of one
does without any communication, and without a process group.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from paceline import errors
from paceline.core import strict_json
from paceline.core.processes.missing_ranks import collective
from paceline.core.processes.world import World, current

_LIMIT = 2**40  # bytes; these texts come from our own ranks
_KINDS: dict[str, type[errors.PacelineError]] = {
    kind.__name__: kind
    for kind in (
        errors.UsageError,
        errors.CheckpointMismatch,
        errors.CheckpointError,
        errors.NoCheckpoint,
        errors.DesyncError,
    )
}


def here() -> World:
    """Return this rank's world, which is one rank on the CPU if there is no process group."""
    if dist.is_initialized():
        return current()
    return World(rank=0, size=1, local_rank=0, local_size=1, node=0, device=torch.device("cpu"))


def is_alone() -> bool:
    """Return whether this process is no rank of a job: without other ranks, and not started by our launcher."""
    return here().size == 1 and "PACELINE_LAUNCHER" not in os.environ  # launch.record.LAUNCHER


def decide(world: World, question: Callable[[], Any]) -> Any:
    """Return rank 0's answer to `question`, a JSON value, on every rank; only rank 0 calls `question`.

    Raises:
        BaseException: what `question` raises, on rank 0; on the others a Paceline error of the same kind and
            with the same message, or a CheckpointError if it is no Paceline error.
    """
    if world.size == 1:
        return question()
    if world.rank != 0:
        reply = _broadcast(None)
        if "error" in reply:
            raise _error(reply)
        return reply["answer"]
    try:
        answer = question()
        reply = {"answer": answer}
        encode(reply)
    except BaseException as error:
        _broadcast(_report(error))
        raise
    _broadcast(reply)
    return answer


def agree(world: World, error: BaseException | None) -> None:
    """Return if every rank calls this with None; otherwise raise on every rank.

    Raises:
        BaseException: `error` itself where there is one; on the others an error of the same kind that names
            the first rank which had one.
    """
    reports = gather(world, None if error is None else _report(error))
    if error is not None:
        raise error
    for rank, report in enumerate(reports):
        if report is not None:
            raise _error({**report, "message": f"rank {rank}: {report['message']}"})


def error_of(function: Callable[..., Any], *arguments: Any) -> Exception | None:
    """Call `function`; return the exception that it raises, for :func:`agree`, or None."""
    try:
        function(*arguments)
    except Exception as error:
        return error
    return None


def gather(world: World, value: Any) -> list[Any]:
    """Return every rank's `value`, a JSON value, on every rank, in the order of ranks."""
    if world.size == 1:
        return [value]
    raw = encode(value)
    sizes = [torch.zeros(1, dtype=torch.int64, device=raw.device) for _ in range(world.size)]
    with collective("exchange of sizes"):
        dist.all_gather(sizes, torch.tensor([raw.numel()], device=raw.device))
    counts = [int(size) for size in sizes]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=raw.device)
    padded[: raw.numel()] = raw
    rows = [torch.empty_like(padded) for _ in range(world.size)]
    with collective("exchange of reports"):
        dist.all_gather(rows, padded)
    return [decode(row[:count]) for row, count in zip(rows, counts, strict=True)]


def _broadcast(value: Any) -> Any:
    """Return rank 0's JSON value on every rank."""
    with collective("broadcast of rank 0's decision"):
        if dist.get_rank() == 0:
            raw = encode(value)
            dist.broadcast(torch.tensor([raw.numel()], device=raw.device), src=0)
            dist.broadcast(raw, src=0)
            return value
        size = torch.zeros(1, dtype=torch.int64, device=carrier())
        dist.broadcast(size, src=0)
        raw = torch.empty(int(size), dtype=torch.uint8, device=carrier())
        dist.broadcast(raw, src=0)
        return decode(raw)


def carrier() -> torch.device:
    """Return the device that a tensor must be on to be sent: the CPU, unless the group has only NCCL."""
    configuration = str(dist.get_backend_config())
    return torch.device("cpu") if "cpu:" in configuration else current().device


def encode(value: Any) -> torch.Tensor:
    """Return the JSON value `value` as bytes on the :func:`carrier`."""
    return torch.frombuffer(bytearray(strict_json.render(value, limit=_LIMIT)), dtype=torch.uint8).to(carrier())


def decode(raw: torch.Tensor) -> Any:
    """Return the JSON value that :func:`encode` turned into `raw`."""
    raw = raw.cpu()
    return strict_json.parse(ctypes.string_at(raw.data_ptr(), raw.numel()), limit=_LIMIT)


def _report(error: BaseException) -> dict[str, str]:
    """Return `error` in a form from which other ranks can raise an error like it."""
    for error_type in type(error).__mro__:
        if error_type.__name__ in _KINDS and _KINDS[error_type.__name__] is error_type:
            return {"error": error_type.__name__, "message": str(error)}
    return {"error": "CheckpointError", "message": f"{type(error).__name__}: {error}"}


def _error(report: dict[str, str]) -> errors.PacelineError:
    return _KINDS[report["error"]](report["message"])
