"""Bitwise comparison of copies of a checkpoint, for example from an uninterrupted and a resumed run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.format import manifest, safetensors_file, verify
from paceline.checkpoint.format.manifest import File, Manifest
from paceline.core import strict_json
from paceline.tools.checkpoints.inspection import Inspected


def differences(first: Inspected, second: Inspected) -> Iterator[str]:
    """Yield the differences between two checkpoints that have been verified.

    Manifests and notes are not compared, because versions, metadata and restarts may differ.
    """
    if first.manifest is None or second.manifest is None:
        without = first if first.manifest is None else second
        yield f"{without.path} has no readable manifest"
        return
    first_files, second_files = _tensor_files(first.manifest), _tensor_files(second.manifest)
    # The digests of undamaged files have been verified, so files with equal digests need not be read again.
    intact = not first.damages and not second.damages
    # Sorted as text, because a rank may be None, which cannot be compared with numbers.
    for key in sorted(first_files.keys() | second_files.keys(), key=str):
        first_file, second_file = first_files.get(key), second_files.get(key)
        if first_file is None or second_file is None:
            yield f"{_named(key)} is in {(first if second_file is None else second).path} only"
        elif not intact or first_file.sha256 != second_file.sha256:
            yield from _in_files(_named(key), first.path / first_file.path, second.path / second_file.path)
    yield from _in_values(first.path, second.path)


def count_tensors(contents: Manifest) -> int:
    """Return the number of tensors in a checkpoint."""
    return sum(len(file.tensors) for file in contents.files)


def _tensor_files(contents: Manifest) -> dict[tuple[str, int | None], File]:
    return {(file.role, file.rank): file for file in contents.files if file.path.endswith(".safetensors")}


def _named(key: tuple[str, int | None]) -> str:
    role, rank = key
    return repr(role) if rank is None else f"rank {rank}'s own state"


def _in_files(whose: str, first: Path, second: Path) -> Iterator[str]:
    try:
        with safetensors_file.opened(first) as file, safetensors_file.opened(second) as other:
            names, other_names = set(file.keys()), set(other.keys())
            for name in sorted(names | other_names):
                if name not in names or name not in other_names:
                    yield f"tensor {strict_json.shown(name)} of {whose} is in {first if name in names else second} only"
                elif (difference := _in_tensors(file.get_tensor(name), other.get_tensor(name))) is not None:
                    yield f"tensor {strict_json.shown(name)} of {whose} differs: {difference}"
    except (OSError, ValueError) as error:
        yield f"{whose} cannot be compared: {error}"


def _in_tensors(tensor: torch.Tensor, other: torch.Tensor) -> str | None:
    """Describe the first difference between two stored tensors."""
    if (spec := safetensors_file.spec_of(tensor)) != (other_spec := safetensors_file.spec_of(other)):
        return f"{spec.dtype} {list(spec.shape)} and {other_spec.dtype} {list(other_spec.shape)}"
    different = safetensors_file.bytes_view(tensor) != safetensors_file.bytes_view(other)
    # Not nonzero(), which needs 8 bytes of memory for each different byte.
    return f"from byte {int(different.view(torch.uint8).argmax())} of {different.numel()}" if different.any() else None


def _in_values(first: Path, second: Path) -> Iterator[str]:
    """Yield the objects whose plain values differ."""
    try:
        left, right = (strict_json.parse(verify.read_document(path / manifest.STATE)) for path in (first, second))
        if left == right:
            return
        left, right = _entries(left), _entries(right)
        for name in sorted(left.keys() | right.keys()):
            if left.get(name) != right.get(name):
                yield f"plain values of {name} differ"
    except (verify.Damaged, ValueError, AttributeError, TypeError, KeyError) as error:
        yield f"plain values cannot be compared: {error}"


def _entries(state: Any) -> dict[str, Any]:
    own = {f"rank {rank}'s {name!r}": node for rank, nodes in enumerate(state["ranks"]) for name, node in nodes.items()}
    return {**{repr(name): node for name, node in state["objects"].items()}, **own}
