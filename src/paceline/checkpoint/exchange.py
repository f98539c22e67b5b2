"""What ranks tell each other about a checkpoint: decisions, verdicts and tensors. No pickle; JSON and raw
bytes.

Whatever goes wrong on one rank becomes an error on all of them, so that none is left waiting. A world of one
does without any communication, and without a process group.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from paceline import errors
from paceline.checkpoint import documents
from paceline.checkpoint.tensorfile import Spec, stored
from paceline.rollcall import collective
from paceline.world import World, current

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
    """This rank's world; one rank on the CPU where there is no process group."""
    if dist.is_initialized():
        return current()
    return World(rank=0, size=1, local_rank=0, local_size=1, node=0, device=torch.device("cpu"))


def decide(world: World, question: Callable[[], Any]) -> Any:
    """Rank 0's answer to `question`, a JSON value, on every rank; `question` is asked on rank 0 only.

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
        _render(reply)
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
    """The exception that `function` raises, for :func:`agree`; None if it raises none."""
    try:
        function(*arguments)
    except Exception as error:
        return error
    return None


def gather(world: World, value: Any) -> list[Any]:
    """Every rank's `value`, a JSON value, on every rank; in the order of ranks."""
    if world.size == 1:
        return [value]
    raw = _as_tensor(_render(value))
    sizes = [torch.zeros(1, dtype=torch.int64, device=raw.device) for _ in range(world.size)]
    with collective("exchange of sizes"):
        dist.all_gather(sizes, torch.tensor([raw.numel()], device=raw.device))
    counts = [int(size) for size in sizes]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=raw.device)
    padded[: raw.numel()] = raw
    rows = [torch.empty_like(padded) for _ in range(world.size)]
    with collective("exchange of reports"):
        dist.all_gather(rows, padded)
    return [_parse(_as_bytes(row[:count])) for row, count in zip(rows, counts, strict=True)]


def broadcast_tensors(
    world: World, specs: Mapping[str, Spec], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Rank 0's `tensors`, which have `specs`, on the CPU of every rank; one collective a tensor."""
    if world.size == 1:
        return dict(tensors)
    received = {}
    for name, spec in specs.items():
        tensor = tensors[name] if world.rank == 0 else spec.empty()
        moved = _bytes_view(tensor).to(_carrier())
        if moved.numel():
            with collective(f"broadcast of {name!r}"):
                dist.broadcast(moved, src=0)
        received[name] = _back(moved, tensor) if world.rank != 0 else tensor
    return received


def send_tensors(to: int, specs: Mapping[str, Spec], tensors: Mapping[str, torch.Tensor]) -> None:
    """Send `tensors`, which have `specs`, to the rank `to`."""
    for name in specs:
        moved = _bytes_view(stored(tensors[name])).to(_carrier())
        if moved.numel():
            _send(moved, to)


def receive_tensors(source: int, specs: Mapping[str, Spec]) -> dict[str, torch.Tensor]:
    """The tensors that the rank `source` sends, on the CPU."""
    received = {}
    for name, spec in specs.items():
        tensor = spec.empty()
        moved = _bytes_view(tensor).to(_carrier())
        if moved.numel():
            _receive(moved, source)
        received[name] = _back(moved, tensor)
    return received


def send_document(to: int, value: Any) -> None:
    """Send the JSON value `value` to the rank `to`."""
    raw = _as_tensor(_render(value))
    _send(torch.tensor([raw.numel()], device=raw.device), to)
    _send(raw, to)


def receive_document(source: int) -> Any:
    """The JSON value that the rank `source` sends."""
    size = torch.zeros(1, dtype=torch.int64, device=_carrier())
    _receive(size, source)
    raw = torch.empty(int(size), dtype=torch.uint8, device=_carrier())
    _receive(raw, source)
    return _parse(_as_bytes(raw))


def _broadcast(value: Any) -> Any:
    """Rank 0's JSON value on every rank."""
    with collective("broadcast of rank 0's decision"):
        if dist.get_rank() == 0:
            raw = _as_tensor(_render(value))
            dist.broadcast(torch.tensor([raw.numel()], device=raw.device), src=0)
            dist.broadcast(raw, src=0)
            return value
        size = torch.zeros(1, dtype=torch.int64, device=_carrier())
        dist.broadcast(size, src=0)
        raw = torch.empty(int(size), dtype=torch.uint8, device=_carrier())
        dist.broadcast(raw, src=0)
        return _parse(_as_bytes(raw))


def _send(tensor: torch.Tensor, to: int) -> None:
    with collective(f"transfer from rank {dist.get_rank()} to rank {to}"):
        dist.send(tensor, dst=to)


def _receive(tensor: torch.Tensor, source: int) -> None:
    with collective(f"transfer from rank {source} to rank {dist.get_rank()}"):
        dist.recv(tensor, src=source)


def _carrier() -> torch.device:
    """Where a tensor must be to be sent: the CPU, unless the group has no backend for it (NCCL alone)."""
    configuration = str(dist.get_backend_config())
    return torch.device("cpu") if "cpu:" in configuration else current().device


def _render(value: Any) -> bytes:
    return documents.render(value, limit=_LIMIT)


def _parse(raw: bytes) -> Any:
    return documents.parse(raw, limit=_LIMIT)


def _as_tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(_carrier())


def _as_bytes(raw: torch.Tensor) -> bytes:
    raw = raw.cpu()
    return ctypes.string_at(raw.data_ptr(), raw.numel())


def _bytes_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of the contiguous `tensor` as bytes, so that any dtype can be sent."""
    return tensor.reshape(-1).view(torch.uint8)


def _back(moved: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with the bytes `moved` in it."""
    view = _bytes_view(tensor)
    if moved.data_ptr() != view.data_ptr():
        view.copy_(moved)
    return tensor


def _report(error: BaseException) -> dict[str, str]:
    """`error` so that other ranks can raise its like."""
    for kind in type(error).__mro__:
        if kind.__name__ in _KINDS and _KINDS[kind.__name__] is kind:
            return {"error": kind.__name__, "message": str(error)}
    return {"error": "CheckpointError", "message": f"{type(error).__name__}: {error}"}


def _error(report: dict[str, str]) -> errors.PacelineError:
    return _KINDS[report["error"]](report["message"])
