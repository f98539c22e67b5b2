"""Exchange of small JSON values outside training steps: decisions by rank 0, and errors on any rank.

An error on one rank is raised on all ranks, so that none is left waiting. A single rank needs no communication and no
process group.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from paceline.core import strict_json
from paceline.core.missing_ranks import collective
from paceline.core.world import World, current
from paceline.errors import CheckpointError, CheckpointMismatch, DesyncError, NoCheckpoint, PacelineError, UsageError

_LIMIT = 2**40
"""Maximum message size in bytes. Effectively unlimited, because only our own ranks send messages."""
_KINDS: dict[str, type[PacelineError]] = {
    kind.__name__: kind for kind in (UsageError, CheckpointMismatch, CheckpointError, NoCheckpoint, DesyncError)
}


def here() -> World:
    """Return this rank's world; without a process group, a world of one rank on the CPU."""
    if dist.is_initialized():
        return current()
    return World(rank=0, size=1, local_rank=0, local_size=1, node=0, device=torch.device("cpu"))


def is_alone() -> bool:
    """Return whether this process is the only rank and was not started by our launcher or torchrun's."""
    # Spell out the name instead of importing it, because the launcher's package is above this package.
    return here().size == 1 and os.environ.keys().isdisjoint(("PACELINE_LAUNCHER", "TORCHELASTIC_RUN_ID"))


def decide(world: World, question: Callable[[], Any]) -> Any:
    """Return rank 0's answer to `question`, a JSON value, on every rank; only rank 0 calls `question`."""
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
        encode(reply)  # encode before the broadcast, so that other ranks also raise if the answer is not JSON
    except BaseException as error:
        _broadcast(_report(error))  # reply even after an error, because the other ranks are waiting
        raise
    _broadcast(reply)
    return answer


def agree(world: World, error: BaseException | None, value: Any = None) -> list[Any]:
    """Return every rank's `value`, a JSON value, or raise on every rank if any rank passes an `error`."""
    answers = gather(world, {"value": value} if error is None else _report(error))
    if error is not None:
        raise error
    for rank, answer in enumerate(answers):
        if "error" in answer:
            raise _error({**answer, "message": f"rank {rank}: {answer['message']}"})
    return [answer["value"] for answer in answers]


def error_of(function: Callable[..., Any], *arguments: Any) -> Exception | None:
    """Call `function` and return the exception that it raises, if any, to pass to :func:`agree`."""
    try:
        function(*arguments)
    except Exception as error:
        return error
    return None


def gather(world: World, value: Any) -> list[Any]:
    """Return every rank's `value`, a JSON value, on every rank, in rank order."""
    if world.size == 1:
        return [value]
    raw = encode(value)
    with collective("exchange of reports"):
        sizes = [int(size) for size in _all_gather(_size(raw))]
        padded = raw.new_zeros(max(sizes))
        padded[: raw.numel()] = raw
        texts = _all_gather(padded)
    return [decode(text[:size]) for text, size in zip(texts, sizes, strict=True)]


def _all_gather(row: torch.Tensor) -> list[torch.Tensor]:
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return rows


def _broadcast(value: Any) -> Any:
    """Return rank 0's JSON value on every rank."""
    with collective("broadcast of rank 0's decision"):
        raw = encode(value)  # on ranks other than 0, only a placeholder on the right device
        size = _size(raw)
        dist.broadcast(size, src=0)
        text = raw if dist.get_rank() == 0 else raw.new_empty(int(size))
        dist.broadcast(text, src=0)
    return value if dist.get_rank() == 0 else decode(text)


def _size(raw: torch.Tensor) -> torch.Tensor:
    return torch.tensor([raw.numel()], device=raw.device)


def carrier() -> torch.device:
    """Return the device for tensors to be sent: the CPU, unless the group has only NCCL."""
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
    """Return `error` as JSON, for other ranks to raise."""
    for error_type in type(error).__mro__:
        # Compare classes, because a script may define an error with the same name.
        if error_type.__name__ in _KINDS and _KINDS[error_type.__name__] is error_type:
            return {"error": error_type.__name__, "message": str(error)}
    return {"error": "CheckpointError", "message": f"{type(error).__name__}: {error}"}


def _error(report: dict[str, str]) -> PacelineError:
    return _KINDS[report["error"]](report["message"])
