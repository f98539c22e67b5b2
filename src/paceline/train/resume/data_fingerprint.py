"""A fingerprint of a data set that says how it changed: edited, appended to, cut, reordered.

It consists of hashes of rows, one per sample, of every column that can be inspected without reading a sample, see
:func:`paceline.core.state.digests.columns`. For a list of files only the names count, not the contents.

A tensor of up to ``MOST_WHOLE`` bytes is hashed completely. In other columns at most ``MOST_ROWS`` evenly spaced rows
are hashed, and at most ``MOST_BYTES`` of each row. An edit elsewhere is not detected.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from paceline.core.state.digests import quick_digest
from paceline.data.dataset_digest import columns, element_bytes

MOST_ROWS = 2**16
MOST_BYTES = 2**14
MOST_WHOLE = 2**28
_CHUNK = 2**24  # bytes that are copied at once
Fingerprint = dict[str, Any]
"""Plain values: a description of the data set and, for each column, a digest of its rows in order and one that does not
depend on the order."""


def fingerprint(dataset: Any, samples: int | None = None) -> Fingerprint:
    """Return the fingerprint of `dataset`, or of its first `samples`."""
    size = len(dataset) if hasattr(dataset, "__len__") else -1
    count = size if samples is None else min(samples, size)
    found: Fingerprint = {"class": type(dataset).__qualname__, "samples": count, "columns": {}}
    for name, values in columns(dataset):
        if isinstance(values, str):
            found["columns"][name] = {"text": values}
        else:
            found["columns"][name] = _of_column(values, count if len(values) == size else len(values))
    return found


def changes(dataset: Any, saved: Fingerprint) -> list[str]:
    """Describe how `dataset` differs from the one with the fingerprint `saved`; empty if it does not."""
    now = fingerprint(dataset)
    if now == saved:
        return []
    if now["class"] != saved["class"]:
        return [f"it is a {now['class']}, and was a {saved['class']}"]
    before, size = int(saved["samples"]), int(now["samples"])
    if size > before and fingerprint(dataset, before) == saved:
        return [f"{size - before} samples were appended to {before}"]
    found = [f"it has {size} samples, and had {before}"] if size != before else []
    for name in sorted(now["columns"].keys() | saved["columns"].keys()):
        ours, theirs = now["columns"].get(name), saved["columns"].get(name)
        if ours is None or theirs is None:
            found.append(f"{name} is {'new' if theirs is None else 'gone'}")
        elif ours != theirs and size == before:
            found.append(f"{name} {_difference(ours, theirs)}")
    return found


def _difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    if "text" in ours or "text" in theirs:
        return f"is {ours.get('text')!r}, and was {theirs.get('text')!r}"
    if ours["kind"] != theirs["kind"]:
        return f"has rows of {ours['kind']}, and had rows of {theirs['kind']}"
    if ours["rows"] != theirs["rows"]:
        return f"has {ours['rows']} rows, and had {theirs['rows']}"
    return "was reordered" if ours["any order"] == theirs["any order"] else "was edited"


def _of_column(values: Any, count: int) -> dict[str, Any]:
    """Return digests of the first `count` values."""
    if isinstance(values, Tensor) and values.layout is torch.strided:
        whole = values.numel() * values.element_size() <= MOST_WHOLE
        rows = list(range(count)) if whole else _chosen(count)
        hashes = _tensor_hashes(values, rows, MOST_WHOLE if whole else MOST_BYTES)
        kind = f"{list(values.shape[1:])} {str(values.dtype).removeprefix('torch.')}"
    else:
        rows = _chosen(count)
        hashes = torch.tensor([_short(element_bytes(values[row])) for row in rows], dtype=torch.int64)
        kind = type(values).__name__
    in_order = f"{int(quick_digest(hashes)) & (2**64 - 1):016x}"
    # A sum does not depend on the order.
    return {"kind": kind, "rows": count, "in order": in_order, "any order": int(hashes.sum())}


def _chosen(count: int) -> list[int]:
    """Return the numbers of the rows to look at: all of them, or evenly spaced ones with the first and the last."""
    if count <= MOST_ROWS:
        return list(range(count))
    return [number * (count - 1) // (MOST_ROWS - 1) for number in range(MOST_ROWS)]


def _tensor_hashes(values: Tensor, rows: list[int], most: int) -> Tensor:
    """Return a 64-bit hash of each of the `rows`, computed from at most `most` bytes of a row."""
    if values.numel() == 0:
        return torch.zeros(len(rows), dtype=torch.int64)
    flat = values.detach().reshape(len(values), -1) if values.dim() > 1 else values.detach().reshape(-1, 1)
    flat = flat[:, : max(1, most // values.element_size())]
    step = max(1, _CHUNK // max(1, flat.shape[1] * values.element_size()))
    hashes = []
    for begin in range(0, len(rows), step):
        part = flat[torch.tensor(rows[begin : begin + step], dtype=torch.int64, device=flat.device)].cpu().contiguous()
        hashes.append(_row_hashes(part))
    return torch.cat(hashes) if hashes else torch.zeros(0, dtype=torch.int64)


def _row_hashes(part: Tensor) -> Tensor:
    bytes_ = (torch.view_as_real(part) if part.is_complex() else part).reshape(len(part), -1).view(torch.uint8)
    padded = torch.zeros(len(part), -(-bytes_.shape[1] // 8) * 8, dtype=torch.uint8)
    padded[:, : bytes_.shape[1]] = bytes_
    words = padded.view(torch.int64)
    # A fixed seed, so that the random odd factors of this multiplicative hash are the same on every host.
    generator = torch.Generator().manual_seed(2**31 - 1)
    odd = 2 * torch.randint(-(2**62), 2**62, (words.shape[1],), generator=generator, dtype=torch.int64) + 1
    sums = ((words ^ (words >> 32)) * odd).sum(1)
    # 2**64 divided by the golden ratio, as a signed number: odd, with bits that look random.
    return (sums ^ (sums >> 29)) * -7046029254386353131  # high bits also matter when rows are summed


def _short(raw: bytes) -> int:
    return int.from_bytes(hashlib.sha256(raw).digest()[:8], "big", signed=True)
